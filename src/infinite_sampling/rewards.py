"""Reward functions as TRL calls them: verifiers that score one answer, and functions of the user.

In: prompts, completions and columns, lists of equal length. Out: one float a completion. A verifier
that fails costs one completion its score; a function of the user that fails stops with its name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from infinite_sampling.config import ConfigError, nearest

logger = logging.getLogger(__name__)

SECONDS_PER_ANSWER = 5
"""A verifier that takes longer scores 0: an answer such as 9**9**9**9 would hold up training."""

Score = Callable[[str, Mapping[str, Any]], float]
"""The score of an answer's text, given the columns of its row."""


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not one reward a completion."""


class TimeUp(BaseException):
    """Not an Exception, so that a verifier that swallows those still stops."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp inside the block after `seconds`; in the main thread only, else no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(_signal: int, _frame: Any) -> None:
        raise TimeUp(f"no verdict within {seconds} s")

    handler = signal.signal(signal.SIGALRM, stop)
    delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, delay, interval)
        signal.signal(signal.SIGALRM, handler)


def completion_text(completion: Any) -> str:
    """The text to score: a plain completion itself, of a conversation the assistant's last message."""
    if isinstance(completion, str):
        return completion
    spoken = [message for message in completion if message.get("role") == "assistant"]
    content = spoken[-1].get("content") if spoken else None
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content if block.get("type") == "text")
    return content or ""


class VerifierReward:
    """A TRL reward function that scores each completion on its own.

    A verifier that raises or takes more than `SECONDS_PER_ANSWER` scores 0: malformed answers are
    what a policy in training writes. `num_errors` counts them, the first is logged, and TRL's log
    gets them as `rewards/<name>/verifier_errors`. In a thread other than the main one there is no
    time limit, since it rests on a signal.
    """

    def __init__(self, name: str, score: Score, column: str) -> None:
        """`column` is the column of the data set that `score` reads."""
        self.__name__ = name
        self._score = score
        self._column = column
        self.num_errors = 0

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """One score a completion. Raises RewardError where the column is missing or too short."""
        values = columns.get(self._column)
        if values is None or len(values) != len(completions):
            got = "no such column" if values is None else f"{len(values)} values"
            raise RewardError(
                f"the verifier of {self.__name__!r} needs column {self._column!r} with a value for each of "
                f"{len(completions)} completions, got {got}; train on the data set of the same task"
            )
        before = self.num_errors
        scores = [
            self._score_one(completion_text(completion), {self._column: value})
            for completion, value in zip(completions, values, strict=True)
        ]
        if log_metric := columns.get("log_metric"):
            log_metric(f"rewards/{self.__name__}/verifier_errors", float(self.num_errors - before))
        return scores

    def _score_one(self, text: str, row: Mapping[str, Any]) -> float:
        try:
            score = self._score(text, row)
            if math.isfinite(score):
                return score
            problem = f"returned {score}"
        except (Exception, TimeUp) as error:
            problem = f"raised {type(error).__name__}: {error}"
        if self.num_errors == 0:
            logger.warning(
                "the verifier of %s %s on %r (%s %r): it scores 0; later ones are only counted",
                *(self.__name__, problem, text[:80], self._column, row[self._column]),
            )
        self.num_errors += 1
        return 0.0


def gold_text(answer: str) -> str:
    """The answer itself: what follows the last "####" where there is one, as in GSM8K."""
    return answer.rsplit("####", maxsplit=1)[-1].strip()


def _math_timeout() -> int | None:
    """math-verify stops by an alarm signal, which a thread other than the main one cannot set."""
    return SECONDS_PER_ANSWER if threading.current_thread() is threading.main_thread() else None


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(f"\\boxed{{{gold_text(answer)}}}", parsing_timeout=_math_timeout())
    return parsed


def score_math(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if the text holds the mathematical answer of `row["answer"]`, else 0.0 (math-verify).

    Raises ValueError where math-verify finds nothing in the expected answer.
    """
    from math_verify import parse, verify

    gold = _gold(row["answer"])
    if not gold:
        raise ValueError("math-verify cannot read the expected answer")
    found = parse(text, parsing_timeout=_math_timeout())
    return float(verify(gold, found, timeout_seconds=_math_timeout()))


def import_reward(path: str) -> Callable[..., Any]:
    """The function that "module:function" names; the current folder is searched too.

    Raises ConfigError where the module does not import or holds no such function.
    """
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"a reward must be 'math' or module:function, got {path!r}")
    if os.getcwd() not in sys.path:  # a console script does not look where the user stands
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"cannot import the reward {path!r}: {type(error).__name__}: {error}; "
            "expected a module on the Python path or in the current folder"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        found = "has no such name" if function is None else f"holds a {type(function).__name__}, not a function"
        raise ConfigError(f"cannot use the reward {path!r}: the module {found}: {nearest(attribute, known)}")
    return function


def checked_reward(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """The user's reward function (or coroutine function), with its mistakes named.

    The wrapper returns a list of one float or None a completion. It raises RewardError, naming the
    function and where it can the row, if the function raises or returns anything else.
    """
    short: str = getattr(function, "__name__", type(function).__name__)
    name = name or short
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004

        async def checked_async(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
            try:
                rewards = await function(prompts=prompts, completions=completions, **columns)
            except Exception as error:
                raise _reward_raised(name, error, prompts) from error
            return _check_rewards(name, rewards, prompts)

        checked_async.__name__ = short
        return checked_async

    def checked(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        try:
            rewards = function(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            raise _reward_raised(name, error, prompts) from error
        return _check_rewards(name, rewards, prompts)

    checked.__name__ = short
    return checked


def _excerpt(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _reward_raised(name: str, error: Exception, prompts: Sequence[Any]) -> RewardError:
    first = f", the first of prompt {_excerpt(prompts[0])}" if prompts else ""
    *_, frame = traceback.extract_tb(error.__traceback__)
    place = "" if frame.filename == __file__ else f" ({frame.filename}, line {frame.lineno})"
    return RewardError(
        f"reward function {name!r} raised {type(error).__name__}: {error}, on {len(prompts)} completions{first}{place}"
    )


def _check_rewards(name: str, rewards: Any, prompts: Sequence[Any]) -> list[Any]:
    expected = f"expected a list of {len(prompts)} numbers (or None), one a completion"
    try:
        values = None if isinstance(rewards, (str, bytes, Mapping, Set)) else list(rewards)
    except TypeError:
        values = None
    if values is None:
        raise RewardError(f"reward function {name!r} returned {rewards!r}; {expected}")
    if len(values) != len(prompts):
        raise RewardError(f"reward function {name!r} returned {len(values)} rewards; {expected}")
    for row, value in enumerate(values):
        if value is None:
            continue
        try:
            values[row] = float(value)
            problem = isinstance(value, (str, bytes)) or math.isinf(values[row])
        except (TypeError, ValueError, OverflowError):
            problem = True
        if problem:
            raise RewardError(
                f"reward function {name!r} returned {value!r} for completion {row} (prompt {_excerpt(prompts[row])}); "
                f"{expected}"
            )
    return values
