"""The `train` command in this process, on a tiny model: what it writes, sums up and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from infinite_sampling.cli import main
from infinite_sampling.run_directory import read_jsonl

# transformers announces the renaming of gradient checkpointing whenever TRL uses it.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning")


@pytest.fixture
def train(model_path, tmp_path, capsys):
    """Runs the command; returns its exit code and the last line of its output, or of its errors."""

    def train(*argv, **settings):
        settings = {
            "model": model_path,
            "dataset_size": 4,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "max_completion_length": 8,
            "rollout_num_slots": 3,
            "max_steps": 2,
            "save_strategy": "no",
            "gradient_checkpointing": "false",
            "use_cpu": "true",
            "output_dir": tmp_path / "run",
        } | settings
        flags = [f"--{name}={value}" for name, value in settings.items() if value is not None]
        code = main(["train", *flags, *argv, "--json"])
        out, err = capsys.readouterr()
        train.errors = err
        return code, json.loads(out.splitlines()[-1]) if code == 0 else err

    return train


def test_the_summary_counts_every_step_whatever_is_logged(train, tmp_path):
    code, every = train()
    assert code == 0 and every["steps"] == len(every["reward_by_step"]) == 2
    code, summary = train(logging_steps=2, output_dir=tmp_path / "windows")
    assert code == 0 and summary["logged_steps"] == [2] and len(summary["reward_by_step"]) == 1
    same = ("steps", "running_steps", "lower_bound_steps", "peak_kv_bytes", "max_logprob_gap")
    assert {name: summary[name] for name in same} == {name: every[name] for name in same}
    assert summary["tokens_per_second"] > 0


def test_resuming_goes_on_from_the_checkpoint_and_appends(train, tmp_path):
    folder = tmp_path / "run"
    code, whole = train(save_strategy="steps", save_steps=1)
    assert code == 0
    records = list(read_jsonl(folder / "completions.jsonl"))
    assert [record["train_step"] for record in records] == [0] * 4 + [1] * 4
    code, resumed = train(resume_from_checkpoint=folder / "checkpoint-1")
    assert code == 0 and resumed["steps"] == 2 and resumed["reward_by_step"] == whole["reward_by_step"][1:]
    assert list(read_jsonl(folder / "completions.jsonl")) == records + records[4:]
    assert [record["train_step"] for record in read_jsonl(folder / "metrics.jsonl") if "reward" in record] == [1, 2, 2]
    assert json.loads((folder / "run-2.json").read_text())["command"] == "train"
    code, err = train(resume_from_checkpoint=folder / "checkpoint-1", output_dir=tmp_path)
    assert code == 0, err  # a folder without a run
    code, err = train(resume_from_checkpoint=folder / "checkpoint-1", output_dir=tmp_path)
    assert code == 2 and "already holds a run" in err  # another run than that of the checkpoint


def test_what_cannot_be_resumed_is_refused_before_work(train, tmp_path):
    for settings, words in (
        ({"resume_from_checkpoint": tmp_path / "none"}, "checkpoint-<step>"),
        ({"resume_from_checkpoint": "true"}, "no checkpoint to resume from"),
    ):
        code, err = train(**settings)
        assert code == 2 and words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (("temperature", -1), "temperature must be a finite number above 0, got -1.0"),
        (("temperature", 0), "temperature must be a finite number above 0, got 0.0"),
        (("temperature", "nan"), "temperature must be a number, got nan"),
        (("top_p", 0), "top_p must be in (0, 1]"),
        (("max_completion_length", 0), "max_completion_length must be an integer of at least 1, got 0"),
        (("max_completion_length", 5000), "max_completion_length (5000) leaves no room"),
        (("report_to", "foo"), "report_to must name trackers that are installed"),
        (("seed", -1), "seed must be at least 0"),
        (("learning_rate", "nan"), "learning_rate must be a number, got nan"),
        (("learning_rate", -1), "learning_rate must be a finite number of at least 0"),
        (("adam_beta1", 2), "Invalid beta parameter"),  # found by torch, just before the first step
        (("per_device_train_batch_size", 0), "per_device_train_batch_size must be an integer of at least 1, got 0"),
        (("gradient_accumulation_steps", 0), "gradient_accumulation_steps must be an integer of at least 1, got 0"),
    ],
)
def test_a_wrong_setting_begins_no_run(train, tmp_path, setting, words):
    code, err = train(**dict([setting]))
    assert code == 2 and words in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize("value", ["None", "float('nan')"])
def test_steps_without_a_reward_are_reported_as_such(train, tmp_path, monkeypatch, value):
    (tmp_path / "no_rewards.py").write_text(
        f"def f(completions, **columns):\n    return [{value}] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "no_rewards", raising=False)
    code, summary = train(reward="no_rewards:f")
    assert code == 0 and summary["steps"] == 2 and summary["reward_by_step"] == [None, None]
    assert "step 2/2, reward none," in train.errors and "reward          none none" in train.errors
    assert len(list(read_jsonl(tmp_path / "run" / "completions.jsonl"))) == 8


def test_a_failing_reward_is_one_line_and_keeps_the_completions(train, tmp_path, monkeypatch):
    (tmp_path / "bad_rewards.py").write_text("def f(completions, **columns):\n    raise KeyError('boo')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, err = train(reward="bad_rewards:f")
    assert code == 2 and "'bad_rewards:f' raised KeyError: 'boo'" in err and "bad_rewards.py, line 2" in err
    assert len(err.splitlines()) == 1 and len(list(read_jsonl(tmp_path / "run" / "completions.jsonl"))) == 4


def test_the_last_whole_checkpoint_is_resumed_from(train, tmp_path):
    folder = tmp_path / "run"
    assert train(save_strategy="steps", save_steps=1)[0] == 0
    state = folder / "checkpoint-2" / "trainer_state.json"
    os.truncate(state, 50)
    code, err = train(resume_from_checkpoint=state.parent)
    assert code == 2 and "trainer_state.json is cut short" in err and len(err.splitlines()) == 1
    code, summary = train(resume_from_checkpoint="true")
    assert code == 0 and summary["steps"] == 2 and summary["logged_steps"] == [2]
    state.unlink()  # as after a kill while the checkpoint was written
    code, summary = train(resume_from_checkpoint="true")
    assert code == 0 and summary["logged_steps"] == [2]
    assert f"resuming from {folder / 'checkpoint-1'}, the last whole checkpoint (checkpoint-2: no" in train.errors
    (folder / "checkpoint-1" / "trainer_state.json").unlink()
    code, err = train(resume_from_checkpoint="true")
    assert code == 2 and "no checkpoint to resume from" in err and "checkpoint-1: no trainer_state.json" in err


def test_several_processes_must_name_their_folder(train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, err = train(output_dir=None)
    assert code == 2 and "give --output_dir" in err


@pytest.mark.slow
def test_two_processes_write_one_run_directory(model_path, tmp_path):
    folder = tmp_path / "run"
    settings = {
        "model": model_path,
        "dataset_size": 4,
        "num_generations": 4,
        "per_device_train_batch_size": 2,
        "max_completion_length": 8,
        "max_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": "false",
        "use_cpu": "true",
        "output_dir": folder,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "infinite_sampling.cli", "train", *flags, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    [line] = run.stdout.splitlines()
    assert json.loads(line)["steps"] == 1
    records = [list(read_jsonl(folder / f"completions{suffix}.jsonl")) for suffix in ("", ".rank1")]
    assert [len(rows) for rows in records] == [2, 2]
    assert len([log for log in read_jsonl(folder / "metrics.jsonl") if "reward" in log]) == 1
    assert sorted(path.name for path in folder.glob("*.json*")) == [
        "completions.jsonl",
        "completions.rank1.jsonl",
        "metrics.jsonl",
        "run.json",
        "trace.jsonl",
        "trace.rank1.jsonl",
    ]
