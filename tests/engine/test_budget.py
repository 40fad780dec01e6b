"""A budget in bytes bounds the KV, and changes nothing but time: preempted members come back bit for bit."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.families import make_model
from infinite_sampling import RolloutConfig, RolloutEngine, SamplingConfig
from infinite_sampling.config import ConfigError
from infinite_sampling.engine import SlotEvent
from infinite_sampling.memory import KVShape

PROMPTS = [[5 + i % 60 for i in range(n)] for n in (9, 70, 33)]
GENERATIONS, MOST = 6, 70


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


def run(model, budget=None, prompts=PROMPTS, on_event=None, sampling=None, **config):
    sampling = sampling or SamplingConfig(max_new_tokens=MOST, seed=3)
    engine = RolloutEngine(model, config=RolloutConfig(kv_budget=budget, **config))
    return engine.rollout(prompts, GENERATIONS, sampling, on_event=on_event)


def bits(rollout):
    return [(c.token_ids, c.logprobs, c.sampling_logprobs, c.finish_reason) for c in rollout]


def smallest_budget(model, dtype: str) -> int:
    """The one that the refusal of a budget of one byte names."""
    with pytest.raises(ConfigError, match="does not hold one member") as error:
        run(model, 1, dtype=dtype)
    return int(str(error.value).split("would do is ")[1].split()[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_budget_gives_the_same_bits(family, dtype):
    model = make_model(family)
    reference = run(model, num_slots=4, dtype=dtype)
    assert reference.stats.deterministic
    smallest, preemptions = smallest_budget(model, dtype), 0
    with pytest.raises(ConfigError, match=f"would do is {smallest} bytes"):
        run(model, smallest - 1, dtype=dtype)
    for factor in (1, 1.4, 4):
        rollout = run(model, int(smallest * factor), dtype=dtype)
        stats = rollout.stats
        assert bits(rollout) == bits(reference), f"budget {factor} x the smallest"
        assert 0 < stats.peak_kv_bytes <= stats.kv_budget_bytes == int(smallest * factor)
        assert stats.num_preemptions or not stats.num_recomputed_tokens
        assert stats.num_tokens == reference.stats.num_tokens
        preemptions += stats.num_preemptions
    assert preemptions > 0


def test_a_budget_and_slots_bound_each_its_own(model):
    budget = 3 * smallest_budget(model, "float32")
    active = []
    rollout = run(model, budget, num_slots=2, on_event=lambda e: active.append(e.num_active))
    assert max(active) == rollout.stats.num_slots == 2
    assert rollout.stats.peak_kv_bytes <= budget


def test_members_in_flight_outnumber_whole_completions(model):
    """The same bytes as two slots that reserve the longest completion."""
    token = KVShape.of(model.config).bytes_per_token("float32")
    forced = [[20] * GENERATIONS] * 2 + [[20] * (GENERATIONS - 1) + [MOST]]
    sampling = SamplingConfig(max_new_tokens=MOST, forced_lengths=forced)
    fixed = run(model, num_slots=2, sampling=sampling)
    pool = run(model, fixed.stats.peak_kv_bytes // token * token, sampling=sampling)
    assert pool.stats.peak_kv_bytes <= fixed.stats.peak_kv_bytes
    assert pool.stats.num_running_steps < 0.7 * fixed.stats.num_running_steps
    assert bits(pool) == bits(fixed)


def test_equal_prompts_share_one_prefill(model):
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1]]
    rollout = run(model, prompts=prompts, num_slots=8)
    assert rollout.stats.num_prompt_tokens == len(PROMPTS[0]) + len(PROMPTS[1])
    apart = [run(model, prompts=[ids], num_slots=8) for ids in prompts]
    assert bits(rollout)[:GENERATIONS] == bits(apart[0])
    assert bits(rollout)[:GENERATIONS] != bits(rollout)[2 * GENERATIONS :]


def test_a_repetition_penalty_survives_preemption(model):
    sampling = SamplingConfig(max_new_tokens=MOST, repetition_penalty=1.3, top_k=20, seed=5)
    budget = int(1.6 * smallest_budget(model, "float32"))
    tight = run(model, budget, sampling=sampling)
    assert tight.stats.num_preemptions > 0
    assert bits(tight) == bits(run(model, num_slots=8, sampling=sampling))


@pytest.mark.parametrize("policy", ["micro", "dynamic-slot"])
def test_policies_that_never_preempt_run_as_many_slots_as_fit_whole(model, policy):
    budget = 3 * smallest_budget(model, "float32")
    rollout = run(model, budget, policy=policy, num_slots=8)
    assert 1 <= rollout.stats.num_slots <= 8
    assert rollout.stats.peak_kv_bytes <= budget
    assert rollout.stats.num_preemptions == 0


def test_full_refuses_a_budget_that_does_not_hold_all(model):
    with pytest.raises(ConfigError, match="policy 'full' decodes all 18 members at once"):
        run(model, 3 * smallest_budget(model, "float32"), policy="full")


def test_the_trace_tells_of_preemptions(model):
    events: list[SlotEvent] = []
    rollout = run(model, int(1.3 * smallest_budget(model, "float32")), on_event=events.append)
    kinds = [event.kind for event in events]
    assert kinds.count("preempt") == rollout.stats.num_preemptions > 0
    assert kinds.count("start") == 3 * GENERATIONS + rollout.stats.num_preemptions
    assert kinds.count("finish") == 3 * GENERATIONS


class SmallDevice(TorchDispatchMode):
    """An allocator that refuses any tensor larger than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.refusals = limit, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = [a for a in args if isinstance(a, torch.Tensor)]
        if not isinstance(out, torch.Tensor) or any(t.is_mkldnn for t in [out, *known]) or out.nbytes <= self.limit:
            return out
        if out.untyped_storage().data_ptr() not in [t.untyped_storage().data_ptr() for t in known]:
            self.refusals += 1
            raise torch.OutOfMemoryError(f"tried to allocate {out.nbytes} bytes, {self.limit} are free")
        return out


@pytest.fixture
def wide_model():
    """Its logits are larger than its KV and its weights are not touched by the allocator."""
    return make_model("llama", vocab_size=20_000)


def test_out_of_memory_halves_the_rows_and_changes_no_completion(wide_model, caplog):
    sampling = SamplingConfig(max_new_tokens=12, seed=3)
    reference = run(wide_model, sampling=sampling, num_slots=16, policy="fixed-slot")
    with SmallDevice(9 * 20_000 * 4) as device, caplog.at_level(logging.WARNING):
        rollout = run(wide_model, sampling=sampling, num_slots=16)
    assert device.refusals > 0
    assert bits(rollout) == bits(reference)
    assert rollout.stats.num_preemptions > 0
    assert "out of memory on cpu: going on with 8 slots" in caplog.text


def test_out_of_memory_with_one_member_says_what_is_held(wide_model):
    with SmallDevice(120_000), pytest.raises(torch.OutOfMemoryError, match=r"one member alone does not fit.*of KV"):
        run(wide_model, num_slots=4)


def test_without_slots_or_budget_a_share_of_free_memory_bounds_the_kv(model, monkeypatch):
    from infinite_sampling import loop

    smallest = smallest_budget(model, "float32")
    monkeypatch.setattr(loop, "free_memory_bytes", lambda device: 4 * smallest)
    rollout = run(model)
    assert rollout.stats.kv_budget_bytes == 2 * smallest >= rollout.stats.peak_kv_bytes
