"""Sources become data sets, and answers become scores, whatever a policy in training writes."""

from __future__ import annotations

import json
import logging
import random
import threading
import time

import pytest
from reasoning_gym.factory import create_dataset

from infinite_sampling.config import ConfigError
from infinite_sampling.tasks import Task, load_task, reward_for

ONE_DIGIT = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def chat(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def score(task, reward, rows, completions):
    """What TRL does: the columns of the rows beside their completions."""
    chosen = task.dataset.select(rows)
    columns = {name: chosen[name][:] for name in chosen.column_names if name != "prompt"}
    return reward(prompts=chosen["prompt"][:], completions=completions, completion_ids=None, **columns)


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


# Sources


@pytest.mark.parametrize("name", ["chain_sum", "reasoning_gym:chain_sum"])
def test_gym_task_asks_for_the_final_answer(name):
    task = load_task(name, size=4, options=ONE_DIGIT)
    assert task.name == "chain_sum" and len(task.dataset) == 4
    for row in task.dataset:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        question, suffix = message["content"].split("\n")
        assert suffix == "Give only the final answer."
        expression = question.split(":")[1].removesuffix("=")
        assert eval(expression) == int(row["answer"])
        assert len(expression.split()) in (3, 5)


def test_gym_rows_are_a_function_of_the_seed():
    def rows(seed):
        return load_task("chain_sum", size=50, seed=seed).dataset.to_list()

    assert rows(3) == rows(3)
    for other in (2, 4):
        shared = {row["prompt"][0]["content"] for row in rows(3)} & {row["prompt"][0]["content"] for row in rows(other)}
        assert len(shared) < 5  # neighbouring seeds of reasoning-gym itself would share 49


def test_suffix_and_chat_can_be_chosen():
    task = load_task("chain_sum", size=1, suffix="", chat=False)
    assert task.dataset["prompt"][0].endswith("=")
    assert load_task("chain_sum", size=1, suffix="So?", chat=False).dataset["prompt"][0].endswith("=\nSo?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "chain_sums"}, "unknown task 'chain_sums': did you mean 'chain_sum'"),
        ({"source": "reasoning_gym:no/thing"}, "unknown task 'no/thing'"),
        ({"source": "chain_sum", "options": {"min_term": 2}}, "unknown option 'min_term': did you mean 'min_terms'"),
        ({"source": "chain_sum", "options": {"seed": 2}}, "unknown option 'seed'"),
        ({"source": "chain_sum", "options": {"min_terms": 5, "max_terms": 2}}, "cannot be made with options"),
        ({"source": "chain_sum", "size": 0}, "size must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_gym_tasks_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_task(**arguments)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="reasoning_gym: pip install"):
        load_task("chain_sum", size=1)


def test_jsonl_gives_prompts_and_keeps_its_other_columns(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    path = write(tmp_path / "some.jsonl", {"question": "1+1?", "answer": 2, "level": 3}, "", {"prompt": messages})
    task = load_task(path)
    assert task.name == "some" and task.score is None
    assert task.dataset.to_list() == [
        {"prompt": [{"content": "1+1?", "role": "user"}], "answer": "2", "level": 3},
        {"prompt": [{"content": m["content"], "role": m["role"]} for m in messages], "answer": None, "level": None},
    ]
    (first,) = load_task(path, size=1, suffix="Think.").dataset
    assert first["prompt"] == [{"role": "user", "content": "1+1?\nThink."}]


def test_prompt_wins_over_question_and_the_field_can_be_named(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "question": "q"})
    assert load_task(path, chat=False).dataset.to_list() == [{"prompt": "p", "question": "q"}]
    assert load_task(path, chat=False, prompt_field="question").dataset.to_list() == [{"prompt": "q"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: expected one JSON object a line, got '{not json'"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ('{"text": "x"}', "line 2: no prompt: expected a field 'prompt' or 'question' or 'problem', got text"),
        ('{"prompt": "  "}', "line 2: the field 'prompt' is no prompt: expected text"),
        ('{"prompt": 5}', "line 2: the field 'prompt' is no prompt"),
        ('{"prompt": []}', "line 2: the field 'prompt' is no prompt"),
        ('{"prompt": [{"role": "user"}]}', "line 2: .* messages with 'role' and 'content'"),
        ('{"prompt": [{"role": "user", "content": 5}]}', "line 2: .* the 'content' of message 0 must be text, got 5"),
        ('{"prompt": [{"role": "user", "content": null}]}', "line 2: .* message 0 must be text, got None"),
        ('{"prompt": [{"role": 5, "content": "x"}]}', "line 2: .* the 'role' of message 0 must be text, got 5"),
        ('{"prompt": [{"role": "user", "content": [{"text": "x"}]}]}', "line 2: .* join the blocks of text"),
        ('{"prompt": "a\\ud800"}', "line 2: the field 'prompt' holds half a character"),
        ('{"prompt": "a", "level": 18446744073709551616}', "line 2: the field 'level' holds an integer past 64 bits"),
        ('{"prompt": "a", "level": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: nested too deep"),
    ],
)
def test_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", {"prompt": "good"}, line)
    with pytest.raises(ConfigError, match=f"bad.jsonl, {message}"):
        load_task(path)


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the prompts in absent.jsonl"):
        load_task("absent.jsonl")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_task(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ConfigError, match=r"holds 1 rows, fewer than the size asked for .2."):
        load_task(write(tmp_path / "one.jsonl", {"prompt": "x"}), size=2)
    with pytest.raises(ConfigError, match="must have one type"):
        load_task(write(tmp_path / "mixed.jsonl", {"prompt": "x", "level": 1}, {"prompt": "y", "level": "hard"}))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        load_task(str(tmp_path / "latin.jsonl"))
    with pytest.raises(ConfigError, match=r"options .min_terms, .* belong to reasoning-gym"):
        load_task(write(tmp_path / "fine.jsonl", {"prompt": "x"}), options=ONE_DIGIT)
    with pytest.raises(ConfigError, match=r"options must be a mapping of names to values, got \[1\]"):
        load_task("chain_sum", options=[1])
    with pytest.raises(ConfigError, match="unknown task 'xxx"):
        load_task("x" * 300)


def test_line_separators_inside_text_do_not_split_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert load_task(str(path), chat=False).dataset["prompt"][0] == "a\u2028b"


def test_columns_that_trl_passes_itself_are_dropped_aloud(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "completions": "old", "kept": 1})
    assert load_task(path).dataset.column_names == ["prompt", "kept"]
    assert "dropping the columns completions" in caplog.text


def test_data_set_folder_goes_through_load_dataset(tmp_path):
    write(tmp_path / "train.jsonl", {"question": "1+1?", "answer": "so\n#### 2"}, {"question": "2+2?", "answer": "4"})
    task = load_task(str(tmp_path), size=1, suffix="Think.", split="train")
    assert task.dataset.column_names == ["answer", "prompt"] or task.dataset.column_names == ["prompt", "answer"]
    assert task.dataset.to_list() == [{"prompt": [{"role": "user", "content": "1+1?\nThink."}], "answer": "so\n#### 2"}]
    with pytest.raises(ConfigError, match="cannot load split 'tset'"):
        load_task(str(tmp_path), split="tset")
    with pytest.raises(ConfigError, match=r"row 0: no prompt: expected a field 'text', got question, answer"):
        load_task(str(tmp_path), prompt_field="text")


def test_unreachable_hub_data_set_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"cannot load split 'test' of the data set 'openai/gsm8k' .subset 'main'.:"):
        load_task("openai/gsm8k", split="test", subset="main")


# Verifiers


def test_gym_verifier_scores_plain_and_conversational_answers():
    task = load_task("chain_sum", size=2, options=ONE_DIGIT)
    reward = reward_for(task)
    right = task.dataset["answer"][:]
    assert reward.__name__ == "chain_sum"
    assert score(task, reward, [0, 1], [f" {right[0]}\n", f"{right[1]}.0"]) == [1.0, 1.0]
    assert score(task, reward, [1, 0], chat(right[1], "x")) == [1.0, 0.0]
    assert 0 < score(task, reward, [0], [f"The answer is {right[0]}"])[0] < 1
    assert score(task, reward, [0], [[]]) == [0.0]


def test_the_last_word_of_the_assistant_is_scored():
    task = load_task("chain_sum", size=1)
    answer = task.dataset["answer"][0]
    turns = [*chat("let me look")[0], {"role": "tool", "content": "0"}, *chat(answer)[0]]
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": answer}, {"type": "image"}]}]
    silent = [{"role": "assistant", "content": None}]
    assert score(task, reward_for(task), [0, 0, 0], [turns, blocks, silent]) == [1.0, 1.0, 0.0]


def test_verifier_sees_the_entry_itself_with_its_integer_keys():
    """A table would have turned the keys of the graph's solution into text."""
    task = load_task("graph_color", size=2, seed=7)
    entries = create_dataset("graph_color", size=2, seed=random.Random(7).getrandbits(31))
    solutions = [entry["metadata"]["possible_answer"] for entry in entries]
    assert all(type(key) is int for key in solutions[0])
    assert score(task, reward_for(task), [0, 1], [json.dumps(solution) for solution in solutions]) == [1.0, 1.0]


@pytest.mark.parametrize("name", ["knights_knaves", "rotate_matrix", "countdown"])
def test_verifier_finds_its_entry_after_shuffling(name):
    task = load_task(name, size=4)
    shuffled = Task(task.name, task.dataset.shuffle(seed=1), task.score)
    reward = reward_for(task)
    assert score(shuffled, reward, range(4), chat(*shuffled.dataset["answer"])) == [1.0] * 4
    assert reward.num_errors == 0


def test_verifier_that_raises_scores_zero_and_is_counted(caplog):
    task = load_task("prime_factorization", size=2)
    reward, metrics = reward_for(task), {}
    right = task.dataset["answer"][0]
    with caplog.at_level(logging.WARNING):
        scores = reward(
            prompts=["p"] * 3,
            completions=["two times five", right, "x"],
            task_index=[0, 0, 1],
            log_metric=metrics.__setitem__,
        )
    assert scores == [0.0, 1.0, 0.0] and reward.num_errors == 2
    assert metrics == {"rewards/prime_factorization/verifier_errors": 2.0}
    (warning,) = [record.message for record in caplog.records if "verifier" in record.message]
    assert "prime_factorization raised ValueError" in warning and "two times five" in warning


def test_verifier_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr("infinite_sampling.tasks.SECONDS_PER_ANSWER", 0.3)
    task = load_task("countdown", size=1)
    reward = reward_for(task)
    start = time.monotonic()
    assert score(task, reward, [0], ["9**9**9**9"]) == [0.0]
    assert time.monotonic() - start < 5 and reward.num_errors == 1
    assert score(task, reward, [0], [task.dataset["answer"][0]]) == [1.0]
    time.sleep(0.4)  # an alarm left behind would end the process


def test_score_that_is_no_number_is_an_error():
    task = Task("odd", load_task("gcd", size=1).dataset, lambda text, row: float("nan"))
    reward = reward_for(task)
    assert score(task, reward, [0], ["1"]) == [0.0] and reward.num_errors == 1


def test_rewards_of_another_data_set_are_refused():
    reward = reward_for(load_task("gcd", size=1))
    with pytest.raises(RuntimeError, match=r"'gcd' needs column 'task_index' .* 2 completions, got no such column"):
        reward(prompts=["p", "q"], completions=["1", "2"], answer=["1", "2"])
    with pytest.raises(RuntimeError, match="2 completions, got 1 values"):
        reward(prompts=["p", "q"], completions=["1", "2"], task_index=[0])


@pytest.fixture
def arithmetic(tmp_path):
    lines = [
        {"question": "a", "answer": "He has 3 * 4 = <<3*4=12>>12.\n#### 1,234"},
        {"question": "b", "answer": r"\left( 3, \frac{\pi}{2} \right)"},
        {"question": "c", "answer": "0.5"},
    ]
    return load_task(write(tmp_path / "arithmetic.jsonl", *lines))


MATH = [
    (0, "She pays 1234 dollars.", 1.0),
    (0, "#### 1,234", 1.0),
    (0, "12", 0.0),
    (0, "", 0.0),
    (1, r"Thus $\boxed{(3, \pi/2)}$.", 1.0),
    (1, r"Thus $\boxed{(3, \pi/3)}$.", 0.0),
    (2, "It is 1/2", 1.0),
    (2, r"$\boxed{\frac{1}{2", 0.0),
]


def test_math_answers_are_compared_as_mathematics(arithmetic):
    reward = reward_for(arithmetic)
    rows, texts, expected = zip(*MATH, strict=True)
    assert reward.__name__ == "math"
    assert score(arithmetic, reward, rows, list(texts)) == list(expected)
    assert score(arithmetic, reward, rows, chat(*texts)) == list(expected)
    assert reward.num_errors == 0


def test_math_answers_are_compared_in_a_worker_thread_too(arithmetic):
    rows, texts, expected = zip(*MATH, strict=True)
    reward, scores = reward_for(arithmetic, "math"), []
    worker = threading.Thread(target=lambda: scores.extend(score(arithmetic, reward, rows, list(texts))))
    worker.start()
    worker.join()
    assert scores == list(expected) and reward.num_errors == 0


def test_gym_task_can_be_scored_as_mathematics():
    task = load_task("chain_sum", size=1)
    reward = reward_for(task, "math")
    assert score(task, reward, [0], [f"The answer is {task.dataset['answer'][0]}."]) == [1.0]


def test_rows_without_answers_have_no_math_reward(tmp_path):
    with pytest.raises(ConfigError, match=r"no 'answer' to compare with .columns: prompt.*module:function"):
        reward_for(load_task(write(tmp_path / "a.jsonl", {"prompt": "x"})))
    with pytest.raises(ConfigError, match="row 1 of 'b' has no 'answer'"):
        reward_for(load_task(write(tmp_path / "b.jsonl", {"prompt": "x", "answer": "1"}, {"prompt": "y"})))
    with pytest.raises(ConfigError, match="row 0 of 'c' has no 'answer'"):  # as GSM8K's, cut short
        reward_for(load_task(write(tmp_path / "c.jsonl", {"prompt": "x", "answer": "2 + 2 = 4 ####"})))


# Rewards of the user


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A module in the folder where the user stands, with rewards good and bad."""
    (tmp_path / "my_rewards.py").write_text(
        "import numpy as np\n"
        "LIMIT = 3\n"
        "def length(prompts, completions, **columns):\n    return [len(c) for c in completions]\n"
        "async def slow(prompts, completions, **columns):\n    return [1.0 for c in completions]\n"
        "def array(completions, **columns):\n    return np.arange(len(completions)) > 0\n"
        "def unsure(completions, **columns):\n    return [None] * len(completions)\n"
        "def short(completions, **columns):\n    return [0.0]\n"
        "def text(completions, **columns):\n    return [1.0, 'good']\n"
        "def endless(completions, **columns):\n    return [1.0, float('inf')]\n"
        "def string(completions, **columns):\n    return '1' * len(completions)\n"
        "def strings(completions, **columns):\n    return ['1'] * len(completions)\n"
        "def nothing(completions, **columns):\n    return None\n"
        "def raises(completions, level, **columns):\n    return 1 / 0\n"
        "async def slow_raises(completions, **columns):\n    raise KeyError('gold')\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    monkeypatch.delitem(__import__("sys").modules, "my_rewards", raising=False)
    return load_task(write(tmp_path / "a.jsonl", {"prompt": "What now?"}))


BATCH = {"prompts": ["first", [{"role": "user", "content": "second"}]], "completions": ["ab", "c"], "level": [1, 2]}


@pytest.mark.parametrize(
    ("name", "expected"), [("length", [2.0, 1.0]), ("array", [0.0, 1.0]), ("unsure", [None, None])]
)
def test_user_rewards_come_through_as_floats(user, name, expected):
    reward = reward_for(user, f"my_rewards:{name}")
    rewards = reward(**BATCH)
    assert rewards == expected and reward.__name__ == name
    assert all(value is None or type(value) is float for value in rewards)


def test_async_user_rewards_stay_async_and_are_checked(user):
    import asyncio

    from trl.trainer.utils import is_async_callable

    reward = reward_for(user, "my_rewards:slow")
    assert is_async_callable(reward) and not is_async_callable(reward_for(user, "my_rewards:length"))
    assert asyncio.run(reward(**BATCH)) == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="'my_rewards:slow_raises' raised KeyError: 'gold', on 2 completions"):
        asyncio.run(reward_for(user, "my_rewards:slow_raises")(**BATCH))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "'my_rewards:short' returned 1 rewards; expected a list of 2 numbers"),
        ("nothing", "'my_rewards:nothing' returned None; expected a list of 2"),
        ("string", "'my_rewards:string' returned '11'; expected a list of 2 numbers"),
        ("strings", "'my_rewards:strings' returned '1' for completion 0"),
        ("text", "'my_rewards:text' returned 'good' for completion 1 .prompt 'second'."),
        ("endless", "'my_rewards:endless' returned inf for completion 1"),
        (
            "raises",
            "'my_rewards:raises' raised ZeroDivisionError: .* on 2 completions, .* 'first' .*my_rewards.py, line",
        ),
    ],
)
def test_mistakes_of_user_rewards_are_named(user, name, message):
    with pytest.raises(RuntimeError, match=message):
        reward_for(user, f"my_rewards:{name}")(**BATCH)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards", "must be 'math' or module:function, got 'my_rewards'"),
        (":length", "must be 'math' or module:function"),
        ("no_rewards_here:f", "cannot import the reward 'no_rewards_here:f': ModuleNotFoundError"),
        ("broken_rewards:f", "cannot import the reward 'broken_rewards:f': .*no_such_module_anywhere"),
        ("my_rewards:lenght", "has no such name: did you mean 'length'"),
        ("my_rewards:LIMIT", "holds a int, not a function"),
    ],
)
def test_rewards_that_cannot_be_imported_are_named(user, path, message):
    with pytest.raises(ConfigError, match=message):
        reward_for(user, path)
