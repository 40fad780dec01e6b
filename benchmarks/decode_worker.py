"""One decoder in a process of its own: told to go, it decodes a group and says how long it took.

Run by `decode.py`, also under the peers' interpreter: it imports nothing of the project unless the
peer is `ours` or `hf`. Protocol: a line of JSON on standard output when ready, then one for each
line on standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--peer", "--model", "--dtype"):
        parser.add_argument(flag, required=True)
    for flag in ("--slots", "--tokens", "--threads"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--prompt", required=True, help="JSON list of token ids")
    arguments = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    build = {"ours": ours, "hf": hf, "hf-cb": hf_continuous_batching, "vllm": vllm}[arguments.peer]
    decode, version = build(arguments, json.loads(arguments.prompt))
    print(json.dumps({"ready": arguments.peer, "version": version}), file=replies, flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        extra = decode(int(line))
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, **extra}), file=replies, flush=True)


Decode = Callable[[int], dict[str, object]]


def ours(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Decode, str]:
    import torch

    import infinite_sampling
    from infinite_sampling import RolloutConfig, RolloutEngine, SamplingConfig
    from infinite_sampling.models import load_model

    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model, dtype=arguments.dtype)
    engine = RolloutEngine(model, config=RolloutConfig(num_slots=arguments.slots))

    def decode(seed: int) -> dict[str, object]:
        sampling = SamplingConfig(max_new_tokens=arguments.tokens, ignore_eos=True, seed=seed)
        stats = engine.rollout([prompt], arguments.slots, sampling).stats
        assert stats.num_tokens == arguments.slots * arguments.tokens
        parts = ("prefill", "decode", "sample", "schedule")
        return {f"{part}_seconds": getattr(stats, f"{part}_seconds") for part in parts}

    return decode, infinite_sampling.__version__


def hf(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Decode, str]:
    import torch
    import transformers

    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])

    def decode(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=arguments.tokens,
            num_return_sequences=arguments.slots,
        )
        assert out.shape == (arguments.slots, len(prompt) + arguments.tokens)
        return {}

    return decode, transformers.__version__


def hf_continuous_batching(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Decode, str]:
    import torch
    import transformers

    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=arguments.tokens, eos_token_id=-1, pad_token_id=0
    )

    def decode(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        out = model.generate_batch([prompt] * arguments.slots, generation_config=config, progress_bar=False)
        assert sum(len(o.generated_tokens) for o in out.values()) == arguments.slots * arguments.tokens
        return {}

    return decode, transformers.__version__


def vllm(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Decode, str]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm as package

    engine = package.LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_num_seqs=arguments.slots,
        max_model_len=2048,
        enable_prefix_caching=True,
    )

    def decode(seed: int) -> dict[str, object]:
        params = package.SamplingParams(
            n=arguments.slots, temperature=1.0, max_tokens=arguments.tokens, ignore_eos=True, seed=None
        )
        [out] = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert sum(len(o.token_ids) for o in out.outputs) == arguments.slots * arguments.tokens
        return {}

    return decode, package.__version__


if __name__ == "__main__":
    main()
