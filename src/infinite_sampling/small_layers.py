"""Norms, gated MLPs and rotary embeddings on the compiled kernels, for the length of one rollout.

In: a model. Out: a context in which the small layers that `native.py` can compute are computed there, one
call each instead of three to eight. It knows nothing of attention, matrix products or sampling.

A layer is recognised by what it computes, not by its class: the kernel must agree with the layer's own
forward on made-up rows, once for each class and dtype, to a rounding of the dtype. What does not
agree, or has another shape, stays as it is.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infinite_sampling import attention, native
from infinite_sampling.linear import replaced_forwards

_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""Difference, over the largest output, within which two forwards are one."""
_ROTARY = "apply_rotary_pos_emb"
Forward = Callable[[Tensor], Tensor]
Rotary = Callable[..., tuple[Tensor, Tensor]]

_lock = threading.Lock()
_rotating: dict[str, tuple[Any, int]] = {}
"""By module of transformers: its own rotary function, and how many rollouts have replaced it."""


@contextmanager
def on_kernels(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute the small layers of `model`, which decodes in `dtype`, on the kernels; all is put back on exit."""
    with ExitStack() as stack:
        if native.supports(next(model.parameters()).device, dtype):
            stack.enter_context(replaced_forwards(_replacements(model, dtype)))
            for name in sorted({type(module).__module__ for module in model.modules()}):
                own = getattr(sys.modules.get(name), _ROTARY, None)
                if own is not None and _rotates_alike(own, dtype):
                    stack.enter_context(_rotary_on_kernel(name))
        yield


def _replacements(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    makers: dict[Any, Callable[[Any], Forward] | None] = {}
    module: Any
    for module in model.modules():
        key: tuple[Any, ...]
        variants: tuple[Callable[[Any], Forward], ...]
        if "forward" in module.__dict__:
            continue
        if is_norm(module):
            key = (type(module), module.weight.dtype, module.weight.shape)
            variants = (partial(_norm_forward, of_one=False), partial(_norm_forward, of_one=True))
            width, rows_dtype = len(module.weight), module.weight.dtype
        elif _is_gated(module):
            key, variants = (type(module), type(module.act_fn)), (_gated_forward,)
            width, rows_dtype = module.gate_proj.in_features, dtype
        else:
            continue
        if key not in makers:
            rows = _made_up(3, width).to(rows_dtype) * torch.tensor([[0.03], [1.0], [50.0]], dtype=rows_dtype)
            makers[key] = next((make for make in variants if _agree(module, make(module), rows)), None)
        if make := makers[key]:
            yield module, make(module)


def _made_up(*shape: int) -> Tensor:
    """Numbers of mixed signs and sizes below 1 that do not repeat."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) ** 1.5).view(shape)


@torch.no_grad()
def _agree(module: nn.Module, forward: Forward, rows: Tensor) -> bool:
    expected, got = module(rows), forward(rows)
    return bool(got.dtype == expected.dtype and _are_close(got, expected))


def _are_close(got: Tensor, expected: Tensor) -> bool:
    most = expected.abs().amax(-1, keepdim=True)
    return bool(((got - expected).abs() <= _ROUNDING[got.dtype] * most).all())


def is_norm(module: Any) -> bool:
    """Whether a module looks like one that the norm kernel computes."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, nn.Parameter)
        and weight.dim() == 1
        and len(list(module.parameters())) == 1
        and weight.dtype in _ROUNDING
        and native.supports_width(len(weight))
        and isinstance(epsilon_of(module), float)
    )


def epsilon_of(module: Any) -> Any:
    """A norm's epsilon, by any of its names; None without."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norm_forward(module: Any, of_one: bool) -> Forward:
    weight, epsilon, own = module.weight.detach(), epsilon_of(module), module.forward

    def forward(x: Tensor) -> Tensor:
        if x.dtype != weight.dtype or not x.is_contiguous():
            return own(x)
        return native.rms_norm(x, weight, epsilon, of_one)

    return forward


def _is_gated(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    is_silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return is_silu and all(hasattr(part, "in_features") for part in parts)


def _gated_forward(module: Any) -> Forward:
    gate_proj, up_proj, down_proj, act_fn = module.gate_proj, module.up_proj, module.down_proj, module.act_fn

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_proj(x), up_proj(x)
        width = gate.shape[-1]
        if gate.dtype not in _ROUNDING or up.dtype != gate.dtype or not native.supports_width(width):
            return down_proj(act_fn(gate) * up)
        product = native.silu_multiply(gate.reshape(-1, width), up.reshape(-1, width))
        return down_proj(product.view(gate.shape))

    return forward


def _rotates_alike(own: Rotary, dtype: torch.dtype) -> bool:
    """Whether a family's rotary function is the one that the kernel computes."""
    q, k = (_made_up(2, heads, 1, 64).to(dtype) * heads for heads in (3, 5))
    angles = _made_up(2, 1, 64), _made_up(2, 1, 64) * 0.5
    try:
        for angles_dtype in {dtype, torch.float32}:
            cos, sin = (angle.to(angles_dtype) for angle in angles)
            pairs = zip(own(q, k, cos, sin), _rotate(q, k, cos, sin), strict=True)
            if not all(_are_close(got, expected) for expected, got in pairs):
                return False
        return True
    except (TypeError, ValueError, RuntimeError):
        return False


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate one token a row: q and k (R, H, 1, D), cos and sin (R, 1, D)."""
    return tuple(native.rotate(x[:, :, 0], cos, sin)[:, :, None] for x in (q, k))  # type: ignore[return-value]


@contextmanager
def _rotary_on_kernel(name: str) -> Iterator[None]:
    """Let decoding forwards of the family in module `name` rotate on the kernel; other forwards do as before."""
    family = sys.modules[name]
    with _lock:
        own, users = _rotating.get(name, (getattr(family, _ROTARY), 0))
        _rotating[name] = (own, users + 1)
        if not users:
            setattr(family, _ROTARY, _decoding_rotary(own))
    try:
        yield
    finally:
        with _lock:
            own, users = _rotating.pop(name)
            if users > 1:
                _rotating[name] = (own, users - 1)
            else:
                setattr(family, _ROTARY, own)


def _decoding_rotary(own: Rotary) -> Rotary:
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        fits = (
            attention.is_running()
            and not (args or kwargs)
            and q.shape[2] == 1
            and cos.shape == (q.shape[0], 1, q.shape[3])
            and q.dtype == k.dtype
            and cos.dtype in (q.dtype, torch.float32)
            and q.dtype in _ROUNDING
            and native.supports_width(q.shape[3] // 2)
            and q.shape[3] % 2 == 0
        )
        return _rotate(q, k, cos, sin) if fits else own(q, k, cos, sin, *args, **kwargs)

    return rotary
