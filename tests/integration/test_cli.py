"""The command line as a user meets it: real processes, exit codes, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from infinite_sampling.cli import main
from infinite_sampling.run_directory import read_jsonl


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run `infinite-sampling` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "infinite_sampling.cli", *argv]
    return subprocess.run(program, capture_output=True, text=True, env=environment, timeout=600)


def fails(capsys, *argv: str) -> str:
    """The one line that a wrong call prints."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("infinite-sampling: error: ") and len(err.splitlines()) == 1
    return err


def test_the_bare_command_lists_the_commands(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("train", "rollout", "memory"))


def test_an_unknown_command_flag_or_key_suggests_the_nearest(capsys, tmp_path):
    assert "did you mean 'memory'" in fails(capsys, "memry")
    assert "did you mean '--num_slots'" in fails(capsys, "rollout", "--num_slot", "3")
    config = tmp_path / "config.yaml"
    config.write_text("num_generation: 3\n")
    assert "unknown key 'num_generation': did you mean 'num_generations'" in fails(
        capsys, "rollout", "--config", str(config)
    )
    assert "did you mean 'num_generations'" in fails(capsys, "train", "--config", str(config))
    config.write_text("- 1\n")
    assert "must hold a mapping" in fails(capsys, "train", "--config", str(config))
    assert "cannot read the config file" in fails(capsys, "train", "--config", str(tmp_path / "none.yaml"))


def test_a_config_file_is_read_in_both_forms_and_once(capsys, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("num_generations: 0\n")
    for flags in (["--config", str(config)], [f"--config={config}"]):
        assert "num_generations must be at least 1, got 0" in fails(capsys, "memory", *flags)
    assert "more than once" in fails(capsys, "memory", f"--config={config}", "--config", str(config))
    assert "cannot read the config file" in fails(capsys, "memory", "--config=")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rollout", "--num_slots", "0"], "num_slots must be an integer of at least 1"),
        (["rollout", "--device", "mps"], "device must be cpu, cuda or cuda:N, got 'mps'"),
        (["rollout", "--device", "gpu"], "device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["rollout", "--device", "cuda:99"], "no device 'cuda:99': torch finds"),
        (["rollout", "--policy", "fixd-slot"], "did you mean 'fixed-slot'"),
        (["rollout", "--policy", "oracle"], "not available in this version"),
        (["rollout", "--temperature", "nan"], "temperature"),
        (["rollout", "--dataset", "chain_sun"], "did you mean"),
        (["rollout", "--dataset", "missing.jsonl"], "missing.jsonl"),
        (["rollout", "--model", "./no/such/model"], "no/such/model"),
        (["rollout", "--dataset_options", "{"], "must be a JSON object"),
        (["memory", "--budget", "1KiB"], "the smallest that would do is"),
        (["memory", "--dtype", "int8"], "dtype must be one of"),
        (["train", "--rollout_policy", "dynamic-slot"], "favours short"),
        (["train", "--rollout_kv_budget", "1GiB"], "not available in this version"),
        (["train", "--reward", "no_such_module:f"], "no_such_module"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(capsys, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, *argv)
    assert not list(tmp_path.iterdir()), "nothing half done"


def test_cuda_is_refused_where_there_is_none(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "torch finds 0 CUDA devices" in fails(capsys, "rollout", "--device", "cuda")


@pytest.mark.parametrize(("name", "writes"), [("memory", False), ("rollout", True), ("train", True)])
def test_an_interruption_speaks_of_a_run_directory_only_where_there_can_be_one(capsys, monkeypatch, name, writes):
    def interrupted(argv, program):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"infinite_sampling.commands.{name}.main", interrupted)
    assert main([name]) == 130
    err = capsys.readouterr().err
    assert "interrupted" in err and ("run directory" in err) == writes


def test_a_broken_jsonl_line_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": \n')
    assert "rows.jsonl" in (err := fails(capsys, "rollout", "--dataset", "rows.jsonl")) and "2" in err


def test_memory_counts_before_loading_weights():
    run = command("memory", "--num_generations", "64", "--num_slots", "4", "--json")
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout.splitlines()[-1])
    assert plan["weight_bytes"] == 134_515_008 * 4
    assert plan["kv_bytes"] == plan["prompt_kv_bytes"] + 4 * plan["member_kv_bytes"]


@pytest.mark.slow
def test_rollout_writes_jsonl_out_and_a_run_directory(tmp_path):
    folder = tmp_path / "run"
    settings = {"dataset": "chain_sum", "dataset_size": 2, "num_generations": 3, "num_slots": 2, "max_new_tokens": 6}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    run = command("rollout", *flags, "--output_dir", str(folder))
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert sorted((line["prompt_index"], line["member_index"]) for line in lines) == [
        (p, m) for p in range(2) for m in range(3)
    ]
    assert list(read_jsonl(folder / "completions.jsonl")) == lines
    [stats] = read_jsonl(folder / "metrics.jsonl")
    assert stats["num_tokens"] == sum(line["num_tokens"] for line in lines)
    assert json.loads((folder / "run.json").read_text())["config"]["num_slots"] == 2
    assert "running steps" in run.stderr
    again = command("rollout", *flags, "--output_dir", str(folder))
    assert again.returncode == 2 and "already holds a run" in again.stderr


@pytest.mark.slow
def test_train_learns_from_yaml_with_flags_over_it(tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text(
        "dataset: chain_sum\ndataset_size: 4\nreward: math\nnum_generations: 4\nmax_completion_length: 8\n"
        "rollout_num_slots: 3\nmax_steps: 9\nper_device_train_batch_size: 4\nlogging_steps: 1\nbf16: false\n"
        "gradient_checkpointing: false\nsave_strategy: 'no'\nlora_r: 4\nuse_cpu: true\n"
    )
    folder = tmp_path / "run"
    run = command("train", "--config", str(config), "--max_steps", "2", "--output_dir", str(folder), "--json")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["steps"] == len(summary["reward_by_step"]) == 2
    assert 0 < summary["lower_bound_steps"] <= summary["running_steps"]
    assert summary["peak_kv_bytes"] > 0 and summary["max_logprob_gap"] < 1e-3
    assert len(list(read_jsonl(folder / "completions.jsonl"))) == 8
    assert {line["event"] for line in read_jsonl(folder / "trace.jsonl")} == {"start", "finish"}
    assert (folder / "final" / "adapter_model.safetensors").exists()
