"""Linear layers in the compute dtype for the length of one rollout.

In: a model and a compute dtype. Out: a context in which every plain `nn.Linear` computes in that
dtype, and its output head returns float32 (rounded to the compute dtype only where the CPU or GPU
multiplies in it). It knows nothing of attention or sampling.

Layers of one parent that read the same tensor (q, k and v; gate and up) are one product wherever a
working copy of their weights is held anyway. Each is still called on its own, so models are untouched.

On a CPU the weights are packed once per rollout with oneDNN's own layout: about twice as fast as
`F.linear` at 8 to 32 rows and, unlike it, bit-identical for every number of rows. Where the CPU
has no bfloat16 arithmetic, products of bfloat16-rounded numbers are computed in float32 and
rounded once, which is what a bfloat16 unit does, and faster than emulation (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infinite_sampling import native

Kernel = Callable[[Tensor], Tensor]

_NATIVE_ROWS = 32
"""Most rows of one bfloat16 product: above it oneDNN sums in another order (docs/log.md)."""

_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Layers of one parent that read the same tensor, by name, and what they are together."""


@cache
def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers itself (AMX or AVX512-BF16)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def has_packing() -> bool:
    """Whether this build of torch can pack a weight for oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def make_kernel(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Kernel:
    """A function x -> x @ weight.T + bias, computed in `dtype` and returned in `out_dtype`.

    The function holds a copy of the weight unless it is stored in `dtype` on an accelerator.
    """
    bias = None if bias is None else bias.detach().to(dtype)
    weight = weight.detach().to(dtype)
    if weight.device.type != "cpu" or not has_packing():
        return lambda x: F.linear(x.to(dtype), weight, bias).to(out_dtype)
    if out_dtype in (torch.bfloat16, torch.float32) and native.has_products(weight):
        return native.PackedWeight(weight, bias, out_dtype)
    return onednn_kernel(weight, bias, out_dtype)


def onednn_kernel(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Kernel:
    """What `make_kernel` is without a compiled one, on a CPU; weight and bias have one dtype."""
    dtype = weight.dtype
    is_native = dtype == torch.bfloat16 and has_native_bfloat16()
    work_dtype = dtype if is_native else torch.float32
    multiply = torch.ops.mkldnn._linear_pointwise
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(work_dtype), None)
    bias = None if bias is None else bias.to(work_dtype)

    def kernel(x: Tensor) -> Tensor:
        # A `to` or `split` that changes nothing still costs microseconds, hundreds of times a step.
        x = x if x.dtype == dtype else x.to(dtype)
        x = x if dtype == work_dtype else x.to(work_dtype)
        if is_native and x.shape[0] > _NATIVE_ROWS:
            y = torch.cat([multiply(block, packed, bias, "none", [], "") for block in x.split(_NATIVE_ROWS)])
        else:
            y = multiply(x, packed, bias, "none", [], "")
        return y if y.dtype == out_dtype else y.to(out_dtype)

    return kernel


class _Siblings:
    """One product for layers that read the same tensor: the first asked computes it, the last drops it."""

    def __init__(self, kernel: Kernel, sizes: list[int]) -> None:
        self._kernel, self._sizes = kernel, sizes
        self._x: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """The output of layer `index` for x, a view; x must not be written to before all are served."""
        if x is not self._x or index not in self._parts:
            self._parts = dict(enumerate(self._kernel(x).split_with_sizes(self._sizes, -1)))
        part = self._parts.pop(index)
        self._x = x if self._parts else None
        return part


def _groups(model: nn.Module, dtype: torch.dtype) -> list[list[nn.Linear]]:
    """The plain linear layers of `model`, in one list those that share a kernel."""
    groups: dict[Any, list[nn.Linear]] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module.weight.is_meta:
            continue
        weight = module.weight
        key: Any = name
        # PEFT calls a layer that it wraps `base_layer`. Accelerators that hold no copy would need one to share.
        parent, _, own = name.removesuffix(".base_layer").rpartition(".")
        if own in _SIBLINGS and copy_bytes_per_weight(weight.device.type, dtype, weight.dtype):
            key = (parent, _SIBLINGS[own], module.in_features, weight.dtype, weight.device)
        groups.setdefault(key, []).append(module)
    return list(groups.values())


def _replacements(
    model: nn.Module, dtype: torch.dtype, output_head: nn.Module | None, kernels: dict[nn.Module, Kernel]
) -> Iterator[tuple[Any, Kernel]]:
    """Each plain linear layer of `model` and its forward in `dtype`; its kernel, siblings' in common, in `kernels`."""
    for modules in _groups(model, dtype):
        module, bias = modules[0], None
        if len(modules) == 1:
            out_dtype = torch.float32 if module is output_head else dtype
            kernels[module] = make_kernel(module.weight, module.bias, dtype, out_dtype)
            yield module, kernels[module]
            continue
        if any(m.bias is not None for m in modules):
            bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules])
        weight = torch.cat([m.weight.detach().to(dtype) for m in modules])
        kernel = make_kernel(weight, bias, dtype, dtype)
        siblings = _Siblings(kernel, [m.out_features for m in modules])
        for index, module in enumerate(modules):
            kernels[module] = kernel
            yield module, partial(siblings.part, index)


def row_dependent_parameters(model: nn.Module) -> list[str]:
    """Matrices that are no plain linear layer, embedding or norm: their kernels are not ours to choose.

    Experts, for example, multiply as many rows as routing sends them.
    """
    known = {id(p) for m in model.modules() if type(m) in (nn.Linear, nn.Embedding) for p in m.parameters(False)}
    return [name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in known and "lora_" not in name]


@contextmanager
def compute_in(
    model: nn.Module, dtype: torch.dtype, output_head: nn.Module | None
) -> Iterator[dict[nn.Module, Kernel]]:
    """Run every plain `nn.Linear` of `model` in `dtype`; gives what computes each.

    Subclasses (quantised layers) keep their own forward. All is put back on exit.
    """
    kernels: dict[nn.Module, Kernel] = {}
    with replaced_forwards(_replacements(model, dtype, output_head, kernels)):
        yield kernels


@contextmanager
def replaced_forwards(replacements: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Give each module another forward, and back its own on exit."""
    patched: list[tuple[Any, Any]] = []
    try:
        for module, forward in replacements:
            patched.append((module, module.__dict__.get("forward")))
            module.forward = forward
        yield
    finally:
        for module, forward in patched:
            if forward is None:
                module.__dict__.pop("forward", None)  # an interrupt may come before it is set
            else:
                module.forward = forward


def copy_bytes_per_weight(device: str, dtype: torch.dtype, weights_dtype: torch.dtype) -> int:
    """Bytes of the working copy for each weight of a linear layer."""
    if device == "cpu" and has_packing():
        return 2 if dtype == torch.bfloat16 and has_native_bfloat16() else 4
    return 0 if weights_dtype == dtype else dtype.itemsize
