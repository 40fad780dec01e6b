"""Prompt sources and the rewards that score their answers.

In: the name of a reasoning-gym task, a JSONL file, or a data set of the hub. Out: a `Task`, whose
data set has the columns TRL reads, and reward functions as TRL calls them. Knows nothing of models.

A reasoning-gym row carries its position (`task_index`) and not its metadata: tables would turn
tuples into lists and integer keys into text, which some verifiers do not survive. The position
finds the original entry, and generation is a function of the seed, so a resumed run finds it too.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from infinite_sampling.config import ConfigError, nearest
from infinite_sampling.prompts import conversation_problem
from infinite_sampling.rewards import (
    SECONDS_PER_ANSWER,
    Score,
    VerifierReward,
    checked_reward,
    gold_text,
    import_reward,
    score_math,
    time_limit,
)

logger = logging.getLogger(__name__)

PROMPT_FIELDS = ("prompt", "question", "problem")
"""Where the prompt is looked for, in this order."""
GYM_PREFIX = "reasoning_gym:"
GYM_SUFFIX = "Give only the final answer."
GYM_SIZE = 500
_TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL itself passes to a reward function: a column of that name would clash."""


@dataclass(frozen=True)
class Task:
    """Prompts and, where the source has one, the verifier of their answers.

    `dataset` has a column `prompt` (messages, or text where `chat` was off); `answer` (text) where
    the source has answers; `task_index` for reasoning-gym; and the other columns of the source.
    """

    name: str
    dataset: Dataset
    score: Score | None = None


def load_task(
    source: str,
    *,
    size: int | None = None,
    seed: int = 0,
    split: str = "train",
    subset: str | None = None,
    options: Mapping[str, Any] | None = None,
    suffix: str | None = None,
    chat: bool = True,
    prompt_field: str | None = None,
) -> Task:
    """The task that `source` names: equal arguments give equal rows in equal order.

    `source` is `reasoning_gym:<task>` or a bare task name; a JSONL file; or a hub id or local
    folder that `datasets.load_dataset` reads (`subset` is its configuration, `split` its split).
    `size` is the number of rows: of a file or data set the first ones, by default all.
    `options` configure a reasoning-gym task, `seed` makes other problems of it. `suffix` is a line
    put after each prompt (default "Give only the final answer." for reasoning-gym, else none).
    `chat` makes a user message of a prompt that is plain text.
    Raises ConfigError on an unknown or unreachable source, a bad option, or a row without a prompt.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigError(f"size must be an integer of at least 1, got {size!r}")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options must be a mapping of names to values, got {options!r}")
    gym_name = source.removeprefix(GYM_PREFIX)
    is_file = source.endswith((".jsonl", ".json")) or os.path.isfile(source)
    is_hub = "/" in source or os.path.isdir(source)
    if source.startswith(GYM_PREFIX) or not (is_file or is_hub):
        frame = functools.partial(_framed, suffix=GYM_SUFFIX if suffix is None else suffix, chat=chat)
        return _gym_task(gym_name, size or GYM_SIZE, seed, options or {}, frame)
    if options:
        raise ConfigError(f"options ({', '.join(options)}) belong to reasoning-gym tasks, but {source!r} is none")
    frame = functools.partial(_framed, suffix=suffix or "", chat=chat)
    candidates = PROMPT_FIELDS if prompt_field is None else (prompt_field,)
    if is_file:
        return Task(Path(source).stem, _read_jsonl(Path(source), size, candidates, frame))
    return Task(source, _read_hub(source, subset, split, size, candidates, frame))


def _framed(prompt: Any, *, suffix: str, chat: bool) -> Any:
    """The prompt with its suffix, as TRL takes it. Raises ValueError on what is no prompt."""
    if isinstance(prompt, str) and prompt.strip():
        text = f"{prompt}\n{suffix}" if suffix else prompt
        return [{"role": "user", "content": text}] if chat else text
    if problem := conversation_problem(prompt):
        raise ValueError(f"expected text or messages with 'role' and 'content': {problem}")
    if not suffix:
        return prompt
    last = prompt[-1]
    if not isinstance(last["content"], str):
        raise ValueError(f"a suffix needs a last message of text, got {last['content']!r}")
    return [*prompt[:-1], {**last, "content": f"{last['content']}\n{suffix}"}]


def _require(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'infinite-sampling[tasks]'")


def _gym_task(name: str, size: int, seed: int, options: Mapping[str, Any], frame: Callable[[Any], Any]) -> Task:
    _require("reasoning_gym", f"task {name}")
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise ConfigError(
            f"unknown task {name!r}: {nearest(name, DATASETS)}; or name a JSONL file, or a hub data set as owner/name"
        )
    known = {field.name for field in fields(DATASETS[name][1])} - {"seed", "size"}
    for key in options:
        if key not in known:
            raise ConfigError(f"task {name}: unknown option {key!r}: {nearest(key, known)}")
    # Row i is drawn from seed + i there, so that neighbouring seeds would share all rows but one.
    gym_seed = random.Random(seed).getrandbits(31)
    try:
        gym = create_dataset(name, seed=gym_seed, size=size, **options)
        entries = [gym[position] for position in range(size)]
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"task {name} cannot be made with options {dict(options)!r}: {reason}") from error
    rows = [
        {"prompt": frame(entry["question"]), "answer": str(entry["answer"]), "task_index": position}
        for position, entry in enumerate(entries)
    ]

    def score(text: str, row: Mapping[str, Any]) -> float:
        with time_limit(SECONDS_PER_ANSWER):
            return float(gym.score_answer(text.strip(), entries[row["task_index"]]))

    return Task(name, Dataset.from_list(rows), score)


def _read_jsonl(path: Path, size: int | None, candidates: Sequence[str], frame: Callable[[Any], Any]) -> Dataset:
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error}; name a JSONL file in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or len(rows) == size:
            continue
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise ConfigError(f"{path}, line {number}: nested too deep to be read, got {line[:60]!r}") from error
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: expected one JSON object a line, got {line[:60]!r}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
        row = _normal_row(row, f"{path}, line {number}", candidates, frame)
        if problem := _unstorable(row):
            raise ConfigError(f"{path}, line {number}: {problem}")
        rows.append(row)
    _check_size(str(path), size, len(rows))
    columns = dict.fromkeys(key for row in rows for key in row)  # the union, in order of appearance
    try:
        return _without_clashes(Dataset.from_dict({key: [row.get(key) for row in rows] for key in columns}))
    except RecursionError as error:
        raise ConfigError(f"{path}: a row is nested too deep for a table; flatten it") from error
    except Exception as error:  # pyarrow's own classes
        raise ConfigError(
            f"{path}: the values of a column must have one type on all lines (text and messages are two): {error}"
        ) from error


def _unstorable(row: Mapping[str, Any]) -> str | None:
    """What no column of a table can hold: the first such value of a row, or None."""
    left = [*row.items(), *((name, name) for name in row)]
    while left:
        name, value = left.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return f"the field {name!r} holds an integer past 64 bits; write it as text"
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return f"the field {name!r} holds half a character ({value[:60]!a}); mend its \\u escapes"
        elif isinstance(value, (list, dict)):
            left += [(name, item) for item in ([*value, *value.values()] if isinstance(value, dict) else value)]
    return None


def _read_hub(
    source: str,
    subset: str | None,
    split: str,
    size: int | None,
    candidates: Sequence[str],
    frame: Callable[[Any], Any],
) -> Dataset:
    try:
        dataset = load_dataset(source, subset, split=split)
    except Exception as error:  # unreachable, unknown, wrong subset or split: many classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot load split {split!r} of the data set {source!r}"
            f"{f' (subset {subset!r})' if subset else ''}: {reason}; check its name, subset and split, "
            "reach the hub, or name a JSONL file"
        ) from error
    _check_size(source, size, len(dataset))
    if size is not None:
        dataset = dataset.select(range(size))
    dataset = _without_clashes(dataset)

    def normalise(row: dict[str, Any], position: int) -> dict[str, Any]:
        return _normal_row(row, f"data set {source}, row {position}", candidates, frame)

    dropped = [field for field in candidates if field in dataset.column_names][:1]
    return dataset.map(normalise, with_indices=True, remove_columns=dropped, load_from_cache_file=False)


def _normal_row(
    row: dict[str, Any], place: str, candidates: Sequence[str], frame: Callable[[Any], Any]
) -> dict[str, Any]:
    """The row with its prompt under `prompt` and its answer as text."""
    field = next((name for name in candidates if name in row), None)
    if field is None:
        raise ConfigError(
            f"{place}: no prompt: expected a field {' or '.join(map(repr, candidates))}, got {', '.join(row) or 'none'}"
        )
    try:
        prompt = frame(row[field])
    except ValueError as error:
        raise ConfigError(f"{place}: the field {field!r} is no prompt: {error}") from error
    normal = {"prompt": prompt} | {key: value for key, value in row.items() if key not in (field, "prompt")}
    if normal.get("answer") is not None:
        normal["answer"] = str(normal["answer"])
    return normal


def _check_size(source: str, size: int | None, num_rows: int) -> None:
    if num_rows == 0:
        raise ConfigError(f"{source} holds no prompts; expected at least one row")
    if size is not None and num_rows < size:
        raise ConfigError(f"{source} holds {num_rows} rows, fewer than the size asked for ({size}); lower the size")


def _without_clashes(dataset: Dataset) -> Dataset:
    clashes = [name for name in _TRL_NAMES if name in dataset.column_names]
    if clashes:
        logger.warning("dropping the columns %s: TRL passes values of these names itself", ", ".join(clashes))
    return dataset.remove_columns(clashes)


def reward_for(task: Task, reward: str | None = None) -> Callable[..., Any]:
    """A reward function for `GRPOTrainer(reward_funcs=...)` over the data set of `task`.

    `reward` is None for the task's own verifier (reasoning-gym), else for math answers where there
    is a column `answer`; "math" for those in any case (math-verify; of an answer that holds "####",
    as GSM8K's do, what follows it); or "module:function" for a function of the user, of TRL's form.
    Raises ConfigError where the task has no such reward.
    """
    if reward is None and task.score is not None:
        return VerifierReward(task.name, task.score, "task_index")
    if reward is None or reward == "math":
        if "answer" not in task.dataset.column_names:
            raise ConfigError(
                f"no reward for {task.name!r}: its rows have no 'answer' to compare with "
                f"(columns: {', '.join(task.dataset.column_names)}); add one, or give a reward as module:function"
            )
        _require("math_verify", "the reward 'math'")
        for position, answer in enumerate(task.dataset["answer"]):
            if answer is None or not gold_text(answer):
                raise ConfigError(f"row {position} of {task.name!r} has no 'answer' to compare with; add it or drop it")
        return VerifierReward("math", score_math, "answer")
    return checked_reward(import_reward(reward), reward)
