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
    "rms_norm": "pppiifii",
    "silu_multiply": "pipipiii",
    "rotate": "piipppiiii",
    "philox_words": "pipppupii",
    "softmax_weights": "ppfpii",
    "has_tiles": "",
    "has_products": "",
    "pack_weight": "ppii",
    "multiply_packed": "piipippi",
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
    kv_heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    layer = _Layer(
        keys.data_ptr(),
        values.data_ptr(),
        kv_heads,
        query.shape[1] // kv_heads,
        key_dim,
        value_dim,
        keys.dtype == torch.bfloat16,
        window or 0,
        scale,
        softcap or 0.0,
    )
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
    """X (R, H, D) * cos (R, D) + rotate_half(x) * sin (R, D); x with any strides before the last axis."""
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
    """A bfloat16 weight (N, K) in the order in which a product reads it; ask `has_products` first."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self._packed, self._outputs, self._inputs = torch.empty_like(weight), *weight.shape
        self._multiply = _library().multiply_packed
        weight = weight.contiguous()  # by name, so that a copy lives as long as its address is used
        _library().pack_weight(weight.data_ptr(), self._packed.data_ptr(), *weight.shape)

    def multiply(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """X (..., K) @ weight.T + bias -> (..., N), summed in float32, for bfloat16 x. Raises MemoryError."""
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], self._outputs, dtype=out_dtype)
        failed = self._multiply(
            x.data_ptr(),
            x.numel() // self._inputs,
            self._inputs,
            self._packed.data_ptr(),
            self._outputs,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            out_dtype == torch.bfloat16,
        )
        if failed:
            raise MemoryError("no memory for the rows of a product")
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
