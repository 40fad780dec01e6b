"""The `train` command in this process, on a tiny model: what it writes, sums up and resumes."""

from __future__ import annotations

import json

import pytest

from infinite_sampling.cli import main

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
