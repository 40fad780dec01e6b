"""The memory plan is arithmetic that a rollout then confirms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinite_sampling.config import ConfigError
from infinite_sampling.memory import KVShape, format_bytes, member_tokens_reserved, page_tokens_for, plan_memory

SMOLLM2 = KVShape(num_layers=30, num_kv_heads=3, head_dim=64)


def test_bytes_of_a_token_are_those_of_its_keys_and_values():
    assert SMOLLM2.bytes_per_token("float32") == 2 * 30 * 3 * 64 * 4
    assert SMOLLM2.bytes_per_token("bfloat16") == 2 * 30 * 3 * 64 * 2


def test_the_shape_is_read_from_a_config_with_or_without_grouped_heads():
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=32)
    assert KVShape.of(config) == KVShape(2, 4, 8)
    config.num_key_value_heads, config.head_dim = 1, 16
    assert KVShape.of(config) == KVShape(2, 1, 16)


def test_group_size_does_not_change_the_kv():
    plans = [
        plan_memory(SMOLLM2, dtype="float32", num_generations=g, prompt_tokens=100, max_new_tokens=256, num_slots=4)
        for g in (4, 32, 256, 1024)
    ]
    assert len({plan.kv_bytes for plan in plans}) == 1
    assert plans[1].kv_bytes < 0.2 * plans[1].full_kv_bytes


def test_a_budget_bounds_the_pool_and_not_the_members_in_flight():
    common = {"dtype": "bfloat16", "num_generations": 64, "prompt_tokens": 100, "max_new_tokens": 257}
    rigid = plan_memory(SMOLLM2, **common, kv_budget_bytes=64 * 2**20, may_preempt=False)
    assert rigid.kv_bytes <= 64 * 2**20 < rigid.kv_bytes + rigid.member_kv_bytes
    elastic = plan_memory(SMOLLM2, **common, kv_budget_bytes=64 * 2**20)
    assert elastic.kv_bytes <= 64 * 2**20 and elastic.num_slots == 64 > rigid.num_slots
    assert plan_memory(SMOLLM2, **common, kv_budget_bytes=2**40).num_slots == 64
    assert plan_memory(SMOLLM2, **common, kv_budget_bytes=2**40).kv_bytes < 2**40


def test_a_budget_below_one_member_names_the_smallest_that_would_do():
    common = {"dtype": "bfloat16", "num_generations": 64, "prompt_tokens": 100, "max_new_tokens": 257}
    with pytest.raises(ConfigError, match=r"smallest that would do is \d+ bytes") as error:
        plan_memory(SMOLLM2, **common, kv_budget_bytes=1000)
    smallest = int(str(error.value).split("would do is ")[1].split()[0])
    assert plan_memory(SMOLLM2, **common, kv_budget_bytes=smallest, may_preempt=False).num_slots == 1
    assert plan_memory(SMOLLM2, **common, kv_budget_bytes=smallest).kv_bytes == smallest
    with pytest.raises(ConfigError):
        plan_memory(SMOLLM2, **common, kv_budget_bytes=smallest - 1)


def naive_kv(num_prompts: int, num_slots: int, prompt_tokens: int, max_new_tokens: int) -> int:
    """KV bytes of so many slots, counted without the plan's arithmetic."""
    held = sum(prompt < num_slots for prompt in range(num_prompts))
    page = page_tokens_for(max_new_tokens)
    tokens = held * -(-prompt_tokens // page) * page + num_slots * member_tokens_reserved(max_new_tokens)
    return tokens * SMOLLM2.bytes_per_token("bfloat16")


@given(num_prompts=st.integers(1, 9), num_generations=st.integers(1, 5), budget=st.integers(1, 60 * 2**20))
def test_slots_beyond_the_prompts_share_them_also_under_a_budget(num_prompts, num_generations, budget):
    lengths = {"prompt_tokens": 100, "max_new_tokens": 257}
    common = {"dtype": "bfloat16", "num_prompts": num_prompts, "num_generations": num_generations, **lengths}
    counts = range(1, num_prompts * num_generations + 1)
    for slots in counts:
        plan = plan_memory(SMOLLM2, **common, num_slots=slots)
        assert plan.kv_bytes == naive_kv(num_prompts, slots, **lengths)
        assert plan.num_held_prompts == min(num_prompts, slots)
    fitting = [slots for slots in counts if naive_kv(num_prompts, slots, **lengths) <= budget]
    if fitting:
        plan = plan_memory(SMOLLM2, **common, kv_budget_bytes=budget, may_preempt=False)
        assert plan.num_slots == max(fitting)
        assert plan_memory(SMOLLM2, **common, kv_budget_bytes=budget).kv_bytes <= budget
    else:
        with pytest.raises(ConfigError, match=f"would do is {naive_kv(num_prompts, 1, **lengths)} bytes"):
            plan_memory(SMOLLM2, **common, kv_budget_bytes=budget)


@pytest.mark.parametrize("name", ["num_generations", "prompt_tokens", "max_new_tokens", "num_prompts", "num_slots"])
def test_counts_below_one_are_refused(name):
    values = {"num_generations": 2, "prompt_tokens": 3, "max_new_tokens": 4, "num_prompts": 1, "num_slots": 1, name: 0}
    with pytest.raises(ConfigError, match=name):
        plan_memory(SMOLLM2, dtype="float32", **values)


def test_pages_round_a_member_up_by_less_than_one_page():
    for tokens in range(1, 1000, 7):
        reserved = member_tokens_reserved(tokens)
        assert max(tokens - 1, 1) <= reserved < max(tokens - 1, 1) + page_tokens_for(max(tokens - 1, 1))
        assert reserved % 16 == 0


def test_bytes_are_printed_in_powers_of_two():
    assert [format_bytes(n) for n in (5, 2048, 3 * 2**20, 5 * 2**30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]
