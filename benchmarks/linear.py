"""Linear layers by number of rows: `F.linear`, packed by oneDNN, and what a rollout runs, in turns.

    python benchmarks/linear.py --json

Median milliseconds of one pass through all linear layers of a model, and for each kernel the numbers
of rows (of 1 to 64) at which some row's bits differ from those in a batch of 64. `own` is the kernel of
`linear.py` for each layer (compiled where it runs, else oneDNN's), `rollout` the same with q, k and v, and
gate and up, as one product.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from infinite_sampling.linear import compute_in, has_native_bfloat16, make_kernel, onednn_kernel
from infinite_sampling.models import load_model
from infinite_sampling.run_directory import describe_machine


def kernels(model: torch.nn.Module) -> dict[str, list[tuple[int, object]]]:
    """For each name, (input size, function) of every linear layer."""
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear]
    found: dict[str, list[tuple[int, object]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        weights = [m.weight.detach().to(dtype) for m in layers]
        found[f"F.linear {name}"] = [(w.shape[1], lambda x, w=w: F.linear(x, w)) for w in weights]
        found[f"onednn {name}"] = [(w.shape[1], onednn_kernel(w, None, dtype)) for w in weights]
        found[f"own {name}"] = [(m.in_features, make_kernel(m.weight, m.bias, dtype, dtype)) for m in layers]
        with compute_in(model, dtype, None):
            found[f"rollout {name}"] = [(m.in_features, m.forward) for m in layers]
    return found


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name.split()[-1])


def changed_rows(functions: list[tuple[int, object]], dtype: torch.dtype) -> list[int]:
    """Numbers of rows at which a layer's first rows differ from a batch of 64."""
    changed: set[int] = set()
    distinct = {
        (size, function(torch.zeros(4, size, dtype=dtype)).shape[-1]): (size, function) for size, function in functions
    }
    for size, function in distinct.values():
        x = torch.randn(64, size).to(dtype)
        whole = function(x)
        changed |= {r for r in range(1, 64) if not torch.equal(function(x[:r].contiguous()), whole[:r])}
    return sorted(changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="4,8,16,32,64")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", help="also write the JSON here")
    parser.add_argument("--json", action="store_true", help="end standard output with one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        found = kernels(load_model("smollm2"))
        table = []
        for rows in map(int, arguments.rows.split(",")):
            sizes = {size for functions in found.values() for size, _ in functions}
            inputs = {name: {size: torch.randn(rows, size).to(dtype_of(name)) for size in sizes} for name in found}
            seconds: dict[str, list[float]] = {name: [] for name in found}
            for repetition in range(arguments.repetitions + 1):
                for name, functions in found.items():
                    begun = time.perf_counter()
                    for size, function in functions:
                        function(inputs[name][size])
                    if repetition:
                        seconds[name].append(time.perf_counter() - begun)
            table.append({"rows": rows, **{n: round(statistics.median(s) * 1e3, 1) for n, s in seconds.items()}})
            print(table[-1], file=sys.stderr)
        changed = {name: changed_rows(functions, dtype_of(name)) for name, functions in found.items()}
    result = {"milliseconds": table, "rows_whose_bits_differ_from_64": changed, "threads": arguments.threads}
    result |= {"native_bfloat16": has_native_bfloat16(), **describe_machine()}
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if arguments.json else json.dumps(changed))


if __name__ == "__main__":
    main()
