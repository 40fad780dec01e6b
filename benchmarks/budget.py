"""What an engine makes of the same bytes of KV: real questions, real end tokens, wall-clock.

    python benchmarks/budget.py --peers vllm,hf-cb --json --output benchmarks/results/budget.json

The budget is what `--slots` fixed slots of `--max_new_tokens` and their prompts take. Decoders: ours
with those slots, ours with the budget, vLLM and transformers' continuous batching with as many of
their pages as the budget holds (prefix sharing on). Each is a process of its own that loads once;
they take turns. Ours draw the same completions; the others sample their own, of other lengths, so
that every figure is given a token as well. A peer that is not installed is named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

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

from infinite_sampling.memory import KVShape, format_bytes, plan_pool

PEERS = ("vllm", "hf-cb")
OURS = ("ours-slots", "ours-budget")
TEMPERATURE = 0.7


def shared_data() -> Path:
    """The folder of real data, as the tests find it."""
    return Path(os.environ.get("INFINITE_SAMPLING_SHARED_DATA", ROOT.parent / "shared" / "data"))


def read_questions(file: Path, count: int) -> list[str]:
    """The first `count` questions. Raises SystemExit where there are none, or fewer."""
    if not file.is_file():
        raise SystemExit(f"no {file}; name its folder with INFINITE_SAMPLING_SHARED_DATA")
    with open(file) as lines:
        questions = [json.loads(line)["question"] for line, _ in zip(lines, range(count), strict=False)]
    if len(questions) < count:
        raise SystemExit(f"{file} has {len(questions)} questions, asked {count}")
    return questions


def budget_bytes(prompt_tokens: list[int], *, group: int, slots: int, max_new_tokens: int, bytes_per_token: int) -> int:
    """Bytes that `slots` slots and their prompts take, as the engine allocates them."""
    members = len(prompt_tokens) * group
    pool = plan_pool(prompt_tokens, num_members=members, max_new_tokens=max_new_tokens, num_slots=slots)
    return pool.num_tokens * bytes_per_token


def summarize(engine: str, version: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of an engine's repetitions: medians, and the counts of the first."""
    first = runs[0]
    seconds = [run["seconds"] for run in runs]
    tokens = [sum(run["lengths"]) for run in runs]
    return {
        "engine": engine,
        "version": version,
        "wall_seconds": round(statistics.median(seconds), 3),
        "wall_seconds_all": [round(s, 3) for s in seconds],
        "tokens": tokens[0],
        "tokens_all": tokens,
        "mean_length_tokens": round(statistics.mean(first["lengths"]), 1),
        "longest_tokens": max(first["lengths"]),
        "tokens_per_second": round(statistics.median([t / s for t, s in zip(tokens, seconds, strict=True)]), 2),
        "seconds_per_token": round(statistics.median([s / t for t, s in zip(tokens, seconds, strict=True)]), 6),
        **{name: first.get(name) for name in ("running_steps", "preemptions", "recomputed_tokens", "peak_kv_bytes")},
        "pages": first.get("pages"),
        "page_tokens": first.get("page_tokens"),
    }


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """How many times as fast as each engine ours with the budget is: by wall-clock, and a token."""
    [ours] = [row for row in rows if row["engine"] == "ours-budget"]
    for row in rows:
        row["ours_over_this_by_wall"] = round(row["wall_seconds"] / ours["wall_seconds"], 3)
        row["ours_over_this_by_token"] = round(row["seconds_per_token"] / ours["seconds_per_token"], 3)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, of " + ", ".join(PEERS))
    parser.add_argument("--prompts", type=int, default=4, help="GSM8K test questions")
    parser.add_argument("--group", type=int, default=64, help="completions of each")
    parser.add_argument("--max_new_tokens", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=8, help="fixed slots whose bytes are the budget")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument(
        "--peer_page_tokens",
        type=int,
        default=32,
        help="tokens of a page of the peers' pools: ours is 32; their own defaults (vLLM on a CPU 128, transformers "
        "256) are longer than most of these prompts, so that none would be shared",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", default="smollm2", help="a local folder, or smollm2 (the packaged weights)")
    parser.add_argument("--peers_python", default=str(PEERS_PYTHON))
    add_output_flags(parser)
    arguments = parser.parse_args(argv)
    for name in ("prompts", "group", "max_new_tokens", "slots", "repetitions", "peer_page_tokens", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return arguments


def make_job(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """What every worker is told."""
    from infinite_sampling.models import load_config, load_tokenizer
    from infinite_sampling.prompts import encode_prompts

    questions = read_questions(shared_data() / "gsm8k_test.jsonl", arguments.prompts)
    conversations = [[{"role": "user", "content": question}] for question in questions]
    prompt_ids = encode_prompts(conversations, load_tokenizer(model))
    bytes_per_token = KVShape.of(load_config(model).get_text_config()).bytes_per_token(arguments.dtype)
    budget = budget_bytes(
        [len(ids) for ids in prompt_ids],
        group=arguments.group,
        slots=arguments.slots,
        max_new_tokens=arguments.max_new_tokens,
        bytes_per_token=bytes_per_token,
    )
    job = {name: getattr(arguments, name) for name in ("group", "max_new_tokens", "slots", "dtype", "threads")}
    job |= {"prompt_ids": prompt_ids, "temperature": TEMPERATURE, "kv_budget_bytes": budget, "model": model}
    job["page_tokens"] = arguments.peer_page_tokens
    job["pages"] = budget // (arguments.peer_page_tokens * bytes_per_token)
    return job


def measure(arguments: argparse.Namespace, engines: list[str], job: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each engine; every one must have finished all members."""
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    (out / "budget-job.json").write_text(json.dumps(job))
    script = [str(ROOT / "benchmarks" / "budget_worker.py"), "--job", str(out / "budget-job.json"), "--engine"]
    python = Path(arguments.peers_python)
    workers = [Worker(e, [python_of(e, python), *script, e], arguments.threads) for e in engines]
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for seed in range(arguments.repetitions):
        for worker in workers:
            reply = worker.ask(seed)
            if len(reply["lengths"]) != arguments.prompts * arguments.group:
                raise SystemExit(f"{worker.name} finished {len(reply['lengths'])} members of those asked")
            runs[worker.name].append(reply)
            print(f"{worker.name}: {reply['seconds']:.1f} s", file=sys.stderr, flush=True)
    for worker in workers:
        worker.stop()
    rows = [summarize(worker.name, worker.version, runs[worker.name]) for worker in workers]
    add_ratios(rows)
    digests = [[run["digest"] for run in runs[engine]] for engine in OURS]
    for row in rows[: len(OURS)]:
        row["same_completions"] = digests[0] == digests[1]
    return rows


def main() -> int:
    arguments = parse_arguments()
    peers, absent = split_missing(asked_peers(arguments.peers, PEERS), Path(arguments.peers_python))
    job = make_job(arguments, model_folder(arguments.model))
    rows = measure(arguments, [*OURS, *peers], job)
    for row in rows:
        print(
            f"{row['engine']:11} {row['wall_seconds']:8.1f} s  {row['tokens']:7} tokens  "
            f"{row['tokens_per_second']:7.1f} tokens/s  {row['running_steps'] or '-':>6} steps  "
            f"{'-' if row['preemptions'] is None else row['preemptions']} preempted  "
            f"{'-' if row['recomputed_tokens'] is None else row['recomputed_tokens']} recomputed  ours/this: "
            f"{row['ours_over_this_by_wall']:.2f} by wall, {row['ours_over_this_by_token']:.2f} a token",
            file=sys.stderr if arguments.json else sys.stdout,
        )
    settings = {name: getattr(arguments, name) for name in ("prompts", "group", "max_new_tokens", "slots", "dtype")}
    settings |= {"temperature": TEMPERATURE, "threads": arguments.threads, "kv_budget_bytes": job["kv_budget_bytes"]}
    write_result("budget.py", arguments, {"missing": absent, **settings, "rows": rows})
    too_much = [r for r in rows[: len(OURS)] if r["peak_kv_bytes"] > job["kv_budget_bytes"]]
    for row in too_much:
        peak, budget = format_bytes(row["peak_kv_bytes"]), format_bytes(job["kv_budget_bytes"])
        print(f"{row['engine']}: peak {peak} of KV exceeds the budget of {budget}", file=sys.stderr)
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
