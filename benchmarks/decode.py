"""Decoding speed against what people use: the same forced token counts for all, interleaved.

    python benchmarks/decode.py --peers hf,vllm --slots 32 --dtype bfloat16 --json

Each decoder is a process of its own that loads once; after a warm-up they take turns, so that a
machine whose speed drifts slows all of them alike. Reported: median, minimum and maximum of the
tokens per second, the ratio of medians, and `linear_bound_ratio`, our running step against the
model's linear layers alone (`F.linear`) at that batch. A peer that is not installed is named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from infinite_sampling.models import load_model, load_tokenizer
from infinite_sampling.run_directory import describe_machine

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("hf", "hf-cb", "vllm")
QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips "
    "did Natalia sell altogether in April and May?"
)


class Worker:
    """A decoder process (see `decode_worker.py`)."""

    def __init__(self, peer: str, python: Path, model: str, prompt: list[int], options: dict[str, Any]) -> None:
        flags = [item for name, value in options.items() for item in (f"--{name}", str(value))]
        command = [str(python), str(ROOT / "benchmarks" / "decode_worker.py"), "--peer", peer, "--model", model]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        self.log = open(ROOT / "out" / f"decode-{peer}.log", "w")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [*command, *flags, "--prompt", json.dumps(prompt)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.peer, self.version = peer, self._reply()["version"]

    def _reply(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.peer} failed; see {self.log.name}")
        return json.loads(line)

    def decode(self, seed: int) -> dict[str, Any]:
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return self._reply()

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=120)
        self.log.close()


def missing(peer: str, peers_python: Path) -> str | None:
    """Why a peer cannot run here, or None."""
    if peer != "vllm":
        return None
    if not peers_python.exists():
        return f"no {peers_python.relative_to(ROOT) if peers_python.is_relative_to(ROOT) else peers_python}: make peers"
    probe = subprocess.run([peers_python, "-c", "import vllm"], capture_output=True, text=True)
    return None if probe.returncode == 0 else f"import vllm fails: {probe.stderr.strip().splitlines()[-1]}"


def linear_seconds(model: torch.nn.Module, rows: int, threads: int) -> float:
    """Best of 8 passes through the weights of all linear layers, one `F.linear` each."""
    torch.set_num_threads(threads)
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear]
    inputs = {m.in_features: torch.randn(rows, m.in_features, dtype=m.weight.dtype) for m in layers}
    best = float("inf")
    with torch.no_grad():
        for _ in range(8):
            begun = time.perf_counter()
            for layer in layers:
                F.linear(inputs[layer.in_features], layer.weight)
            best = min(best, time.perf_counter() - begun)
    return best


def measure(
    arguments: argparse.Namespace, peers: list[str], slots: int, dtype: str, model: str
) -> list[dict[str, Any]]:
    """Rows of one batch size and dtype."""
    prompt = load_tokenizer(model).apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    options = {"dtype": dtype, "slots": slots, "tokens": arguments.tokens, "threads": arguments.threads}
    pythons = {"vllm": Path(arguments.peers_python)}
    bound = linear_seconds(load_model(model, dtype=dtype), slots, arguments.threads)
    workers = [Worker(p, pythons.get(p, Path(sys.executable)), model, prompt, options) for p in ["ours", *peers]]
    runs: dict[str, list[dict[str, Any]]] = {worker.peer: [] for worker in workers}
    for repetition in range(-1, arguments.repetitions):
        for worker in workers:
            reply = worker.decode(repetition + 1)
            if repetition >= 0:
                runs[worker.peer].append(reply)
                print(f"{dtype} {slots} {worker.peer}: {reply['seconds']:.2f} s", file=sys.stderr, flush=True)
    for worker in workers:
        worker.stop()
    return [_row(w, runs, slots, dtype, arguments.tokens, bound) for w in workers]


def _row(
    worker: Worker, runs: dict[str, list[dict[str, Any]]], slots: int, dtype: str, tokens: int, bound: float
) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs[worker.peer]]
    median = statistics.median(seconds)
    row = {
        "peer": worker.peer,
        "version": worker.version,
        "slots": slots,
        "dtype": dtype,
        "tokens": slots * tokens,
        "tokens_per_second": round(slots * tokens / median, 1),
        "tokens_per_second_min": round(slots * tokens / max(seconds), 1),
        "tokens_per_second_max": round(slots * tokens / min(seconds), 1),
        "seconds": [round(s, 3) for s in seconds],
        "ours_over_this": round(median / statistics.median([run["seconds"] for run in runs["ours"]]), 3),
    }
    if worker.peer == "ours":
        for part in ("prefill", "decode", "sample", "schedule"):
            row[f"{part}_seconds"] = round(statistics.median([run[f"{part}_seconds"] for run in runs["ours"]]), 3)
        row["linear_seconds_a_step"] = round(bound, 4)
        row["linear_bound_ratio"] = round(row["decode_seconds"] / (tokens - 1) / bound, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="hf,hf-cb,vllm", help="comma-separated, of " + ", ".join(PEERS))
    parser.add_argument("--slots", default="4,8,32")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--tokens", type=int, default=64, help="forced tokens of every completion")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", default="smollm2", help="a local folder, or smollm2 (the packaged weights)")
    parser.add_argument("--peers-python", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--output", help="also write the JSON here")
    parser.add_argument("--json", action="store_true", help="end standard output with one JSON object")
    arguments = parser.parse_args()
    asked = [peer for peer in arguments.peers.split(",") if peer]
    if unknown := set(asked) - set(PEERS):
        raise SystemExit(f"unknown peers {', '.join(sorted(unknown))}; expected {', '.join(PEERS)}")
    absent = {peer: why for peer in asked if (why := missing(peer, Path(arguments.peers_python)))}
    for peer, why in absent.items():
        print(f"missing peer {peer}: {why}", file=sys.stderr)
    peers = [peer for peer in asked if peer not in absent]
    (ROOT / "out").mkdir(exist_ok=True)
    model = arguments.model
    if model == "smollm2":  # peers need a folder they can read
        folder = ROOT / "out" / "smollm2"
        load_model(model).save_pretrained(folder)
        load_tokenizer(model).save_pretrained(folder)
        model = str(folder)
    rows = [
        row
        for dtype in arguments.dtype.split(",")
        for slots in map(int, arguments.slots.split(","))
        for row in measure(arguments, peers, slots, dtype, model)
    ]
    for row in rows:
        spread = f"{row['tokens_per_second_min']:.0f} to {row['tokens_per_second_max']:.0f}"
        print(
            f"{row['dtype']:9} {row['slots']:4} slots  {row['peer']:6} {row['tokens_per_second']:7.1f} tokens/s "
            f"({spread})  ours/this {row['ours_over_this']:.2f}"
        )
    result = {"command": " ".join(["python", "benchmarks/decode.py", *sys.argv[1:]]), "missing": absent}
    result |= {"threads": arguments.threads, "rows": rows, **describe_machine()}
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
