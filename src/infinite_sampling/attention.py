"""Attention over a shared prompt and a member's own pages: one function registered with transformers.

In: a layer's query, key and value, and the context of the running forward (`PrefillContext` or
`DecodeContext`). Out: the layer's attention output; the keys and values are stored on the way.
It knows the KV pool's layout and nothing of models, policies or sampling.

Prompts attend by PyTorch's own function. Decode rows attend by the compiled kernel of `native.py` where
it runs, else in `segments.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from infinite_sampling import native
from infinite_sampling.kv_pool import KVPool
from infinite_sampling.segments import ScoreRule, SegmentContext, attend_plain

IMPLEMENTATION = "infinite_sampling"
"""The name under which `attention_forward` is registered with transformers."""

_running = threading.local()


class Context(Protocol):
    """What a forward pass is attending to."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Store key and value (B, Hkv, t, D), attend query (B, Hq, t, D); returns (B, t, Hq, D)."""
        ...


@contextmanager
def running(context: Context) -> Iterator[None]:
    """Make `context` the one that the registered attention function serves, in this thread."""
    _running.context = context
    try:
        yield
    finally:
        _running.context = None


def is_running() -> bool:
    """Whether this thread is inside an engine's forward."""
    return getattr(_running, "context", None) is not None


def decoding() -> DecodeContext | None:
    """The decoding forward of this thread whose rows attend by the compiled kernel, if it is in one."""
    context = getattr(_running, "context", None)
    return context if isinstance(context, DecodeContext) and context.tables is not None else None


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in each attention layer (`AttentionInterface`).

    Raises RuntimeError outside of an engine's forward, and for features it does not compute.
    """
    context: Context | None = getattr(_running, "context", None)
    if context is None:
        raise RuntimeError(
            f"attention {IMPLEMENTATION!r} runs only inside RolloutEngine; set another attn_implementation"
        )
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise RuntimeError(f"{type(module).__name__} uses attention sinks or position biases, which are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window and sliding_window > 0 else None
    return context.attend(module.layer_idx, query, key, value, ScoreRule(float(scale), window, softcap)), None


class PrefillContext:
    """One chunk of one held prompt: tokens start..start+t-1, after those already written."""

    def __init__(self, pool: KVPool, prompt: int, start: int, dtype: torch.dtype) -> None:
        self.pool, self.prompt, self.start, self.dtype = pool, prompt, start, dtype
        self.layers: list[int] = []
        """Layers that have attended, in order."""
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Attend a chunk (1, Hq, t, D) to the prompt so far."""
        self.layers.append(layer)
        self.pool.write_prompt(self.prompt, layer, self.start, key.to(self.dtype), value.to(self.dtype))
        end = self.start + query.shape[2]
        keys, values = (store[:, :, :end] for store in self.pool.prompt_kv(self.prompt, layer))
        mask = self._mask(end, rule.window, query.device)
        query = query.to(self.dtype)
        if rule.softcap is None:
            out = F.scaled_dot_product_attention(
                query, keys, values, mask, is_causal=mask is None, scale=rule.scale, enable_gqa=True
            )
        else:
            groups = query.shape[1] // keys.shape[1]
            if mask is None:
                mask = torch.ones(end, end, dtype=torch.bool, device=query.device).tril()
            bias = torch.zeros(mask.shape, dtype=torch.float32, device=query.device).masked_fill_(~mask, -torch.inf)
            out, _ = attend_plain(
                query, keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), bias, rule
            )
        return out.transpose(1, 2)

    def _mask(self, end: int, window: int | None, device: torch.device) -> Tensor | None:
        """(t, end) booleans of what may be seen; None where plain causality of a square says it all."""
        if self.start == 0 and (window is None or end <= window):
            return None
        if window not in self._masks:
            distance = torch.arange(self.start, end, device=device)[:, None] - torch.arange(end, device=device)
            self._masks[window] = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return self._masks[window]


class DecodeContext:
    """One forward of R rows, each the token at `local_R[r]` of the member in `slots_R[r]`.

    The last rows may be padding: from `num_real` on they repeat row 0 and store nothing. A slot
    may bring several rows (recomputation, drafts); each sees the keys up to its own token.
    """

    def __init__(
        self,
        pool: KVPool,
        slots_R: np.ndarray,
        local_R: np.ndarray,
        num_real: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.pool, self.dtype, self.num_real = pool, dtype, num_real
        pages = pool.pages
        written = pages.table_SJ[slots_R[:num_real], local_R[:num_real] // pages.page_tokens]
        if written.min() < 0:
            raise RuntimeError(
                f"slot {slots_R[written.argmin()]} has no page for its token {local_R[written.argmin()]}"
            )
        prompts = [pages.prompts[pages.prompt_of_slot[int(slot)]] for slot in slots_R]
        self.prompt_tokens_R = np.array([prompt.num_tokens for prompt in prompts], dtype=np.int64)
        self.tables: native.RowTables | None = None
        self.rules: dict[int, ScoreRule] = {}
        """Of the layers that attended by the compiled kernel."""
        if native.supports(device, dtype):
            first_R = np.array([prompt.first for prompt in prompts[:num_real]], dtype=np.int64)
            real = slice(num_real)
            page_RJ = pages.table_SJ[slots_R[real], : int(local_R.max()) // pages.page_tokens + 1]
            self.tables = native.RowTables(
                page_RJ, local_R[real], first_R, self.prompt_tokens_R[real], pages.page_tokens
            )
        self._rows = (slots_R, local_R, num_real, device, dtype)
        self._segments: SegmentContext | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Attend rows (R, Hq, 1, D); returns (R, 1, Hq, D)."""
        dims = (query.shape[-1], value.shape[-1])
        if self.tables is None or not native.supports_width(*dims):
            self._segments = self._segments or SegmentContext(self.pool, *self._rows)
            return self._segments.attend(layer, query, key, value, rule)
        query, key, value = (
            t[:, :, 0] if t.dtype == self.dtype else t[:, :, 0].to(self.dtype) for t in (query, key, value)
        )
        keys, values = self.pool.layer(layer, key, value)
        self.rules[layer] = rule
        out = query.new_empty(*query.shape[:2], dims[1])
        out[self.num_real :] = 0
        native.decode_attention(self.tables, query.contiguous(), key, value, keys, values, *rule, out)
        return out[:, None]


def register() -> None:
    """Make `attention_forward` known to transformers under `IMPLEMENTATION`; harmless twice."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
