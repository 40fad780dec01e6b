"""What finished is on disk, line by line, whatever happens next."""

from __future__ import annotations

import json

import pytest

from infinite_sampling.config import ConfigError
from infinite_sampling.engine import SlotEvent
from infinite_sampling.run_directory import RunDirectory, read_jsonl
from infinite_sampling.types import Completion, FinishReason, Member


def finish(member: int) -> SlotEvent:
    completion = Completion(0, member, [5, 6], [-0.5, -0.25], [-0.5, -0.25], FinishReason.EOS)
    return SlotEvent("finish", 4, 1, Member(0, member), completion)


def test_events_become_lines_at_once(tmp_path):
    directory = RunDirectory(tmp_path / "run", command="rollout", config={"a": 1}, seed=3, decode=str)
    directory.event(SlotEvent("start", 0, 1, Member(0, 2)))
    directory.event(SlotEvent("step", 1, num_active=1))
    directory.event(finish(2), train_step=9)
    # Read before closing: a killed run has lost nothing that finished.
    [completion] = read_jsonl(tmp_path / "run" / "completions.jsonl")
    assert completion["token_ids"] == [5, 6] and completion["finish_reason"] == "eos"
    assert completion["text"] == "[5, 6]" and completion["train_step"] == 9
    assert [line["event"] for line in read_jsonl(tmp_path / "run" / "trace.jsonl")] == ["start", "finish"]
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["seed"] == 3 and header["config"] == {"a": 1} and header["versions"]["torch"]
    directory.close()


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    RunDirectory(tmp_path, command="rollout", config={}, seed=0).close()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory(tmp_path, command="rollout", config={}, seed=0)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the run directory"):
        RunDirectory(tmp_path / "file" / "run", command="rollout", config={}, seed=0)


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_an_error(tmp_path):
    path = tmp_path / "completions.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert [record["a"] for record in read_jsonl(path)] == [1, 2]
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_jsonl(path))
