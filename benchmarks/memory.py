"""KV bytes by group size: what was allocated against what the `memory` command predicts.

    python benchmarks/memory.py --json --output benchmarks/results/memory.json

Rows: SmolLM2 with forced lengths, every row in a process of its own whose peak resident size is
read at its end (`process_before_bytes`: with the weights loaded, before the rollout). Policies:
`fixed-slot` with so many slots, `fixed-slot` with a budget of the bytes that those slots take, and
`full` up to 128 members. Figure 4 (of the paper): KV by micro group, by arithmetic alone for two
larger models, and measured for SmolLM2. Exits 1 where a peak exceeds its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from peers import add_output_flags, write_result

from infinite_sampling.memory import KVShape, format_bytes, plan_memory

SMOLLM2 = KVShape(num_layers=30, num_kv_heads=3, head_dim=64)
SHAPES = {
    "Qwen3-1.7B": KVShape(num_layers=28, num_kv_heads=8, head_dim=128),
    "Qwen3-8B": KVShape(num_layers=36, num_kv_heads=8, head_dim=128),
}
PROMPT_TOKENS = 128
MOST_FULL = 128
"""Largest group that `full` decodes at once here."""
FIGURE4_NEW_TOKENS = 1024


def draw_lengths(num_members: int, max_new_tokens: int, seed: int = 0) -> list[int]:
    """Lengths of a group: one in ten runs to the limit, the others are exponential, mean an eighth of it.

    The first members are the same for every group size.
    """
    random_state = random.Random(seed)
    lengths = []
    for _ in range(num_members):
        short = 1 + int(random_state.expovariate(8 / max_new_tokens))
        lengths.append(max_new_tokens if random_state.random() < 0.1 else min(short, max_new_tokens))
    return lengths


def plan(job: dict[str, Any], shape: KVShape = SMOLLM2) -> int:
    """Bytes of KV that a row is predicted to allocate."""
    return plan_memory(
        shape,
        dtype=job["dtype"],
        num_generations=job["group_size"],
        prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=job["max_new_tokens"],
        num_slots=job["group_size"] if job["policy"] == "full" else job["num_slots"],
        kv_budget_bytes=job["kv_budget_bytes"],
        may_preempt=job["policy"] == "fixed-slot",
    ).kv_bytes


def jobs_of(groups: list[int], slots: int, max_new_tokens: int, dtype: str) -> list[dict[str, Any]]:
    """The rows to run: each group size under each policy that is feasible."""
    common = {"max_new_tokens": max_new_tokens, "dtype": dtype, "kv_budget_bytes": None, "num_slots": None}
    jobs = []
    for group_size in groups:
        fixed = {**common, "group_size": group_size, "policy": "fixed-slot", "num_slots": slots}
        # The same bytes for every group: those of the slots, also where the group is smaller.
        budget = plan({**fixed, "group_size": max(slots, group_size)})
        jobs += [fixed, {**fixed, "num_slots": None, "kv_budget_bytes": budget}]
        if group_size <= MOST_FULL:
            jobs.append({**common, "group_size": group_size, "policy": "full"})
    return jobs


def figure4_by_arithmetic() -> list[dict[str, Any]]:
    """KV bytes of each group size by micro group, and with all members at once."""
    rows = []
    for model, shape in SHAPES.items():
        for group_size, micro_group in _micro_groups((8, 16, 32, 64)):
            memory = plan_memory(
                shape,
                dtype="bfloat16",
                num_generations=group_size,
                prompt_tokens=PROMPT_TOKENS,
                max_new_tokens=FIGURE4_NEW_TOKENS,
                num_slots=micro_group,
            )
            row = {"model": model, "group_size": group_size, "micro_group": micro_group, "kv_bytes": memory.kv_bytes}
            row |= {
                "full_kv_bytes": memory.full_kv_bytes,
                "saved": round(1 - memory.kv_bytes / memory.full_kv_bytes, 4),
            }
            rows.append(row)
    return rows


def _micro_groups(group_sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Each group size with the powers of two up to it."""
    return ((size, 2**k) for size in group_sizes for k in range(size.bit_length()))


def run_row(job: dict[str, Any], model: Any = None) -> dict[str, Any]:
    """Run one row in this process."""
    import psutil
    import torch

    from infinite_sampling import RolloutConfig, RolloutEngine, SamplingConfig
    from infinite_sampling.models import load_model

    torch.set_num_threads(job["threads"])
    model = model or load_model("smollm2", dtype=job["dtype"])
    assert KVShape.of(model.config) == SMOLLM2
    config = RolloutConfig(policy=job["policy"], num_slots=job["num_slots"], kv_budget=job["kv_budget_bytes"])
    sampling = SamplingConfig(max_new_tokens=job["max_new_tokens"], forced_lengths=[job["lengths"]])
    prompt = [(i * 37) % 40_000 + 100 for i in range(PROMPT_TOKENS)]
    engine, before = RolloutEngine(model, config=config), psutil.Process().memory_info().rss
    stats = engine.rollout([prompt], job["group_size"], sampling).stats
    return {
        "group_size": job["group_size"],
        "policy": job["policy"],
        "num_slots": stats.num_slots,
        "kv_budget_bytes": job["kv_budget_bytes"],
        "peak_kv_bytes": stats.peak_kv_bytes,
        "predicted_peak_bytes": plan(job),
        "process_before_bytes": before,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT,
        "running_steps": stats.num_running_steps,
        "preemptions": stats.num_preemptions,
        "recomputed_tokens": stats.num_recomputed_tokens,
        "tokens": stats.num_tokens,
        "wall_seconds": round(stats.wall_seconds, 2),
    }


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def run_figure4(job: dict[str, Any]) -> list[dict[str, Any]]:
    """SmolLM2 under `micro`, two tokens a member: the pool is that of the full length."""
    from infinite_sampling.models import load_model

    model = load_model("smollm2", dtype=job["dtype"])
    rows = []
    for group_size, micro_group in _micro_groups((8, 16)):
        lengths = [2] * group_size
        row = run_row({**job, "group_size": group_size, "num_slots": micro_group, "lengths": lengths}, model)
        kept = {"model": "SmolLM2-135M", "group_size": group_size, "micro_group": micro_group}
        rows.append(kept | {"kv_bytes": row["predicted_peak_bytes"], "measured_peak_bytes": row["peak_kv_bytes"]})
    return rows


def in_child(job: dict[str, Any]) -> Any:
    """What `--child` prints for this job, in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "TQDM_DISABLE": "1"}
    child = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(job)], stdout=subprocess.PIPE, text=True, env=environment
    )
    if child.returncode:
        raise SystemExit(f"group size {job.get('group_size')}, policy {job['policy']}: exit {child.returncode}")
    return json.loads(child.stdout.splitlines()[-1])


def excesses(rows: list[dict[str, Any]]) -> list[str]:
    """A line for every row whose peak exceeds its budget."""
    return [
        f"group size {row['group_size']}, policy {row['policy']}: peak {row['peak_kv_bytes']} bytes of KV exceeds the "
        f"budget of {row['kv_budget_bytes']}"
        for row in rows
        if row["kv_budget_bytes"] is not None and row["peak_kv_bytes"] > row["kv_budget_bytes"]
    ]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="8,32,128,512,1024", help="group sizes, comma-separated")
    parser.add_argument("--slots", type=int, default=8, help="slots whose bytes are the budget")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    add_output_flags(parser)
    return parser.parse_args(argv)


def describe(row: dict[str, Any]) -> str:
    budget = "-" if row["kv_budget_bytes"] is None else format_bytes(row["kv_budget_bytes"])
    return (
        f"G {row['group_size']:4}  {row['policy']:10} {row['num_slots']:4} slots  budget {budget:>10}  peak "
        f"{format_bytes(row['peak_kv_bytes']):>10}  predicted {format_bytes(row['predicted_peak_bytes']):>10}  process "
        f"{format_bytes(row['process_peak_bytes']):>10}  {row['running_steps']:5} steps  "
        f"{row['preemptions']} preempted  {row['recomputed_tokens']} recomputed  {row['wall_seconds']:.0f} s"
    )


def main() -> int:
    arguments = parse_arguments()
    if job := arguments.child:
        print(json.dumps(run_figure4(job) if job["policy"] == "micro" else run_row(job)))
        return 0
    begun = time.perf_counter()
    groups = [int(size) for size in arguments.groups.split(",")]
    lengths = draw_lengths(max(groups), arguments.max_new_tokens)
    common = {"threads": arguments.threads, "dtype": arguments.dtype}
    rows = []
    for job in jobs_of(groups, arguments.slots, arguments.max_new_tokens, arguments.dtype):
        rows.append(in_child({**job, **common, "lengths": lengths[: job["group_size"]]}))
        print(describe(rows[-1]), file=sys.stderr, flush=True)
    micro = {"policy": "micro", "max_new_tokens": FIGURE4_NEW_TOKENS, "kv_budget_bytes": None}
    figure4 = figure4_by_arithmetic() + in_child({**micro, **common})
    for row in figure4:
        measured = f"  measured {format_bytes(row['measured_peak_bytes'])}" if "measured_peak_bytes" in row else ""
        print(
            f"{row['model']:12}  G {row['group_size']:2}  micro group {row['micro_group']:2}  "
            f"{format_bytes(row['kv_bytes']):>10}{measured}",
            file=sys.stderr,
        )
    too_much = excesses(rows)
    fields = {"threads": arguments.threads, "max_new_tokens": arguments.max_new_tokens, "dtype": arguments.dtype}
    fields |= {"prompt_tokens": PROMPT_TOKENS, "seconds": round(time.perf_counter() - begun, 1)}
    write_result("memory.py", arguments, {**fields, "rows": rows, "figure4": figure4})
    for line in too_much:
        print(line, file=sys.stderr)
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
