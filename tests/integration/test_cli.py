"""The command line as a user meets it: real processes, exit codes, files."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest

from infinite_sampling.cli import main
from infinite_sampling.commands.config_file import read_config_file
from infinite_sampling.rewards import RewardError
from infinite_sampling.run_directory import RunDirectory, WriteError, read_jsonl
from infinite_sampling.trl import InfiniteGRPOConfig


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
        (["rollout", "--dataset_options", "[1]"], "dataset_options must be a JSON object"),
        (["rollout", "--dataset_options", "5"], "dataset_options must be a JSON object"),
        (["rollout", "--dataset_size", "0"], "dataset_size must be an integer of at least 1, got 0"),
        (["rollout", "--dataset", "x" * 300], "unknown task"),
        (["rollout", "--output_dir", "x" * 300], "File name too long"),
        (["rollout", "--num_slots", "abc"], "argument --num_slots/--num-slots: invalid int value: 'abc'"),
        (["rollout", "--num_slots"], "expected one argument"),
        (["memory", "--budget", "1KiB"], "the smallest that would do is"),
        (["memory", "--dtype", "int8"], "dtype must be one of"),
        (["train", "--rollout_policy", "dynamic-slot"], "favours short"),
        (["train", "--output_dir", "x" * 300], "File name too long"),
        (["train", "--reward", "no_such_module:f"], "no_such_module"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(capsys, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, *argv)
    assert not list(tmp_path.iterdir()), "nothing half done"


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        ("rollout", "num_generations: 2.5", "num_generations must be an integer, got 2.5"),
        ("memory", "num_generations: 2.5", "num_generations must be an integer, got 2.5"),
        ("rollout", "num_generations: [2, 3]", "num_generations must be an integer, got [2, 3]"),
        ("rollout", "num_generations: 2\nseed: 1\nnum_generations: 3", "the key 'num_generations' stands twice"),
        ("rollout", "stop: 5", "stop must be a list (each text) or null, got 5"),
        ("rollout", "eos_token_ids: 1.5", "eos_token_ids must be a list (each an integer) or null, got 1.5"),
        ("rollout", "dataset: 5", "dataset must be text, got 5; put it in quotes"),
        ("rollout", "dataset: [a]", "dataset must be text, got ['a']"),
        ("rollout", "output_dir: 5", "output_dir must be text or null, got 5"),
        ("rollout", "prompt_field: [a]", "prompt_field must be text or null, got ['a']"),
        ("rollout", "config: x.yaml", "unknown key 'config'"),
        ("rollout", "help: true", "unknown key 'help'"),
        ("rollout", "ignore_eos: 2", "ignore_eos must be true or false, got 2"),
        ("rollout", "model: é", "as YAML in UTF-8"),
        ("train", "save_strategy: no", "save_strategy must be text, got False; put it in quotes"),
        ("train", "learning_rate: fast", "learning_rate must be a number, got 'fast'"),
    ],
)
def test_a_wrong_value_in_a_config_file_is_named(capsys, monkeypatch, tmp_path, command, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_bytes(text.encode("latin-1"))
    assert words in fails(capsys, command, "--config", "config.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_config_file_may_say_all_that_flags_say(tmp_path, monkeypatch):
    monkeypatch.delenv("GREETING", raising=False)
    path = tmp_path / "config.yaml"
    path.write_text(
        "learning_rate: 1e-6\nresume_from_checkpoint: true\nscale_rewards: false\nreport_to: [a, b]\nmax_steps: '3'\n"
        "rollout_kv_budget: 1000\nreward_weights: 0.5\nmin_p: null\nmodel_init_kwargs: {a: 1}\nenv: {GREETING: 3}\n"
    )
    settings = read_config_file(path, [InfiniteGRPOConfig])
    assert settings == {
        "learning_rate": 1e-6,
        "resume_from_checkpoint": True,
        "scale_rewards": False,
        "report_to": ["a", "b"],
        "max_steps": 3,
        "rollout_kv_budget": 1000,
        "reward_weights": [0.5],
        "min_p": None,
        "model_init_kwargs": {"a": 1},
    }
    assert os.environ.pop("GREETING") == "3"


@pytest.fixture
def rollout(model_path, tmp_path, monkeypatch, capsys):
    """Runs the command on a tiny model in this process; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi there"}\n{"prompt": "Yo"}\n')

    def rollout(**settings):
        settings = {
            "model": model_path,
            "dataset": "prompts.jsonl",
            "num_generations": 2,
            "num_slots": 3,
            "max_new_tokens": 4,
            "device": "cpu",
            "output_dir": "run",
        } | settings
        code = main(["rollout", *(f"--{name}={value}" for name, value in settings.items() if value is not None)])
        return code, *capsys.readouterr()

    return rollout


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_generations": 0}, "num_generations must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 5000}, "leaves no room for a prompt in the model's 4096 positions"),
        ({"max_new_tokens": 4094}, "2 of 2 prompts are too long"),
        ({"model_revision": "main"}, "a revision belongs to a model of the hub"),
    ],
)
def test_a_corrected_command_can_use_the_same_folder(rollout, tmp_path, settings, words):
    code, out, err = rollout(**settings)
    assert code == 2 and not out and words in err and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    assert rollout()[0] == 0
    code, out, err = rollout()
    assert code == 2 and "already holds a run" in err


def test_runs_of_the_same_second_have_their_own_folders(rollout, tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    for _ in range(2):
        assert rollout(output_dir=None)[0] == 0
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert [len(list(read_jsonl(folder / "completions.jsonl"))) for folder in folders] == [4, 4]


def test_a_full_disk_loses_nothing_that_has_finished(rollout, tmp_path, monkeypatch):
    def append(self, name, record):
        if name == "completions" and (record["prompt_index"], record["member_index"]) == (1, 0):
            raise WriteError(f"cannot write {self.path / name}.jsonl: No space left on device; make room")
        whole(self, name, record)

    whole = RunDirectory.append
    monkeypatch.setattr(RunDirectory, "append", append)
    code, out, err = rollout(num_slots=1, policy="micro")
    assert code == 1
    assert err == "infinite-sampling: error: cannot write run/completions.jsonl: No space left on device; make room\n"
    shown = [json.loads(line) for line in out.splitlines()]
    assert [(line["prompt_index"], line["member_index"]) for line in shown] == [(0, 0), (0, 1), (1, 0)]
    assert list(read_jsonl(tmp_path / "run" / "completions.jsonl")) == shown[:2]


def test_a_tokenizer_without_template_takes_plain_text_only(rollout, model_path, tokenizer, tmp_path, caplog):
    shutil.copytree(model_path, tmp_path / "base")
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    (tmp_path / "base" / "chat_template.jinja").unlink()
    plain.save_pretrained(tmp_path / "base")
    code, out, err = rollout(model="base")
    assert code == 0 and len(out.splitlines()) == 4
    assert caplog.text.count("has no chat template: prompts of plain text are given as text") == 1
    (tmp_path / "talk.jsonl").write_text('{"prompt": [{"role": "user", "content": "Hi"}]}\n')
    code, out, err = rollout(model="base", dataset="talk.jsonl", output_dir="other")
    assert code == 2 and "prompt 0 is a conversation but the tokenizer has no chat template" in err


def test_torn_weights_are_one_line(rollout, model_path, tmp_path):
    shutil.copytree(model_path, tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    code, _, err = rollout(model="torn")
    assert code == 2 and "cannot load the model of 'torn'" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"), [(FloatingPointError("NaN\nlogits"), 2), (RewardError("bad"), 2), (OSError(28, "No space"), 1)]
)
def test_what_fails_while_working_is_one_line(capsys, monkeypatch, error, code):
    def failing(argv, program):
        raise error

    monkeypatch.setattr("infinite_sampling.commands.rollout.main", failing)
    assert main(["rollout"]) == code
    assert capsys.readouterr().err == f"infinite-sampling: error: {' '.join(str(error).split())}\n"


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
