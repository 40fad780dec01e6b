"""Settings are checked in one place, before any work, with one helpful error."""

from __future__ import annotations

import pytest

from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig, check_keys, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2**31),
        ("2G", 2**31),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        (77, 77),
        ("9", 9),
    ],
)
def test_sizes_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "5 parsecs", 0, -3, True, 1.5, None])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-9}, "use 0 for greedy"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "must not exceed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"eos_token_ids": [-2]}, "eos_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"forced_lengths": [[0]]}, "forced_lengths"),
        ({"forced_lengths": [[300]], "max_new_tokens": 256}, "exceeds max_new_tokens"),
    ],
)
def test_a_wrong_sampling_setting_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        SamplingConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "fixedslot"}, "did you mean 'fixed-slot'"),
        ({"policy": "length-aware"}, "not available in this version"),
        ({"policy": "oracle"}, "not available in this version"),
        ({"num_slots": 0}, "num_slots must be an integer of at least 1, got 0"),
        ({"num_slots": True}, "num_slots"),
        ({"kv_budget": "lots"}, "cannot read the size"),
        ({"dtype": "bf16"}, "did you mean|expected one of"),
        ({"prefill_chunk_tokens": 1}, "prefill_chunk_tokens"),
    ],
)
def test_a_wrong_rollout_setting_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        RolloutConfig(**settings)


def test_convenient_forms_are_normalised():
    config = SamplingConfig(stop="END", eos_token_ids=[3, 4])
    assert config.stop == ("END",) and config.eos_token_ids == (3, 4)
    assert not config.has_filters
    assert SamplingConfig(top_k=5).has_filters and SamplingConfig(repetition_penalty=1.1).has_filters


def test_keys_default_to_positions_and_must_fit():
    assert check_keys("keys", None, 3) == (0, 1, 2)
    assert check_keys("keys", [7, 5], 2) == (7, 5)
    for keys in ([1], [1, -1], [1, 2**32], [1, "a"]):
        with pytest.raises(ConfigError, match="keys"):
            check_keys("keys", keys, 2)
