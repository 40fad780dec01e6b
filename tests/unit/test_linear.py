"""Linear layers while decoding: numbers as unfused, the same bits for any rows, nothing kept or left behind."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional as F

from infinite_sampling import linear
from infinite_sampling.linear import compute_in, make_kernel

DTYPES = [torch.float32, torch.bfloat16]
SIZE = 576
OUT = {"q_proj": 64, "k_proj": 16, "v_proj": 24}
NAMES = list(OUT)

needs_packing = pytest.mark.skipif(not linear.has_packing(), reason="this build of torch packs no weights")


class Block(nn.Module):
    def __init__(self, biased: tuple[str, ...] = ()) -> None:
        super().__init__()
        for name, size in {**OUT, "gate_proj": 96, "up_proj": 96}.items():
            self.add_module(name, nn.Linear(SIZE, size, bias=name in biased))
        self.down_proj = nn.Linear(96, SIZE, bias=False)
        self.lm_head = nn.Linear(SIZE, 7, bias=False)


def make_block(*biased: str) -> Block:
    torch.manual_seed(0)
    return Block(biased).requires_grad_(False)


def rows(count: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 1, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def alone(module: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    return make_kernel(module.weight, module.bias, dtype, dtype)(x)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def made(monkeypatch) -> list[tuple[int, int]]:
    """The shapes of the weights that kernels are made for."""
    shapes: list[tuple[int, int]] = []

    def counting(weight, *rest):
        shapes.append(tuple(weight.shape))
        return make_kernel(weight, *rest)

    monkeypatch.setattr(linear, "make_kernel", counting)
    return shapes


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
def test_siblings_share_one_packed_weight_that_replaces_their_own(made, dtype):
    with compute_in(make_block(), dtype, None):
        assert sorted(made) == sorted([(64 + 16 + 24, SIZE), (96 + 96, SIZE), (SIZE, 96), (7, SIZE)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [(), ("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj"), ("k_proj", "up_proj")])
def test_siblings_give_what_each_gives_alone(dtype, biased):
    block, x = make_block(*biased), rows(8, dtype=dtype)
    with compute_in(block, dtype, block.lm_head):
        for name in [*OUT, "gate_proj", "up_proj", "lm_head"]:
            module = getattr(block, name)
            got = module(x)
            assert got.dtype == (torch.float32 if name == "lm_head" else dtype)
            close(got.to(dtype), alone(module, x, dtype))
            close(got.to(dtype), F.linear(x.float(), module.weight, module.bias).to(dtype))


@needs_packing
def test_siblings_share_also_where_bfloat16_is_computed_in_float32(monkeypatch):
    monkeypatch.setattr(linear, "has_native_bfloat16", lambda: False)
    block, x = make_block("k_proj"), rows(64, dtype=torch.bfloat16)
    with compute_in(block, torch.bfloat16, None):
        whole = [getattr(block, name)(x) for name in OUT]
        few = x[:4]
        for name, output in zip(OUT, whole, strict=True):
            close(output, alone(getattr(block, name), x, torch.bfloat16))
            assert torch.equal(getattr(block, name)(few), output[:4])


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_siblings_may_be_called_in_any_order(order):
    block, x = make_block("k_proj"), rows(4)
    with compute_in(block, torch.float32, None):
        for _ in range(2):
            for name in order:
                close(getattr(block, name)(x), alone(getattr(block, name), x, torch.float32))


@pytest.mark.parametrize(
    "calls",
    [
        [("q_proj", 0), ("q_proj", 1), ("k_proj", 0), ("k_proj", 1), ("v_proj", 1), ("v_proj", 0)],
        [("q_proj", 0), ("q_proj", 0), ("k_proj", 0), ("k_proj", 0), ("v_proj", 0)],
        [("q_proj", 0), ("k_proj", 0), ("q_proj", 1), ("k_proj", 1), ("v_proj", 0), ("v_proj", 1)],
        [("v_proj", 0), ("k_proj", 1), ("q_proj", 0)],
    ],
)
def test_another_tensor_in_between_is_never_confused(calls):
    block, inputs = make_block(), [rows(4, seed=1), rows(12, seed=2)]
    with compute_in(block, torch.float32, None):
        for name, i in calls:
            close(getattr(block, name)(inputs[i]), alone(getattr(block, name), inputs[i], torch.float32))


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_whatever_their_number(dtype):
    block, x = make_block("q_proj"), rows(64, dtype=dtype)
    with compute_in(block, dtype, block.lm_head):
        for name, module in block.named_children():
            if module.in_features == SIZE:
                whole = module(x)
                for count in range(4, 64, 4):
                    assert torch.equal(module(x[:count]), whole[:count]), (name, count)


def test_a_prompt_is_one_row_of_many_tokens():
    block, x = make_block(), rows(75).view(1, 75, SIZE)
    with compute_in(block, torch.bfloat16, None):
        for name in OUT:
            got = getattr(block, name)(x)
            assert got.view(1, 75, -1, 8).transpose(1, 2).shape == (1, OUT[name] // 8, 75, 8)
            close(got, alone(getattr(block, name), x, torch.bfloat16))


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_nothing_is_kept_once_every_sibling_is_served(order):
    block, x = make_block(), rows(4)
    kept = weakref.ref(x)
    with compute_in(block, torch.float32, None):
        storages = [weakref.ref(getattr(block, name)(x).untyped_storage()) for name in order]
        del x
        assert kept() is None
        assert all(storage() is None for storage in storages)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_after_the_context(fails):
    block, x = make_block(), rows(4)
    kept, error = weakref.ref(x), None
    try:
        with compute_in(block, torch.float32, None):
            block.q_proj(x)
            block.gate_proj(x)
            if fails:
                raise ValueError("in the middle of a layer")
    except ValueError as caught:
        error = caught  # holds the frames that it passed through
    del x
    assert kept() is None
    assert (error is not None) == fails
    assert not any("forward" in module.__dict__ for module in block.modules())


def test_forwards_of_others_are_put_back_also_if_packing_fails(monkeypatch):
    block, calls = make_block(), iter(range(9))

    def wrapped(x):
        return x

    block.k_proj.forward = wrapped
    with compute_in(block, torch.float32, None):
        assert block.k_proj.forward is not wrapped

    def failing(*arguments):
        if next(calls) == 2:
            raise MemoryError("no room")
        return make_kernel(*arguments)

    monkeypatch.setattr(linear, "make_kernel", failing)
    with pytest.raises(MemoryError, match="no room"), compute_in(block, torch.float32, None):
        pass
    assert block.k_proj.forward is wrapped
    assert [m for m in block.modules() if "forward" in m.__dict__] == [block.k_proj]


def test_layers_that_differ_or_are_quantised_stay_alone(made):
    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., :5]

    block = make_block()
    block.k_proj = nn.Linear(SIZE // 2, 16)
    block.v_proj = nn.Linear(SIZE, 24, dtype=torch.float64)
    block.up_proj = Quantised(SIZE, 96)
    with compute_in(block, torch.float32, None), torch.no_grad():
        assert len(made) == len(list(block.children())) - 1
        assert block.up_proj(rows(4)).shape[-1] == 5
        assert block.q_proj(rows(4)).shape[-1] == 64
        assert block.k_proj(rows(4)[..., : SIZE // 2]).shape[-1] == 16


def test_weights_that_need_no_copy_get_none(made, monkeypatch):
    monkeypatch.setattr(linear, "has_packing", lambda: False)  # as on an accelerator
    block, x = make_block(), rows(4)
    with compute_in(block, torch.float32, None):
        assert len(made) == len(list(block.children()))
        assert torch.equal(block.k_proj(x), F.linear(x, block.k_proj.weight))
    made.clear()
    with compute_in(block, torch.bfloat16, None):
        assert (64 + 16 + 24, SIZE) in made
        close(block.k_proj(x), F.linear(x.bfloat16(), block.k_proj.weight.bfloat16()))


@pytest.mark.parametrize("targets", [NAMES, ["q_proj", "v_proj"]])
def test_adapters_are_added_to_siblings(made, targets):
    block, x = make_block("v_proj"), rows(4)
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.5)
    inject_adapter_in_model(config, block)
    block.eval()
    with torch.no_grad():
        expected = [getattr(block, name)(x) for name in OUT]
        with compute_in(block, torch.float32, None):
            assert not linear.has_packing() or (64 + 16 + 24, SIZE) in made
            for name, output in zip(OUT, expected, strict=True):
                close(getattr(block, name)(x), output)
            block.train()  # dropout: the adapter's input is another tensor, the layer's is not
            assert [getattr(block, name)(x).shape for name in OUT] == [output.shape for output in expected]
