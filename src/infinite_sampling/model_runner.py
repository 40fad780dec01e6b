"""The only file that calls a Hugging Face model: prefill of prompts and forward of decode rows.

In: token ids, slots and positions. Out: float32 logits; keys and values go to the KV pool. It
knows nothing of sampling, policies or completions. Inside `attached` the model is switched to the
engine's attention and linear layers, and put back exactly on the way out, also after an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from infinite_sampling import attention, decoder_layers, linear, small_layers
from infinite_sampling.attention import DecodeContext, PrefillContext
from infinite_sampling.config import ConfigError, RolloutConfig
from infinite_sampling.kv_pool import KVPool, pad_rows

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_attached_configs: set[int] = set()
"""Ids of the configs of models that are decoding: the attention implementation is switched there."""
_PROBE_PROMPTS = (9, 75)
"""Tokens of the probe's prompts."""
_PROBE_PAGE_TOKENS = 16
_PROBE_HELD = {1: 20, 7: 100}
"""Tokens that members of the probe have behind them; member 7 is not in the batch of 4."""
_probed: WeakKeyDictionary[Any, dict[tuple[torch.dtype, int, int], bool]] = WeakKeyDictionary()
"""What the probe found, by model: weights change, the order of sums does not."""
_MAX_PROBE_ROWS = 64


class UnsupportedModelError(ConfigError):
    """A model that the engine cannot decode exactly; says which and why."""


class ModelRunner:
    """Runs one causal language model over a `KVPool`.

    Args:
        model: a transformers causal LM, or a PEFT model around one (decoded with its adapter).
        config: `dtype` and `prefill_chunk_tokens` are used.

    Raises UnsupportedModelError for a model that does not qualify.
    """

    def __init__(self, model: nn.Module, config: RolloutConfig) -> None:
        if reason := unsupported_reason(model):
            raise UnsupportedModelError(f"{type(model).__name__} cannot be decoded by the engine: {reason}")
        self.model = base_model(model)
        self.text_config = self.model.config.get_text_config()
        self.device = self.model.get_input_embeddings().weight.device
        self.dtype = compute_dtype(self.model, config.dtype)
        self._odd_parameters = linear.row_dependent_parameters(self.model)
        if self._odd_parameters and self.dtype != compute_dtype(self.model, "weights"):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be decoded in {self.dtype}: {self._odd_parameters[0]} (of "
                f"{len(self._odd_parameters)} such) is no plain linear layer; decode in the dtype of the weights"
            )
        self.prefill_chunk_tokens = config.prefill_chunk_tokens
        # The class's own forward: an instance may carry accelerate's autocast wrapper.
        self._forward = functools.partial(type(self.model).forward, self.model)
        self._keep_kwarg = "logits_to_keep" in inspect.signature(type(self.model).forward).parameters
        attention.register()

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: token ids must be below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """Most tokens of prompt and completion that the model's positions allow; None if unknown."""
        limits = [getattr(self.text_config, "max_position_embeddings", None), _rope_limit(self.text_config)]
        return min((limit for limit in limits if limit), default=None)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Switch the model to decoding; every touched attribute is put back on exit."""
        configs_by_id = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        configs = configs_by_id.values()
        if _attached_configs & configs_by_id.keys():
            raise RuntimeError(
                f"{type(self.model).__name__} (or a model that shares its config) is already decoding in another "
                "rollout; finish or close that stream first"
            )
        training = [module for module in self.model.modules() if module.training]
        implementations = [(config, config._attn_implementation) for config in configs]
        with ExitStack() as stack:
            stack.callback(_restore, training, implementations)
            stack.callback(_attached_configs.difference_update, configs_by_id)
            _attached_configs.update(configs_by_id)
            self.model.eval()
            for config in configs:
                config._attn_implementation = attention.IMPLEMENTATION
            head = self.model.get_output_embeddings()
            kernels = stack.enter_context(linear.compute_in(self.model, self.dtype, head))
            stack.enter_context(small_layers.on_kernels(self.model, self.dtype))
            stack.enter_context(decoder_layers.on_kernels(self.model, kernels))
            yield

    @torch.no_grad()
    def prefill(self, pool: KVPool, prompt: int, prompt_ids: Sequence[int]) -> Tensor:
        """Run a prompt once into its held pages; returns the logits (V,) that follow its last token.

        The prompt is cut in chunks of `prefill_chunk_tokens`: a long one needs no more activation
        memory than one chunk, and the cut depends on nothing but the prompt.
        """
        logits = torch.empty(0)
        for start in range(0, len(prompt_ids), self.prefill_chunk_tokens):
            chunk = prompt_ids[start : start + self.prefill_chunk_tokens]
            ids = torch.tensor([list(chunk)], device=self.device)
            positions = torch.arange(start, start + len(chunk), device=self.device)[None]
            context = PrefillContext(pool, prompt, start, self.dtype)
            with attention.running(context):
                logits = self._logits(ids, positions)
            self._check_layers(context.layers)
        self._synchronize()
        pool.pages.prompts[prompt].is_written = True
        return logits[0]

    def _check_layers(self, layers: list[int]) -> None:
        """Raise UnsupportedModelError unless each layer kept its keys and values, once."""
        expected, repeated = self.text_config.num_hidden_layers, len(layers) - len(set(layers))
        if repeated:
            reason = f"{repeated} of its layers attend more than once, to different keys and values"
        elif len(layers) != expected:
            reason = f"{expected} layers, but only {len(layers)} keep keys and values through the attention interface"
        else:
            return
        raise UnsupportedModelError(f"{type(self.model).__name__} cannot be decoded by the engine: {reason}")

    @torch.no_grad()
    def forward(self, pool: KVPool, tokens_R: Sequence[int], slots_R: Sequence[int], local_R: Sequence[int]) -> Tensor:
        """Run one token a row: row r is token `local_R[r]` (from 0) of the member in `slots_R[r]`.

        The one entry for all KV after the prompt; a slot may bring several rows, in order, and has
        pages for all of them. Rows are padded to a multiple of 4. Returns logits (R, V) float32.
        """
        num_real, num_rows = len(tokens_R), pad_rows(len(tokens_R))
        tokens, slots, local = (
            np.concatenate([array, np.full(num_rows - num_real, array[0], dtype=np.int64)])
            for array in (np.asarray(values, dtype=np.int64) for values in (tokens_R, slots_R, local_R))
        )
        context = DecodeContext(pool, slots, local, num_real, self.device, self.dtype)
        positions = torch.from_numpy(context.prompt_tokens_R + local).to(self.device)
        with attention.running(context):
            logits = self._logits(torch.from_numpy(tokens).to(self.device)[:, None], positions[:, None])
        self._synchronize()
        return logits[:num_real]

    def _synchronize(self) -> None:
        """Wait for the device, so that seconds are counted where they are spent; sampling waits anyway."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, V) of the last token of ids (B, t)."""
        keep: dict[str, Any] = {"logits_to_keep": 1} if self._keep_kwarg else {}
        with torch.autocast(self.device.type, enabled=False):
            out = self._forward(input_ids=ids, position_ids=positions, use_cache=False, **keep)
        return out.logits[:, -1].float()

    def is_deterministic(self, num_slots: int) -> bool:
        """Whether a row's logits have the same bits in a batch of 4 as in larger ones, up to `num_slots` rows.

        Measured once for each padded number of rows on made-up prompts (call inside `attached`).
        False without measuring for models that multiply a number of rows that depends on data, and for
        layers of a width that puts elements on the scalar tail of a CPU's vector loops.
        """
        if self._odd_parameters or self._has_odd_width():
            return False
        num_rows = min(pad_rows(num_slots), _MAX_PROBE_ROWS)
        known = _probed.setdefault(self.model, {})
        key = (self.dtype, num_rows, torch.get_num_threads())
        if key not in known:
            most = max(_PROBE_HELD.values()) + 2
            pool = KVPool(2 * num_rows + 64, _PROBE_PAGE_TOKENS, max(num_rows, 12), most)
            room = max((self.max_positions or 2**31) - most, 1)
            for prompt, tokens in enumerate(_PROBE_PROMPTS):
                pool.pages.hold_prompt(prompt, min(tokens, room))
                self.prefill(pool, prompt, self._probe_tokens(min(tokens, room), 11))
            alone = self._probe(pool, [3, 1, 0, 2])
            others = [self._probe(pool, list(range(rows))) for rows in sorted({8, 12, max(num_rows, 8)})]
            if not alone.isfinite().all():
                return False  # weights that say nothing: measure again when they do
            known[key] = all(torch.equal(alone, other[[3, 1, 0, 2]]) for other in others)
        return known[key]

    def _has_odd_width(self) -> bool:
        """Whether 4 rows of some layer's output do not fill whole vectors."""
        head = self.model.get_output_embeddings()
        layers = (m for m in self.model.modules() if isinstance(m, nn.Linear) and m is not head)
        return self.device.type == "cpu" and any(layer.out_features % 8 for layer in layers)

    def _probe(self, pool: KVPool, members: list[int]) -> Tensor:
        """Logits (members, 2 V) of two forwards in which member m reads its own tokens.

        All members but the first share one prompt; some have filled pages before.
        """
        held = [_PROBE_HELD.get(member, 0) for member in members]
        for slot, member in enumerate(members):
            pool.pages.admit(slot, int(member > 0))
            pool.pages.ensure(slot, held[slot] + 2)
            if held[slot]:
                self.forward(pool, self._probe_tokens(held[slot], 7), [slot] * held[slot], range(held[slot]))
        logits = []
        for step in range(2):
            tokens = [(m * 104729 + step * 1299709 + 5) % self.vocab_size for m in members]
            logits.append(self.forward(pool, tokens, range(len(members)), [length + step for length in held]))
        for slot in range(len(members)):
            pool.pages.release(slot)
        return torch.cat(logits, dim=1)

    def _probe_tokens(self, count: int, first: int) -> list[int]:
        return [(i * 7919 + first) % self.vocab_size for i in range(count)]


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper (its layers keep their adapters), else itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def compute_dtype(model: Any, name: str) -> torch.dtype:
    """The dtype decoding computes in: `auto` and `weights` take the weights' own."""
    if name in ("auto", "weights"):
        dtype: torch.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    else:
        dtype = getattr(torch, name)
    return dtype


def unsupported_reason(model: nn.Module) -> str | None:
    """Why the engine cannot decode `model`, or None if it can."""
    peft_configs = getattr(model, "peft_config", None) or {}
    if isinstance(peft_configs, dict) and any(getattr(c, "is_prompt_learning", False) for c in peft_configs.values()):
        return "prompt-learning adapters prepend virtual tokens; use LoRA or another adapter inside the layers"
    base = base_model(model)
    config = getattr(base, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return "it is not a transformers model"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            return f"it is multimodal ({part})"
    text = config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        return f"it has layers of type {', '.join(sorted(unknown))}; only full and sliding attention are supported"
    if getattr(text, "num_kv_shared_layers", 0):
        return "some of its layers share the keys of others (num_kv_shared_layers)"
    if getattr(text, "use_bidirectional_attention", False) or any(
        getattr(module, "is_causal", True) is False for module in base.modules()
    ):
        return "its attention is bidirectional"
    if getattr(base, "get_output_embeddings", lambda: None)() is None:
        return "it has no language-model head"
    if len(places := {p.device for p in base.parameters()}) > 1 or torch.device("meta") in places:
        return f"its weights lie on several devices ({', '.join(sorted(map(str, places)))}); load it onto one"
    if any(name.endswith("sinks") for name, _ in base.named_parameters()):
        return "its attention has sinks"
    if not getattr(base, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    return None


def _rope_limit(text_config: Any) -> int | None:
    """Positions below which a longrope or dynamic RoPE does not depend on the batch's longest row."""
    parameters = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for rope in kinds:
        if rope.get("rope_type", rope.get("type")) in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(text_config, "original_max_position_embeddings", None)
            return int(original or text_config.max_position_embeddings)
    return None


def _restore(training: list[nn.Module], implementations: list[tuple[Any, str]]) -> None:
    for config, implementation in implementations:
        config._attn_implementation = implementation
    for module in training:
        module.training = True
