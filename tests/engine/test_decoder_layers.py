"""Decoder layers in one compiled call give the bits of their own code, or are left alone."""

from __future__ import annotations

import pytest
import torch

from engine.families import FAMILIES, make_model, prompts
from infinite_sampling import RolloutConfig, RolloutEngine, SamplingConfig, decoder_layers, native

LLAMA_KIND = {"llama": 4, "qwen2": 4, "qwen2-window": 4, "mistral": 4, "smollm3": 3}
"""Families with layers of the parts and the arithmetic of Llama's, and how many of four (SmolLM3 turns three)."""

pytestmark = pytest.mark.skipif(
    not native.has_products(torch.zeros(32, 32).bfloat16()), reason="this CPU does not multiply bfloat16"
)


@pytest.fixture
def agreed(monkeypatch):
    """What the first step of each layer that has the parts found."""
    found = []
    agrees = decoder_layers._DecoderLayer._agrees

    def spy(self, *args):
        found.append(agrees(self, *args))
        return found[-1]

    monkeypatch.setattr(decoder_layers._DecoderLayer, "_agrees", spy)
    return found


def make_wide(family, dtype=torch.bfloat16):
    """Of sizes that fill the kernels' blocks."""
    return make_model(family, dtype=dtype, hidden_size=96)


def decode(model, **settings):
    sampling = SamplingConfig(max_new_tokens=40, seed=3, ignore_eos=True)
    rollout = RolloutEngine(model, config=RolloutConfig(num_slots=5, **settings)).rollout(prompts(3), 4, sampling)
    return [(c.token_ids, c.logprobs) for c in rollout]


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_layer_changes_no_bit(family, weights, agreed, monkeypatch):
    model = make_wide(family, weights)
    compiled = decode(model, dtype="bfloat16")
    assert sum(agreed) == LLAMA_KIND.get(family, 0)
    monkeypatch.setattr(decoder_layers, "_weights_of", lambda layer, kernels: None)
    assert decode(model, dtype="bfloat16") == compiled


def test_a_layer_of_another_kind_is_left_alone(agreed):
    """The parts are Llama's, the arithmetic is not: a residual that counts double."""
    model = make_wide("llama")
    layer = model.model.layers[0]
    own = type(layer).forward
    type(layer).forward = lambda self, *args, **kwargs: own(self, *args, **kwargs) * (1 + self.is_odd)
    try:
        for index, other in enumerate(model.model.layers):
            other.is_odd = index == 0
        decode(model)
    finally:
        type(layer).forward = own
    assert agreed == [False] + [True] * (len(model.model.layers) - 1)


def test_a_layer_whose_parts_are_watched_keeps_its_own_code(agreed):
    model = make_wide("llama")
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    decode(model)
    assert len(seen) > 40
    assert agreed == [True] * (len(model.model.layers) - 1)


def test_products_in_float32_keep_the_layers_own_code(agreed):
    decode(make_wide("llama", torch.float32))
    assert not agreed
