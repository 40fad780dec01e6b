"""What finished is on disk, line by line, whatever happens next."""

from __future__ import annotations

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infinite_sampling import run_directory
from infinite_sampling.config import ConfigError
from infinite_sampling.engine import SlotEvent
from infinite_sampling.run_directory import RunDirectory, WriteError, read_jsonl
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
    RunDirectory(tmp_path, command="rollout", config={}, seed=0).begin()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory(tmp_path, command="rollout", config={}, seed=0)


def test_a_run_that_fails_before_it_begins_leaves_nothing(tmp_path):
    for _ in range(2):
        RunDirectory(tmp_path / "a" / "run", command="rollout", config={}, seed=0).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_links", [True, False])
def test_one_of_several_that_begin_in_one_folder_gets_it(tmp_path, monkeypatch, has_links):
    def link(source, target):
        raise PermissionError(1, "Operation not permitted")

    if not has_links:  # as on exFAT and some network folders
        monkeypatch.setattr("os.link", link)
    rivals = [RunDirectory(tmp_path / "run", command="rollout", config={"a": n}, seed=0) for n in range(8)]
    barrier = threading.Barrier(len(rivals))

    def begin(rival):
        barrier.wait()
        try:
            with rival:
                rival.append("completions", rival._header["config"])
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(rivals)) as pool:
        errors = list(pool.map(begin, rivals))
    [winner] = [n for n, error in enumerate(errors) if error is None]
    assert all("already holds a run" in error for error in errors if error)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["completions.jsonl", "run.json"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == {"a": winner}
    assert list(read_jsonl(tmp_path / "run" / "completions.jsonl")) == [{"a": winner}]


def test_a_full_disk_is_one_error_with_the_path_and_closing_is_harmless(tmp_path):
    with RunDirectory(tmp_path, command="rollout", config={}, seed=0) as directory:
        directory.event(finish(1))
        directory._files["completions"].close()
        directory._files["completions"] = open("/dev/full", "a")  # noqa: SIM115 - the directory closes it
        with pytest.raises(
            WriteError, match=r"cannot write .*completions.jsonl: No space left on device; .* make room"
        ):
            directory.event(finish(2))
    assert [record["member_index"] for record in read_jsonl(tmp_path / "completions.jsonl")] == [1]


def test_a_resumed_run_appends_behind_the_last_whole_line(tmp_path):
    with RunDirectory(tmp_path, command="train", config={"a": 1}, seed=0) as directory:
        directory.append("metrics", {"step": 1})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write('{"text": "é'.encode()[:-1])  # killed inside a character
    for resumption in (2, 3):
        with RunDirectory(tmp_path, command="train", config={"a": resumption}, seed=0, resume=True) as directory:
            directory.append("metrics", {"step": resumption})
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == [{"step": 1}, {"step": 2}, {"step": 3}]
    for number, name in enumerate(("run.json", "run-2.json", "run-3.json"), start=1):
        assert json.loads((tmp_path / name).read_text())["config"] == {"a": number}


def test_resuming_into_a_new_folder_begins_a_run(tmp_path):
    RunDirectory(tmp_path, command="train", config={}, seed=0, resume=True).begin()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("size", [0, 2**16 - 1, 2**16, 2**17 + 5])
def test_a_torn_line_of_any_length_is_cut(tmp_path, size):
    path = tmp_path / "trace.jsonl"
    for head in ("", '{"a": 1}\n'):
        path.write_text(head + "x" * size)
        with RunDirectory(tmp_path, command="train", config={}, seed=0, resume=True) as directory:
            directory.append("trace", {"b": 2})
        assert path.read_text() == head + '{"b": 2}\n'


def test_processes_share_a_folder_and_no_file(tmp_path):
    for rank in (1, 0, 2):
        with RunDirectory(tmp_path, command="train", config={}, seed=0, process_index=rank) as directory:
            directory.event(finish(rank))
    for rank, suffix in enumerate(("", ".rank1", ".rank2")):
        [completion] = read_jsonl(tmp_path / f"completions{suffix}.jsonl")
        [event] = read_jsonl(tmp_path / f"trace{suffix}.jsonl")
        assert completion["member_index"] == event["member_index"] == rank
    assert [path.name for path in tmp_path.glob("*.json")] == ["run.json"]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="cannot write the run directory"):
            RunDirectory(path, command="rollout", config={}, seed=0)


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_an_error(tmp_path):
    path = tmp_path / "completions.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert [record["a"] for record in read_jsonl(path)] == [1, 2]
    path.write_bytes('{"a": 1}\n{"a": "é'.encode()[:-1])
    assert [record["a"] for record in read_jsonl(path)] == [1]
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_jsonl(path))


def test_only_a_checkout_that_tracks_this_package_names_the_commit(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "module.py").write_text("")
    (tmp_path / "other.py").write_text("")
    for arguments in (["init", "-q"], ["add", "other.py"], ["commit", "-q", "-m", "message"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(run_directory, "__file__", str(tmp_path / "module.py"))
    assert run_directory._commit() is None
    monkeypatch.setattr(run_directory, "__file__", str(tmp_path / "other.py"))
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert run_directory._commit() == commit[:12]
