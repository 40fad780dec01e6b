"""The run directory: the one format that train, rollout, predictor and report share.

In: settings at the start, then events, completions and metrics as they happen. Out: `run.json`
(config, versions, commit, machine, seed), `completions.jsonl`, `trace.jsonl` (slot events) and
`metrics.jsonl`. Lines are appended and flushed one at a time: what finished is on disk, and a torn
last line is the worst that a killed run leaves. It knows nothing of models or trainers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from infinite_sampling.config import ConfigError
from infinite_sampling.engine import SlotEvent

_PACKAGES = ("infinite-sampling", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy")


class RunDirectory:
    """A folder being written.

    Args:
        path: created with its parents; one that already holds a run is refused.
        config: the settings of the run, JSON-able.
        decode: token ids -> text, for the `text` of each completion; None leaves it out.

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
    ) -> None:
        self.path = Path(path)
        self.decode = decode
        self._files: dict[str, TextIO] = {}
        if (self.path / "run.json").exists():
            raise ConfigError(f"{self.path} already holds a run; name another output folder, or remove this one")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            header = {"command": command, "seed": seed, "config": config, **describe_machine()}
            _replace(self.path / "run.json", json.dumps(header, indent=2, default=str) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write the run directory {self.path}: {error}") from error

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one line to `<name>.jsonl`. Raises OSError as the file system does."""
        if name not in self._files:
            self._files[name] = open(self.path / f"{name}.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - kept open
        self._files[name].write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self._files[name].flush()

    def event(self, event: SlotEvent, **extra: Any) -> None:
        """Write a slot event to the trace, and the completion that it brings.

        Running steps are not written one by one: starts and ends carry their step.
        """
        if event.kind == "step" or event.member is None:
            return
        where = {"prompt_index": event.member.prompt_index, "member_index": event.member.member_index}
        num_tokens = {} if event.completion is None else {"num_tokens": event.completion.num_tokens}
        self.append(
            "trace", {**extra, "event": event.kind, "step": event.step, "slot": event.slot, **where, **num_tokens}
        )
        if event.completion is not None:
            self.append("completions", {**extra, **completion_record(event.completion, self.decode)})

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
    with open(path, encoding="utf-8") as file:
        broken: int | None = None
        for number, line in enumerate(file, start=1):
            if broken is not None:
                raise ConfigError(f"{path}, line {broken}: not JSON")
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                broken = number


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
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
