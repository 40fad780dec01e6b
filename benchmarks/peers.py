"""What the comparisons share: decoders in processes of their own, and which of them can run here.

In: a command line. Out: a process that answers each line on its standard input with a line of JSON
(`serve` is the other end). It imports nothing but the standard library, since the workers run under
the peers' interpreter too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
MODULES = {"vllm": "vllm", "llama-cpp": "llama_cpp"}
"""Peers that live in the environment of `make peers`, and what they are imported as."""

Answer = Callable[[int], dict[str, Any]]


class Worker:
    """A decoder process that has loaded its model; `ask` makes it decode once."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name = name
        (ROOT / "out").mkdir(exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.log = open(ROOT / "out" / f"{name}.log", "w")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.version = self._reply()["version"]

    def _reply(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed; see {self.log.name}")
        return json.loads(line)

    def ask(self, seed: int) -> dict[str, Any]:
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return self._reply()

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=120)
        self.log.close()


def serve(build: Callable[[], tuple[Answer, str]]) -> None:
    """The worker's end: a line of JSON when `build` is done, then one for each seed that is read."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    answer, version = build()
    print(json.dumps({"version": version}), file=replies, flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        extra = answer(int(line))
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, **extra}), file=replies, flush=True)


def asked_peers(text: str, known: Sequence[str]) -> list[str]:
    """Peers named by a flag, comma-separated. Raises SystemExit on an unknown one."""
    asked = [peer.strip() for peer in text.split(",") if peer.strip()]
    if unknown := set(asked) - set(known):
        raise SystemExit(f"unknown peers {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    return asked


def python_of(peer: str, peers_python: Path) -> str:
    return str(peers_python) if peer in MODULES else sys.executable


def missing(peer: str, peers_python: Path) -> str | None:
    """Why a peer cannot run here, or None."""
    if peer not in MODULES:
        return None
    if not peers_python.exists():
        return f"no {peers_python.relative_to(ROOT) if peers_python.is_relative_to(ROOT) else peers_python}: make peers"
    probe = subprocess.run([peers_python, "-c", f"import {MODULES[peer]}"], capture_output=True, text=True)
    if probe.returncode == 0:
        return None
    how = "" if peer == "vllm" else " (it is compiled: pip install llama-cpp-python==0.3.36 beside vLLM)"
    return f"import {MODULES[peer]} fails: {(probe.stderr.strip() or 'no message').splitlines()[-1]}{how}"


def split_missing(asked: list[str], peers_python: Path) -> tuple[list[str], dict[str, str]]:
    """The peers that can run, and why each of the others cannot (also printed)."""
    absent = {peer: why for peer in asked if (why := missing(peer, peers_python))}
    for peer, why in absent.items():
        print(f"missing peer {peer}: {why}", file=sys.stderr)
    return [peer for peer in asked if peer not in absent], absent


def model_folder(model: str) -> str:
    """A folder with the model that peers can read."""
    if model != "smollm2":
        return model
    from infinite_sampling.models import load_model, load_tokenizer

    folder = ROOT / "out" / "smollm2"
    load_model(model).save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    return str(folder)


def set_vllm_environment() -> None:
    """One process, no hub, no statistics sent; a no-op where the user has set them."""
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CPU_KVCACHE_SPACE", "2"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", help="also write the JSON here")
    parser.add_argument("--json", action="store_true", help="end standard output with one JSON object")


def write_result(script: str, arguments: argparse.Namespace, fields: dict[str, Any]) -> None:
    """The command, the machine and `fields`, to the file and standard output as asked for."""
    from infinite_sampling.run_directory import describe_machine

    command = " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]])
    result = {"command": command, **describe_machine(), **fields}
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))
