"""The benchmarks' arguments and arithmetic: what can be wrong before a model is loaded."""

from __future__ import annotations

import importlib
import json
import sys

import pytest


@pytest.fixture(params=["memory", "budget"])
def name(request):
    return request.param


@pytest.fixture
def load(root, monkeypatch):
    """Import a script as it is when run: its own folder comes first."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in ("memory", "budget", "peers"):
        if name not in before:
            sys.modules.pop(name, None)


def test_a_script_has_json_and_output_flags(load, name):
    arguments = load(name).parse_arguments(["--json", "--output", "x.json"])
    assert arguments.json and arguments.output == "x.json"


def test_a_wrong_flag_is_refused(load, name, capsys):
    with pytest.raises(SystemExit):
        load(name).parse_arguments(["--grups", "8"])
    assert "--grups" in capsys.readouterr().err


def test_a_count_below_one_is_refused(load, capsys):
    with pytest.raises(SystemExit):
        load("budget").parse_arguments(["--slots", "0"])
    assert "--slots must be at least 1" in capsys.readouterr().err


def test_an_unknown_peer_is_named(load):
    peers = load("peers")
    assert peers.asked_peers("vllm, hf-cb", ("vllm", "hf-cb")) == ["vllm", "hf-cb"]
    assert peers.asked_peers("", ("vllm",)) == []
    with pytest.raises(SystemExit, match="vlm"):
        peers.asked_peers("vlm", ("vllm", "hf-cb"))


def test_a_peer_without_its_environment_is_missing(load, tmp_path, capsys):
    present, absent = load("peers").split_missing(["hf-cb", "vllm"], tmp_path / "python")
    assert present == ["hf-cb"] and "make peers" in absent["vllm"]
    assert "missing peer vllm" in capsys.readouterr().err


def test_lengths_are_fixed_and_a_smaller_group_has_the_first_of_them(load):
    memory = load("memory")
    lengths = memory.draw_lengths(1024, 64)
    assert memory.draw_lengths(8, 64) == lengths[:8]
    assert min(lengths) >= 1 and max(lengths) == 64
    assert sum(length <= 16 for length in lengths) > 512


def test_the_budget_is_the_same_for_every_group_and_full_stays_feasible(load):
    memory = load("memory")
    jobs = memory.jobs_of([4, 32, 1024], slots=8, max_new_tokens=64, dtype="bfloat16")
    assert len({job["kv_budget_bytes"] for job in jobs} - {None}) == 1
    assert [job["group_size"] for job in jobs if job["policy"] == "full"] == [4, 32]
    for job in jobs:
        assert job["kv_budget_bytes"] is None or memory.plan(job) <= job["kv_budget_bytes"]


def test_a_peak_above_its_budget_is_named(load):
    row = {"group_size": 8, "policy": "fixed-slot", "peak_kv_bytes": 11, "kv_budget_bytes": 10}
    assert load("memory").excesses([row, {**row, "kv_budget_bytes": 11}, {**row, "kv_budget_bytes": None}]) == [
        "group size 8, policy fixed-slot: peak 11 bytes of KV exceeds the budget of 10"
    ]


def test_figure_4_grows_with_the_micro_group_and_not_with_the_group(load):
    rows = load("memory").figure4_by_arithmetic()
    kv = {(row["model"], row["group_size"], row["micro_group"]): row["kv_bytes"] for row in rows}
    assert len(kv) == len(rows) == 44
    per_token = 2 * 28 * 8 * 128 * 2
    assert kv["Qwen3-1.7B", 64, 4] == kv["Qwen3-1.7B", 8, 4] == (128 + 4 * 1024) * per_token
    assert kv["Qwen3-8B", 64, 64] > kv["Qwen3-8B", 64, 32] > kv["Qwen3-8B", 64, 1]


def test_the_budget_is_what_the_slots_and_the_prompts_they_hold_take(load):
    bytes_of = load("budget").budget_bytes
    sizes = {"group": 64, "max_new_tokens": 1024, "bytes_per_token": 10}
    assert bytes_of([100, 33], slots=8, **sizes) == (8 * 1024 + 128 + 64) * 10
    assert bytes_of([100, 33], slots=1, **sizes) == (1024 + 128) * 10


def test_ratios_are_given_by_wall_clock_and_by_token(load):
    budget = load("budget")
    runs = {"ours-budget": (2.0, [10, 10]), "vllm": (3.0, [10, 5])}
    rows = [budget.summarize(e, "1", [{"seconds": s, "lengths": n}]) for e, (s, n) in runs.items()]
    budget.add_ratios(rows)
    assert [row["ours_over_this_by_wall"] for row in rows] == [1.0, 1.5]
    assert [row["ours_over_this_by_token"] for row in rows] == [1.0, 2.0]
    assert rows[1]["preemptions"] is None and rows[1]["tokens"] == 15


def test_questions_that_are_not_there_are_an_error(load, tmp_path):
    read = load("budget").read_questions
    file = tmp_path / "gsm8k_test.jsonl"
    with pytest.raises(SystemExit, match="INFINITE_SAMPLING_SHARED_DATA"):
        read(file, 1)
    file.write_text("".join(json.dumps({"question": f"{i}?"}) + "\n" for i in range(2)))
    assert read(file, 2) == ["0?", "1?"]
    with pytest.raises(SystemExit, match="2 questions, asked 3"):
        read(file, 3)
