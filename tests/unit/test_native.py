"""The compiled kernels: exact against float64 references, bits independent of the batch, built or done without."""

from __future__ import annotations

import ctypes
import functools
import math
import multiprocessing
import platform
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from engine.families import make_model
from infinite_sampling import native, small_layers
from infinite_sampling.philox import philox_4x32_10

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C compiler")

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
PAGE_TOKENS = 32


@pytest.fixture(params=["this CPU", "AVX2"], autouse=True)
def library(request, monkeypatch):
    """The kernels as they are built here, and as they are built on an older CPU."""
    if request.param == "AVX2":
        try:
            flags = torch.backends.cpu.get_cpu_capability()
        except AttributeError:
            flags = ""
        if not flags.startswith("AVX"):
            pytest.skip("this CPU has no AVX2")
        monkeypatch.setattr(native, "load", _older_library)


@functools.cache
def _older_library():
    flags = tuple("-march=x86-64-v3" if flag == "-march=native" else flag for flag in native._FLAGS)
    return native._opened(native._built(native._compiler(), (*flags, *native._THREADS)))


class Rows:
    """Random rows over pages in random places: prompts shared by some, own tokens of different numbers."""

    def __init__(self, dtype, kv_heads=2, groups=3, key_dim=64, value_dim=64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.generator, self.dtype, self.groups = generator, dtype, groups
        self.prompt_tokens = [5, 75, 75, 64, 131, 1]
        self.local = np.array([0, 31, 32, 70, 95, 200])
        num_rows = len(self.local)
        num_pages = 80
        self.keys, self.values = (
            torch.randn(num_pages, kv_heads, PAGE_TOKENS, dim, generator=generator).to(dtype)
            for dim in (key_dim, value_dim)
        )
        free = list(range(30, num_pages))
        np.random.default_rng(seed).shuffle(free)
        self.page_RJ = np.full((num_rows, 8), -1)
        for row, local in enumerate(self.local):
            for ordinal in range(local // PAGE_TOKENS + 1):
                self.page_RJ[row, ordinal] = free.pop()
        self.prompt_page = np.array([0, 1, 1, 4, 6, 11])
        self.query = (torch.randn(num_rows, kv_heads * groups, key_dim, generator=generator) * 2).to(dtype)
        self.key = torch.randn(num_rows, kv_heads, key_dim, generator=generator).to(dtype)
        self.value = torch.randn(num_rows, kv_heads, value_dim, generator=generator).to(dtype)

    def attend(self, index, window=None, softcap=None, moved_by=0):
        """Attend the rows of `index`, with all pages moved by so many places."""
        index = np.array(index)
        own = np.where(self.page_RJ[index] >= 0, (self.page_RJ[index] - 30 + moved_by) % 50 + 30, -1)
        keys, values = (torch.cat([t[:30], t[30:].roll(moved_by, 0)]) for t in (self.keys, self.values))
        tables = native.RowTables(
            own, self.local[index], self.prompt_page[index], np.array(self.prompt_tokens)[index], PAGE_TOKENS
        )
        out = torch.empty(len(index), self.query.shape[1], self.value.shape[-1], dtype=self.dtype)
        parts = (t[index].contiguous() for t in (self.query, self.key, self.value))
        native.decode_attention(tables, *parts, keys, values, 0.11, window, softcap, out)
        return out

    def expected(self, row, window=None, softcap=None):
        """The row's attention in float64 by definition."""
        kv_heads, tokens = self.key.shape[1], self.prompt_tokens[row]
        pages = math.ceil(tokens / PAGE_TOKENS)
        parts = []
        for store, new in ((self.keys, self.key), (self.values, self.value)):
            dim, first = store.shape[-1], self.prompt_page[row]
            prompt = store[first : first + pages].reshape(-1)[: kv_heads * tokens * dim].view(kv_heads, tokens, dim)
            local = self.local[row]
            own = [store[self.page_RJ[row, i // PAGE_TOKENS], :, i % PAGE_TOKENS] for i in range(local)]
            whole = torch.cat([prompt, torch.stack([*own, new[row]], 1)], 1)
            parts.append(whole[:, -window:] if window else whole)
        keys, values = (part.double().repeat_interleave(self.groups, 0) for part in parts)
        scores = (keys @ self.query[row].double()[:, :, None])[:, :, 0] * 0.11
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        return (scores.softmax(-1)[:, None] @ values)[:, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 33, 90])
@pytest.mark.parametrize("shape", [(2, 3, 64, 64), (1, 1, 16, 48), (3, 5, 80, 32), (2, 4, 128, 128)], ids=str)
def test_attention_is_the_softmax_over_the_keys_in_sight(dtype, softcap, window, shape):
    rows = Rows(dtype, *shape)
    out = rows.attend(range(6), window, softcap)
    for row in range(6):
        expected = rows.expected(row, window, softcap)
        assert (out[row].double() - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max() * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_attends_with_the_same_bits_alone_elsewhere_and_on_other_threads(dtype, window):
    rows = Rows(dtype, 3, 3)
    together = rows.attend(range(6), window)
    before = torch.get_num_threads()
    for row in range(6):
        assert torch.equal(rows.attend([row], window)[0], together[row])
    assert torch.equal(rows.attend([5, 3, 1, 0, 2, 4, 5, 5], window)[4], together[2])
    assert torch.equal(rows.attend(range(6), window, moved_by=17), together)
    try:
        torch.set_num_threads(1)
        assert torch.equal(rows.attend(range(6), window), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 160), (192, 576), (64, 1536)])
def test_a_packed_product_is_exact_and_its_rows_are_independent(outputs, inputs, bias, out_dtype):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    if not native.has_products(weight):
        pytest.skip("this CPU does not multiply bfloat16")
    added = torch.randn(outputs, generator=generator).bfloat16() if bias else None
    packed = native.PackedWeight(weight, added, out_dtype)
    x = torch.randn(75, inputs, generator=generator).bfloat16()
    whole = packed(x)
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert (whole.double() - expected).abs().max() <= ROUNDING[out_dtype] * expected.abs().max() * 2
    for rows in (1, 2, 3, 4, 5, 8, 13, 16, 20, 31, 32, 33, 64):
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed(x[-rows:]), whole[-rows:]), rows


def test_a_product_takes_only_what_it_can():
    for weight in (torch.zeros(32, 40).bfloat16(), torch.zeros(33, 64).bfloat16(), torch.zeros(32, 32)):
        assert not native.has_products(weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_layers_are_those_of_the_models(dtype):
    for family in ("llama", "gemma2", "qwen3", "olmo2"):
        model = make_model(family, dtype=dtype)
        ids = torch.arange(2, 32).view(10, 3)
        with torch.no_grad():
            expected = model(ids).logits
            own = {name: m.__dict__.get("forward") for name, m in model.named_modules()}
            with small_layers.on_kernels(model, dtype):
                replaced = [m for m in model.modules() if "forward" in m.__dict__]
                got = model(ids).logits
        assert len(replaced) >= 2 * model.config.num_hidden_layers, family
        assert {name: m.__dict__.get("forward") for name, m in model.named_modules()} == own
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "angles"), [(dtype, angles) for dtype in DTYPES for angles in {dtype, torch.float32}], ids=str
)
def test_rotations_are_those_of_the_models(dtype, angles):
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(11, heads, 1, 64, generator=generator).to(dtype) for heads in (6, 2))
    turn = torch.rand(11, 1, 64, generator=generator) * 6
    expected = modeling_llama.apply_rotary_pos_emb(q, k, turn.cos().to(angles), turn.sin().to(angles))
    for x, by_model in zip((q, k), expected, strict=True):
        got = native.rotate(x[:, :, 0], turn.cos().to(angles), turn.sin().to(angles))
        assert got.dtype == dtype
        assert (got - by_model[:, :, 0]).abs().max() <= ROUNDING[dtype] * 4


def test_a_layer_that_computes_something_else_stays_as_it_is():
    model = make_model("llama")

    class Shifted(type(model.model.norm)):
        def forward(self, x):
            return super().forward(x) + 0.25

    model.model.norm.__class__ = Shifted
    with small_layers.on_kernels(model, torch.float32):
        assert "forward" not in model.model.norm.__dict__
        assert "forward" in model.model.layers[0].input_layernorm.__dict__


@pytest.mark.parametrize("wide", [False, True])
def test_random_words_are_philox(wide):
    generator = torch.Generator().manual_seed(2)
    rows, count = 40, 64
    v = torch.randint(0, 2**34, (rows if wide else 1, count), generator=generator)
    keys = [torch.randint(0, 2**32, (rows, 1), generator=generator) for _ in range(3)]
    seed = 0xFEDC_BA98_7654_3210
    counter = torch.stack(torch.broadcast_tensors(v >> 2, *keys))
    words = philox_4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))
    expected = words.gather(0, (v & 3).expand(rows, count)[None])[0]
    assert torch.equal(native.philox_words(v, *keys, seed), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 7.0])
def test_softmax_weights_are_exponentials(temperature):
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(3)) * 30
    x[0, 0, 0], x[1, 1, 5], x[2] = -math.inf, math.nan, -math.inf
    top = x.flatten(1).amax(1)
    got = native.softmax_weights(x, top, temperature)
    expected = ((x.double() - top.double()[:, None, None]) / temperature).exp()
    assert torch.allclose(got.double(), expected, rtol=2e-5, atol=1e-30, equal_nan=True)
    assert torch.equal(native.softmax_weights(x[3:4], top[3:4], temperature), got[3:4])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names CPUs of x86")
def test_the_sources_compile_for_other_cpus(tmp_path):
    """The tile unit's code too, which most machines cannot run."""
    sources = [str(path) for path in native._SOURCES.glob("*.c")]
    for machine in ("sapphirerapids", "x86-64-v2"):
        command = [native._compiler(), "-std=gnu11", "-O1", "-fopenmp", "-Wall", "-Wno-psabi", "-Werror"]
        done = subprocess.run(
            [*command, f"-march={machine}", "-c", *sources], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


PROBE = "from infinite_sampling import native; print(native.load() is not None)"


def _load(environment) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """A copy of the environment with an empty cache."""
    import os

    return {**os.environ, "INFINITE_SAMPLING_CACHE": str(tmp_path / "cache")}


def test_without_a_compiler_and_when_asked_pytorch_does_it(environment, tmp_path):
    assert _load({**environment, "INFINITE_SAMPLING_NATIVE": "0"}).stdout == "False\n"
    absent = _load({**environment, "PATH": str(tmp_path), "CC": ""})
    assert absent.stdout == "False\n" and "no C compiler was found" in absent.stderr


def test_a_compiler_that_fails_is_named_with_its_message(environment, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho cannot compile today >&2\nexit 1\n")
    broken.chmod(0o755)
    done = _load({**environment, "CC": str(broken)})
    assert done.stdout == "False\n" and "cannot compile today" in done.stderr


def test_a_cache_that_cannot_be_written_is_said(environment, tmp_path):
    (tmp_path / "cache").write_text("a file")
    done = _load(environment)
    assert done.stdout == "False\n" and "could not be built" in done.stderr


def test_processes_that_build_at_once_all_get_the_library(environment, tmp_path):
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_load, [environment] * 3))
    assert [done.stdout for done in results] == ["True\n"] * 3
    built = [path.name for path in (tmp_path / "cache").iterdir()]
    assert len(built) == 1
    ctypes.CDLL(str(tmp_path / "cache" / built[0]))
