"""One engine in a process of its own: it samples the whole job of `budget.py` for each seed it is told.

Run by `budget.py`, also under the peers' interpreter: it imports nothing of the project unless the
engine is ours. What an engine does not report is absent from its answer. The protocol is `serve` of
`peers.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from peers import Answer, serve, set_vllm_environment

Job = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="JSON file that `budget.py` writes")
    parser.add_argument("--engine", required=True)
    arguments = parser.parse_args()
    builders = {"ours-slots": ours, "ours-budget": ours, "vllm": vllm, "hf-cb": hf_continuous_batching}
    job = json.loads(arguments.job.read_text()) | {"engine": arguments.engine}
    serve(lambda: builders[arguments.engine](job))


def digest(completions: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(completions).encode()).hexdigest()[:16]


def ours(job: Job) -> tuple[Answer, str]:
    import torch

    import infinite_sampling
    from infinite_sampling import RolloutConfig, RolloutEngine, SamplingConfig
    from infinite_sampling.models import load_model

    torch.set_num_threads(job["threads"])
    held = {"num_slots": job["slots"]} if job["engine"] == "ours-slots" else {"kv_budget": job["kv_budget_bytes"]}
    engine = RolloutEngine(load_model(job["model"], dtype=job["dtype"]), config=RolloutConfig(**held))

    def answer(seed: int, max_new_tokens: int = job["max_new_tokens"]) -> dict[str, Any]:
        sampling = SamplingConfig(temperature=job["temperature"], max_new_tokens=max_new_tokens, seed=seed)
        rollout = engine.rollout(job["prompt_ids"], job["group"], sampling)
        stats, completions = rollout.stats, [c.token_ids for c in rollout]
        return {
            "lengths": [len(ids) for ids in completions],
            "digest": digest(completions),
            "running_steps": stats.num_running_steps,
            "preemptions": stats.num_preemptions,
            "recomputed_tokens": stats.num_recomputed_tokens,
            "peak_kv_bytes": stats.peak_kv_bytes,
        }

    answer(0, max_new_tokens=2)
    return answer, infinite_sampling.__version__


def vllm(job: Job) -> tuple[Answer, str]:
    set_vllm_environment()
    import vllm as package

    engine = package.LLM(
        job["model"],
        dtype=job["dtype"],
        max_num_seqs=256,
        max_model_len=max(map(len, job["prompt_ids"])) + job["max_new_tokens"],
        block_size=job["page_tokens"],
        num_gpu_blocks_override=job["pages"],
        enable_prefix_caching=True,
        disable_log_stats=False,
    )
    steps = 0
    inner = engine.llm_engine.step

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal steps
        steps += 1
        return inner(*arguments, **keywords)

    engine.llm_engine.step = counted

    def preemptions() -> int:
        return sum(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")

    def answer(seed: int, max_new_tokens: int = job["max_new_tokens"]) -> dict[str, Any]:
        params = package.SamplingParams(n=job["group"], temperature=job["temperature"], max_tokens=max_new_tokens)
        steps_before, preempted_before = steps, preemptions()
        outs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompt_ids"]], params, use_tqdm=False)
        return {
            "lengths": [len(o.token_ids) for out in outs for o in out.outputs],
            "running_steps": steps - steps_before,
            "preemptions": preemptions() - preempted_before,
            "pages": job["pages"],
            "page_tokens": job["page_tokens"],
        }

    answer(0, max_new_tokens=2)
    engine.reset_prefix_cache()
    return answer, package.__version__


def hf_continuous_batching(job: Job) -> tuple[Answer, str]:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"]).eval()
    pool = transformers.ContinuousBatchingConfig(
        page_size=job["page_tokens"], num_blocks=job["pages"], max_requests_per_batch=256
    )
    inputs = [ids for ids in job["prompt_ids"] for _ in range(job["group"])]

    def answer(seed: int, max_new_tokens: int = job["max_new_tokens"]) -> dict[str, Any]:
        torch.manual_seed(seed)
        config = transformers.GenerationConfig(
            do_sample=True,
            temperature=job["temperature"],
            top_k=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=model.generation_config.pad_token_id,
        )
        out = model.generate_batch(
            inputs, generation_config=config, continuous_batching_config=pool, progress_bar=False
        )
        assert all(o.error is None for o in out.values()), [o.error for o in out.values() if o.error]
        return {
            "lengths": [len(o.generated_tokens) for o in out.values()],
            "pages": job["pages"],
            "page_tokens": job["page_tokens"],
        }

    answer(0, max_new_tokens=2)
    return answer, transformers.__version__


if __name__ == "__main__":
    main()
