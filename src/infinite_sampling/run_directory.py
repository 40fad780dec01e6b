"""The run directory: the one format that train, rollout, predictor and report share.

In: settings at the start, then events, completions and metrics as they happen. Out: `run.json`
(config, versions, commit, machine, seed), `completions.jsonl`, `trace.jsonl` (slot events) and
`metrics.jsonl`. Lines are appended and flushed one at a time: what finished is on disk, and a torn
last line is the worst that a killed run leaves. It knows nothing of models or trainers.

The run begins, and the folder is claimed, with `begin` or the first line: a run that fails before
leaves nothing behind. Of several processes the first writes these; process k writes its completions
and events to `completions.rank<k>.jsonl` and `trace.rank<k>.jsonl`, and no header.
"""

from __future__ import annotations

import errno
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from infinite_sampling.config import ConfigError
from infinite_sampling.engine import SlotEvent

_PACKAGES = ("infinite-sampling", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy")


class WriteError(OSError):
    """A line that could not be written: says which file, why, and what stays."""


class RunDirectory:
    """A folder being written.

    Args:
        path: created with its parents when the run begins; one that already holds a run is refused.
        config: the settings of the run, JSON-able.
        decode: token ids -> text, for the `text` of each completion; None leaves it out.
        resume: append to the run that is there. Its `run.json` stays, the new header is
            `run-2.json`, `run-3.json`, ...; what the interrupted run did past its checkpoint is
            done again and its lines stand twice, the later ones last.
        process_index: which of the processes that share the folder this is.

    Raises ConfigError where the folder cannot be written or already holds a run.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        command: str,
        config: Mapping[str, Any],
        seed: int,
        decode: Callable[[list[int]], str] | None = None,
        resume: bool = False,
        process_index: int = 0,
    ) -> None:
        self.path = Path(path)
        self.decode = decode
        self.begun = False
        self._header = {"command": command, "seed": seed, "config": config}
        self._resume, self._process_index = resume, process_index
        self._files: dict[str, TextIO] = {}
        if process_index == 0:
            with self._writing():
                if not resume and (self.path / "run.json").exists():
                    raise self._taken()
                _check_writable(self.path)

    def begin(self) -> None:
        """Make the folder and write the header; harmless twice. Raises ConfigError.

        Of processes that begin a run in one folder at one time, one gets it and the others raise.
        """
        if self.begun:
            return
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            if self._process_index == 0:
                header = json.dumps({**self._header, **describe_machine()}, indent=2, default=str) + "\n"
                names = itertools.chain(["run.json"], (f"run-{number}.json" for number in itertools.count(2)))
                while not _create(self.path / next(names), header):
                    if not self._resume:
                        raise self._taken()
        self.begun = True

    def _taken(self) -> ConfigError:
        return ConfigError(f"{self.path} already holds a run; name another output folder, or remove this one")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"cannot write the run directory {self.path}: {error.strerror}; name another") from error

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one line to `<name>.jsonl` (of this process); the first begins the run.

        Raises WriteError, and ConfigError where the run cannot begin.
        """
        self.begin()
        suffix = f".rank{self._process_index}" if self._process_index else ""
        path = self.path / f"{name}{suffix}.jsonl"
        try:
            if name not in self._files:
                _cut_torn_line(path)
                self._files[name] = open(path, "a", encoding="utf-8")  # noqa: SIM115 - kept open
            self._files[name].write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            self._files[name].flush()
        except OSError as error:
            with suppress(OSError, KeyError):  # what is left in its buffer would fail once more when closed later
                self._files.pop(name).close()
            raise WriteError(
                f"cannot write {path}: {error.strerror}; the lines before are whole: make room, then run again "
                "into another folder, or resume a training run"
            ) from error

    def event(self, event: SlotEvent, **extra: Any) -> None:
        """Write a slot event to the trace, and the completion that it brings.

        Running steps are not written one by one: starts and ends carry their step.
        """
        if event.kind == "step" or event.member is None:
            return
        where = {"prompt_index": event.member.prompt_index, "member_index": event.member.member_index}
        num_tokens = {} if event.completion is None else {"num_tokens": event.completion.num_tokens}
        if event.completion is not None:
            self.append("completions", {**extra, **completion_record(event.completion, self.decode)})
        self.append(
            "trace", {**extra, "event": event.kind, "step": event.step, "slot": event.slot, **where, **num_tokens}
        )

    def close(self) -> None:
        """Close the files; harmless twice."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def completion_record(completion: Any, decode: Callable[[list[int]], str] | None = None) -> dict[str, Any]:
    """A completion as one line of JSON, with its text where `decode` is given."""
    record = {
        "prompt_index": completion.prompt_index,
        "member_index": completion.member_index,
        "finish_reason": str(completion.finish_reason),
        "num_tokens": completion.num_tokens,
        "token_ids": completion.token_ids,
        "logprobs": [round(value, 6) for value in completion.logprobs],
        "sampling_logprobs": [round(value, 6) for value in completion.sampling_logprobs],
    }
    return record if decode is None else {"text": decode(completion.token_ids), **record}


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file that may still be written: a torn last line is left out.

    Raises ConfigError for a broken line that is not the last.
    """
    with open(path, "rb") as file:
        broken: int | None = None
        for number, line in enumerate(file, start=1):
            if broken is not None:
                raise ConfigError(f"{path}, line {broken}: not JSON")
            try:
                yield json.loads(line.decode("utf-8"))
            except ValueError:  # not JSON, or cut inside a character
                broken = number


def _cut_torn_line(path: Path) -> None:
    """Drop what a killed run left after its last whole line, so that a new line does not continue it."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 2**16)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        file.truncate(end)


def describe_machine() -> dict[str, Any]:
    """Versions, commit and machine of this process, and the time in UTC."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions,
        "commit": _commit(),
        "machine": {"system": platform.system(), "processor": _processor(), "num_cpus": os.cpu_count()},
    }


def _commit() -> str | None:
    """The commit this package runs from, where it runs from a checkout; `+` where files differ."""
    git = ["git", "-C", str(Path(__file__).parent)]
    # An environment may lie inside the checkout of something else: only one that tracks this file is ours.
    tracked, describe = ["ls-files", "--error-unmatch", Path(__file__).name], ["describe", "--always", "--abbrev=12"]
    try:
        for arguments in (tracked, [*describe, "--dirty=+"]):
            result = subprocess.run([*git, *arguments], capture_output=True, text=True, timeout=5, check=True)
        return result.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _check_writable(path: Path) -> None:
    """Raise the OSError that making this folder, or a file in it, will meet."""
    with suppress(FileNotFoundError):
        path.stat()  # refuses a name that is too long, or below a file
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"no permission to write in {folder}")


def _create(path: Path, text: str) -> bool:
    """Write a new file, whole or not at all; False where one of this name is there."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # no hard links on this file system
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True
