"""Linear layers in the compute dtype for the length of one rollout.

In: a model and a compute dtype. Out: a context in which every plain `nn.Linear` computes in that
dtype, and its output head returns float32 (rounded to the compute dtype only where the CPU or GPU
multiplies in it). It knows nothing of attention or sampling.

On a CPU the weights are packed once per rollout with oneDNN's own layout: about twice as fast as
`F.linear` at 8 to 32 rows and, unlike it, bit-identical for every number of rows. Where the CPU
has no bfloat16 arithmetic, products of bfloat16-rounded numbers are computed in float32 and
rounded once, which is what a bfloat16 unit does, and faster than emulation (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kernel = Callable[[Tensor], Tensor]

_NATIVE_ROWS = 32
"""Most rows of one bfloat16 product: above it oneDNN sums in another order (docs/log.md)."""


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
    if dtype == torch.bfloat16 and has_native_bfloat16():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

        def native(x: Tensor) -> Tensor:
            blocks = x.to(dtype).split(_NATIVE_ROWS)
            y = [torch.ops.mkldnn._linear_pointwise(block, packed, bias, "none", [], "") for block in blocks]
            return (y[0] if len(y) == 1 else torch.cat(y)).to(out_dtype)

        return native
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.float(), None)
    bias = None if bias is None else bias.float()

    def kernel(x: Tensor) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.to(dtype).float(), packed, bias, "none", [], "")
        return y.to(out_dtype)

    return kernel


def row_dependent_parameters(model: nn.Module) -> list[str]:
    """Matrices that are no plain linear layer, embedding or norm: their kernels are not ours to choose.

    Experts, for example, multiply as many rows as routing sends them.
    """
    known = {id(p) for m in model.modules() if type(m) in (nn.Linear, nn.Embedding) for p in m.parameters(False)}
    return [name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in known and "lora_" not in name]


@contextmanager
def compute_in(model: nn.Module, dtype: torch.dtype, output_head: nn.Module | None) -> Iterator[None]:
    """Run every plain `nn.Linear` of `model` in `dtype`.

    Subclasses (quantised layers) keep their own forward. All is put back on exit.
    """
    patched: list[tuple[Any, Kernel | None]] = []
    try:
        for module in model.modules():
            if type(module) is not nn.Linear or module.weight.is_meta:
                continue
            weight = module.weight
            kernel = make_kernel(weight, module.bias, dtype, torch.float32 if module is output_head else dtype)
            patched.append((module, module.__dict__.get("forward")))
            patched[-1][0].forward = kernel
        yield
    finally:
        for module, forward in patched:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def copy_bytes_per_weight(device: str, dtype: torch.dtype, weights_dtype: torch.dtype) -> int:
    """Bytes of the working copy for each weight of a linear layer."""
    if device == "cpu" and has_packing():
        return 2 if dtype == torch.bfloat16 and has_native_bfloat16() else 4
    return 0 if weights_dtype == dtype else dtype.itemsize
