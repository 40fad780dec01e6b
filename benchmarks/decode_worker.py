"""One decoder in a process of its own: told to go, it decodes a group and says how long it took.

Run by `decode.py`, also under the peers' interpreter: it imports nothing of the project unless the
peer is `ours` (and `peers.py`, which needs nothing). The protocol is `serve` there.
"""

from __future__ import annotations

import argparse
import json

from peers import Answer, serve, set_vllm_environment


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--peer", "--model", "--dtype"):
        parser.add_argument(flag, required=True)
    for flag in ("--slots", "--tokens", "--threads"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--prompt", required=True, help="JSON list of token ids")
    arguments = parser.parse_args()
    builders = {"ours": ours, "hf": hf, "hf-cb": hf_continuous_batching, "vllm": vllm, "llama-cpp": llama_cpp}
    serve(lambda: builders[arguments.peer](arguments, json.loads(arguments.prompt)))


def ours(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Answer, str]:
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


def hf(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Answer, str]:
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


def hf_continuous_batching(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Answer, str]:
    import torch
    import transformers

    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=arguments.tokens, eos_token_id=-1, pad_token_id=0
    )

    # Left to itself it takes most of the machine's memory for its pool, and seconds to zero it at each call.
    pages = -(-(len(prompt) + arguments.tokens) // 256) + 1
    pool = transformers.ContinuousBatchingConfig(page_size=256, num_blocks=arguments.slots * pages)

    def decode(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        out = model.generate_batch(
            [prompt] * arguments.slots,
            generation_config=config,
            continuous_batching_config=pool,
            progress_bar=False,
        )
        assert sum(len(o.generated_tokens) for o in out.values()) == arguments.slots * arguments.tokens
        return {}

    return decode, transformers.__version__


def vllm(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Answer, str]:
    set_vllm_environment()
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


def llama_cpp(arguments: argparse.Namespace, prompt: list[int]) -> tuple[Answer, str]:
    """`slots` parallel sequences that share the cells of the prompt, each with a sampler of its own."""
    import ctypes

    import llama_cpp as library

    slots, tokens = arguments.slots, arguments.tokens
    library.llama_backend_init()
    model = library.llama_model_load_from_file(arguments.model.encode(), library.llama_model_default_params())
    assert model, f"cannot load {arguments.model}"
    settings = library.llama_context_default_params()
    settings.n_ctx = len(prompt) + slots * tokens
    settings.n_batch = settings.n_ubatch = max(512, len(prompt), slots)
    settings.n_seq_max, settings.kv_unified = slots, True
    settings.n_threads = settings.n_threads_batch = arguments.threads
    context = library.llama_init_from_model(model, settings)
    assert context, "no context of that size"
    batch = library.llama_batch_init(settings.n_batch, 0, 1)

    def run(rows: list[tuple[int, int, int]], wants_logits: set[int]) -> None:
        """Decode (token, position, sequence) rows."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, i in wants_logits
        assert library.llama_decode(context, batch) == 0, "llama_decode failed"

    def decode(seed: int) -> dict[str, object]:
        memory = library.llama_get_memory(context)
        library.llama_memory_clear(memory, True)
        samplers = []
        for sequence in range(slots):
            chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_temp(ctypes.c_float(1.0)))
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_dist(seed * slots + sequence))
            samplers.append(chain)
        run([(token, i, 0) for i, token in enumerate(prompt)], {len(prompt) - 1})
        for sequence in range(1, slots):
            library.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        sampled = [library.llama_sampler_sample(chain, context, len(prompt) - 1) for chain in samplers]
        for position in range(len(prompt), len(prompt) + tokens - 1):
            run([(token, position, sequence) for sequence, token in enumerate(sampled)], set(range(slots)))
            sampled = [library.llama_sampler_sample(chain, context, i) for i, chain in enumerate(samplers)]
        for chain in samplers:
            library.llama_sampler_free(chain)
        return {}

    return decode, f"{library.__version__}, Q4_1 weights"


if __name__ == "__main__":
    main()
