"""The compiled kernels for the CPU: built once on each machine, called by address.

In: tensors and tables of one forward. Out: what the files in `csrc` compute. Knows nothing of models,
policies or sampling.

A decode step of a small model is thousands of small operations when written with tensors, and they, not
the arithmetic, are what it costs (docs/log.md). The C files have no dependency but a compiler (`CC`, else
`cc`, `gcc` or `clang`); they are built for this very CPU into the cache folder in about two seconds. Where
that fails, or with INFINITE_SAMPLING_NATIVE=0, PyTorch's own operations do the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infinite_sampling.device import cache_root

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared")
_THREADS = ("-fopenmp",)
_LANES = 16
_TILE_SIDE = 32
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "u": ctypes.c_uint64, "f": ctypes.c_float}
_SIGNATURES = {
    "decode_attention": "ppppiipiip",
    "rms_norm": "pppiifiii",
    "silu_multiply": "pipipiii",
    "rotate": "piipppiiiii",
    "philox_words": "pipppupii",
    "softmax_weights": "ppfpii",
    "has_tiles": "",
    "has_products": "",
    "pack_weight": "ppii",
    "multiply_packed": "piipippi",
    "decoder_layer": "ppppppip",
    "decoder_scratch": "pp",
}
"""Arguments of the C functions: pointers, integers, floats."""
_DTYPES = (torch.float32, torch.bfloat16)
_COMPILE_SECONDS = 120


class _Rows(ctypes.Structure):
    """`Rows` in the C file."""

    _fields_ = [(name, ctypes.c_int64) for name in ("num_rows", "max_pages", "page_tokens")] + [
        (name, ctypes.c_void_p) for name in ("page_RJ", "local_R", "prompt_page_R", "prompt_tokens_R")
    ]


class _Layer(ctypes.Structure):
    """`Layer` in the C file."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kv_heads", "groups", "key_dim", "value_dim", "is_bfloat16", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class _Weights(ctypes.Structure):
    """`Weights` in the C file."""

    _fields_ = [
        *((f"{name}{part}", ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down") for part in ("", "_bias")),
        *((name, ctypes.c_void_p) for name in ("first_norm", "second_norm")),
        *((name, ctypes.c_int64) for name in ("width", "inner", "stream_bf16")),
        *((name, ctypes.c_float) for name in ("first_epsilon", "second_epsilon")),
    ]


class RowTables:
    """Where the keys of every row of one forward stand; the same for all layers.

    Args:
        page_RJ: (R, J) pages of each row's own tokens, by ordinal.
        local_R: index of each row's token among its own, from 0; its page must be there.
        prompt_page_R, prompt_tokens_R: first page and tokens of each row's prompt.
        page_tokens: tokens of a page.
    """

    def __init__(
        self,
        page_RJ: np.ndarray,
        local_R: np.ndarray,
        prompt_page_R: np.ndarray,
        prompt_tokens_R: np.ndarray,
        page_tokens: int,
    ) -> None:
        arrays = [np.ascontiguousarray(a, dtype=np.int64) for a in (page_RJ, local_R, prompt_page_R, prompt_tokens_R)]
        self.arrays = arrays  # the structure holds their addresses only
        self.num_rows = len(local_R)
        self.rows = _Rows(self.num_rows, page_RJ.shape[1], page_tokens, *(a.ctypes.data for a in arrays))


def decode_attention(
    tables: RowTables,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    """Store key and value (R, Hkv, D) in the pool's keys and values (P, Hkv, K, D), attend query (R, Hq, D) into out.

    The first R rows of `query` and of `out` (rows, Hq, Dv), both contiguous, are used. All tensors have
    one dtype. Raises MemoryError.
    """
    layer = _layer(keys, values, query.shape[1], scale, window, softcap)
    failed = _library().decode_attention(
        ctypes.byref(tables.rows),
        ctypes.byref(layer),
        query.data_ptr(),
        key.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.data_ptr(),
        value.stride(0),
        value.stride(1),
        out.data_ptr(),
    )
    if failed:
        raise MemoryError("no memory for the scores of a row")


def _layer(
    keys: Tensor, values: Tensor, query_heads: int, scale: float, window: int | None, softcap: float | None
) -> _Layer:
    kv_heads, is_bfloat16 = keys.shape[1], keys.dtype == torch.bfloat16
    shapes = (kv_heads, query_heads // kv_heads, keys.shape[3], values.shape[3])
    return _Layer(keys.data_ptr(), values.data_ptr(), *shapes, is_bfloat16, window or 0, scale, softcap or 0.0)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, of_one: bool) -> Tensor:
    """X (..., H) over its root mean square, times weight (H,), or 1 + weight; one dtype, contiguous."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    _library().rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        epsilon,
        of_one,
        x.dtype == torch.bfloat16,
        x.dtype == torch.bfloat16,
    )
    return out


def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for (R, W), each with any stride between its rows."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype)
    _library().silu_multiply(
        gate.data_ptr(),
        gate.stride(0),
        up.data_ptr(),
        up.stride(0),
        out.data_ptr(),
        rows,
        width,
        gate.dtype == torch.bfloat16,
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """X (R, H, D) * cos (R, D) + rotate_half(x) * sin (R, D) in the dtype of x, with any strides before its last axis.

    `cos` and `sin` are contiguous, of one dtype: x's or float32.
    """
    rows, heads, width = x.shape
    out = torch.empty(rows, heads, width, dtype=x.dtype)
    _library().rotate(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        width,
        x.dtype == torch.bfloat16,
        cos.dtype == torch.bfloat16,
    )
    return out


def philox_words(v: Tensor, positions: Tensor, members: Tensor, prompts: Tensor, key: int) -> Tensor:
    """Word v mod 4 of Philox 4x32-10 at (v div 4, position, member, prompt) under a key of 64 bits, (R, N) int64.

    `v` is (R, N) or (1, N), the others (R, 1), all int64.
    """
    columns = [t.contiguous() for t in (positions, members, prompts)]
    rows, count = len(positions), v.shape[1]
    v = v.contiguous()
    out = torch.empty(rows, count, dtype=torch.int64)
    addresses = [t.data_ptr() for t in columns]
    _library().philox_words(v.data_ptr(), count * (len(v) > 1), *addresses, key, out.data_ptr(), rows, count)
    return out


def softmax_weights(x: Tensor, top: Tensor, temperature: float) -> Tensor:
    """exp((x - top) / temperature) for float32 x (R, ...), rows of a multiple of 16 numbers, and top (R,)."""
    x, top = x.contiguous(), top.contiguous()
    out = torch.empty_like(x)
    _library().softmax_weights(
        x.data_ptr(), top.data_ptr(), temperature, out.data_ptr(), len(x), x.numel() // max(len(x), 1)
    )
    return out


def has_products(weight: Tensor) -> bool:
    """Whether `PackedWeight` can multiply by this weight: bfloat16, which the CPU multiplies, in multiples of 32."""
    if (
        weight.dtype != torch.bfloat16
        or any(side % _TILE_SIDE for side in weight.shape)
        or not supports(weight.device, weight.dtype)
        or not _library().has_products()
    ):
        return False
    # The system gives the tile unit to a process that asks for it.
    return not _library().has_tiles() or (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


class PackedWeight:
    """A bfloat16 weight (N, K) in the order in which a product reads it, and that product.

    Ask `has_products` first. Outputs are summed in float32 and rounded to `out_dtype`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        self.bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self.data = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.outputs, self.inputs = weight.shape
        self.out_dtype = out_dtype
        self._multiply = _library().multiply_packed
        weight = weight.contiguous()  # by name, so that the copy lives as long as its address is used
        _library().pack_weight(weight.data_ptr(), self.data.data_ptr(), *weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """X (..., K) @ weight.T + bias -> (..., N). Raises MemoryError."""
        x = (x if x.dtype == torch.bfloat16 else x.to(torch.bfloat16)).contiguous()
        out = torch.empty(*x.shape[:-1], self.outputs, dtype=self.out_dtype)
        failed = self._multiply(
            x.data_ptr(),
            x.numel() // self.inputs,
            self.inputs,
            self.data.data_ptr(),
            self.outputs,
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            self.out_dtype == torch.bfloat16,
        )
        if failed:
            raise MemoryError("no memory for the rows of a product")
        return out


class DecoderWeights:
    """All of a decoder layer of the Llama kind: its products (qkv, out, gate and up, down) and its two norms.

    Args:
        norms: weights (H,) and epsilons, before attention and before the MLP.
    """

    def __init__(self, products: list[PackedWeight], norms: list[tuple[Tensor, float]]) -> None:
        self._products, self._norms = products, norms  # the structure holds their addresses only
        self._width, self._inner = products[0].inputs, products[3].inputs
        addresses = [t if t is None else t.data_ptr() for p in products for t in (p.data, p.bias)]
        (first, first_epsilon), (second, second_epsilon) = norms
        self._weights = _Weights(
            *addresses,
            first.data_ptr(),
            second.data_ptr(),
            self._width,
            self._inner,
            first.dtype == torch.bfloat16,
            first_epsilon,
            second_epsilon,
        )

    def fit(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Whether shapes and dtypes are those of one layer that keeps these keys and values."""
        qkv, out, gate_up, down = self._products
        (_, kv_heads, _, key_dim), value_dim, width = keys.shape, values.shape[3], self._width
        heads = out.inputs // value_dim
        sides = [
            ((heads + kv_heads) * key_dim + kv_heads * value_dim, width),
            (width, heads * value_dim),
            (2 * self._inner, width),
            (width, self._inner),
        ]
        dtypes = {keys.dtype, values.dtype, *(p.out_dtype for p in self._products)}
        stream = {hidden.dtype, cos.dtype, sin.dtype, *(weight.dtype for weight, _ in self._norms)}
        return (
            dtypes == {torch.bfloat16}
            and len(stream) == 1
            and stream <= set(_DTYPES)
            and cos.shape == sin.shape == (len(hidden), 1, key_dim)
            and [(p.outputs, p.inputs) for p in (qkv, out, gate_up, down)] == sides
            and all(w.shape == (width,) for w, _ in self._norms)
            and heads % kv_heads == 0
            and supports_width(key_dim // 2, value_dim)
        )

    def run(
        self,
        tables: RowTables,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """The layer's output for hidden (R, 1, H) under cos and sin (R, 1, D), over a pool's keys and values.

        The first rows are those of `tables`, the rest padding. Raises MemoryError.
        """
        query_heads = self._products[1].inputs // values.shape[3]
        layer = _layer(keys, values, query_heads, scale, window, softcap)
        out = hidden.clone(memory_format=torch.contiguous_format)
        cos, sin = cos.contiguous(), sin.contiguous()
        at, weights = ctypes.byref(layer), ctypes.byref(self._weights)
        scratch = torch.empty(len(out) * _library().decoder_scratch(at, weights), dtype=torch.bfloat16)
        failed = _library().decoder_layer(
            ctypes.byref(tables.rows),
            at,
            weights,
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            len(out),
            scratch.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for the rows of a layer")
        return out


def _library() -> ctypes.CDLL:
    library = load()
    assert library is not None, "ask `supports` first"
    return library


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device in this dtype (widths: `supports_width`)."""
    return device.type == "cpu" and dtype in _DTYPES and load() is not None


def supports_width(*widths: int) -> bool:
    """Whether rows of so many numbers fill whole vectors."""
    return all(width % _LANES == 0 for width in widths)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, built if it must be; None where it cannot be (said once in the log)."""
    if os.environ.get("INFINITE_SAMPLING_NATIVE", "1") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        logger.warning("no C compiler was found: decoding on the CPU is slower without the compiled kernels")
        return None
    reasons = []
    for flags in ((*_FLAGS, *_THREADS), _FLAGS):
        try:
            return _opened(_built(compiler, flags))
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(str(getattr(error, "stderr", None) or error).strip())
    logger.warning("the CPU kernels could not be built, decoding is slower without them: %s", reasons[-1])
    return None


def _compiler() -> str | None:
    return next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = [_TYPES[letter] for letter in arguments]
    return library


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """The library's file, compiled if the cache has none for this source, compiler, flags and CPU."""
    sources = sorted(_SOURCES.iterdir())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout
    key = "\n".join([*(path.read_text() for path in sources), compiler, version, *flags, _cpu()])
    path = cache_root() / f"native-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [compiler, *flags, *(str(p) for p in sources if p.suffix == ".c"), "-lm", "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
            os.replace(built, path)
    return path


def _cpu() -> str:
    """What decides which instructions `-march=native` may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
