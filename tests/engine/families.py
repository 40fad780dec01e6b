"""Small random models of every supported family, one place for all tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,
}
WINDOW = 12

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-narrow": ("Llama", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text:Gemma3", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None, "head_dim": None, "hidden_size": 96}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
}


def make_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random causal LM of `family`, about 100k parameters."""
    name, extra = FAMILIES[family]
    config_name, _, model_name = name.partition(":")
    options = {k: v for k, v in {**COMMON, **extra, **overrides}.items() if v is not None}
    config = getattr(transformers, f"{config_name}Config")(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{model_name or config_name}ForCausalLM")(config)
    return model.to(dtype).eval()


def greedy(model: Any, prompt_ids: list[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """The completion that `model.generate` gives."""
    ids = torch.tensor([prompt_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **kwargs
    )
    return out[0, len(prompt_ids) :].tolist()


def prompts(num_prompts: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(1, longest + 1, (1,), generator=generator)) for _ in range(num_prompts)]
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
