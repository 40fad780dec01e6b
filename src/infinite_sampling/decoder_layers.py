"""Whole decoder layers as one compiled call each, for the length of one rollout.

In: a model whose linear layers have compiled kernels. Out: a context in which its layers of the Llama kind
run in one call where one token a row is decoded. It knows nothing of sampling or policies.

A layer qualifies by its parts. Its first decoding step runs both ways, and only if all bits agree is the
compiled call used from then on: it is the same kernels in the same order, without the Python between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from infinite_sampling import attention, native
from infinite_sampling.attention import DecodeContext
from infinite_sampling.linear import replaced_forwards
from infinite_sampling.segments import ScoreRule
from infinite_sampling.small_layers import epsilon_of, is_norm

_PARTS = {
    "": {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""Children of a layer of the Llama kind, and of its parts."""


Kernels = Mapping[nn.Module, Callable[[Tensor], Tensor]]
"""What computes each linear layer of a model."""


def on_kernels(model: nn.Module, kernels: Kernels) -> AbstractContextManager[None]:
    """Run the decoder layers of `model` in one call each; all is put back on exit."""
    return replaced_forwards(_replacements(model, kernels))


def _replacements(model: nn.Module, kernels: Kernels) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for module in model.modules():
        if "forward" not in module.__dict__ and (weights := _weights_of(module, kernels)):
            yield module, _DecoderLayer(module, weights).forward


def _weights_of(layer: Any, kernels: Kernels) -> native.DecoderWeights | None:
    """The weights of a layer that has the parts of a Llama layer, and nothing that watches them."""
    for name, children in _PARTS.items():
        part = getattr(layer, name) if name else layer
        if {child for child, _ in part.named_children()} != children:
            return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules() if m is not layer):
        return None
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    linears = (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
    products = [kernel for m in linears if isinstance(kernel := kernels.get(m), native.PackedWeight)]
    if len(products) < len(linears) or not all(map(is_norm, norms)):
        return None
    return native.DecoderWeights(products, [(n.weight.detach(), epsilon_of(n)) for n in norms])


class _DecoderLayer:
    """One layer and its two ways to run."""

    def __init__(self, module: Any, weights: native.DecoderWeights) -> None:
        self._own, self._index = module.forward, module.self_attn.layer_idx
        self._weights: native.DecoderWeights | None = weights
        self._rule: ScoreRule | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward gives."""
        context, angles = attention.decoding(), kwargs.get("position_embeddings")
        if self._weights is None or context is None or args or angles is None:
            return self._own(hidden_states, *args, **kwargs)
        if self._rule is None:
            expected = self._own(hidden_states, **kwargs)
            if not self._agrees(context, hidden_states, angles, expected):
                self._weights = None
            return expected
        return self._run(context, hidden_states, angles)

    def _agrees(self, context: DecodeContext, hidden: Tensor, angles: tuple[Tensor, Tensor], expected: Any) -> bool:
        assert self._weights is not None
        keys, values = context.pool.keys_L[self._index], context.pool.values_L[self._index]
        if not self._weights.fit(hidden, *angles, keys, values):
            return False
        self._rule = context.rules[self._index]
        return torch.equal(self._run(context, hidden, angles), expected)

    def _run(self, context: DecodeContext, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        assert context.tables is not None and self._weights is not None and self._rule is not None
        keys, values = context.pool.keys_L[self._index], context.pool.values_L[self._index]
        scale, window, softcap = self._rule
        return self._weights.run(context.tables, hidden, *angles, keys, values, scale, window, softcap)
