"""The scheduler, replayed over known lengths against a naive oracle."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinite_sampling.memory import member_tokens_held, plan_pool
from infinite_sampling.pages import PageTable
from infinite_sampling.scheduler import Scheduler, lower_bound_steps
from infinite_sampling.types import Member

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=4)


def replay(scheduler: Scheduler, length_of) -> tuple[int, list[Member], int]:
    """Steps, members in order of finishing, and dropped tokens of a run."""
    ages: dict[int, int] = {}
    finished: list[Member] = []
    steps = dropped = 0
    while not scheduler.done:
        for slot, _ in scheduler.refill():
            assert slot not in ages, "a slot was given twice"
            ages[slot] = 0
        assert 0 < len(scheduler.active) <= scheduler.num_slots
        steps += 1
        for slot in list(ages):
            ages[slot] += 1
        for slot in sorted(ages):
            if slot in scheduler.active and ages[slot] == length_of(scheduler.active[slot]):
                finished.append(scheduler.active[slot])
                for loser in scheduler.finish(slot):
                    dropped += ages.pop(loser)
                del ages[slot]
    return steps, finished, dropped


def naive_steps(lengths: list[int], num_slots: int, policy: str) -> int:
    """Running steps counted slot by slot, without a state machine."""
    if policy == "full":
        return max(lengths)
    if policy == "micro":
        return sum(max(lengths[i : i + num_slots]) for i in range(0, len(lengths), num_slots))
    ends = [0] * num_slots
    for length in lengths:
        slot = ends.index(min(ends))
        ends[slot] += length
    return max(ends)


@pytest.mark.parametrize("policy", ["full", "micro", "fixed-slot"])
@given(lengths=LENGTHS, num_slots=st.integers(1, 9))
def test_every_member_finishes_once_in_the_steps_a_naive_count_gives(policy, lengths, num_slots):
    scheduler = Scheduler([len(row) for row in lengths], num_slots, policy)
    steps, finished, dropped = replay(scheduler, lambda m: lengths[m.prompt_index][m.member_index])
    everyone = [Member(p, m) for p, row in enumerate(lengths) for m in range(len(row))]
    assert sorted(finished) == everyone
    flat = [length for row in lengths for length in row]
    assert steps == naive_steps(flat, num_slots, policy)
    assert steps >= lower_bound_steps(flat, scheduler.num_slots)
    assert dropped == 0
    assert not scheduler.active and not scheduler.refill()


@given(num_members=st.integers(1, 40), num_slots=st.integers(1, 9), seed=st.integers(0, 99))
def test_refill_is_within_the_bound_of_list_scheduling(num_members, num_slots, seed):
    lengths = [1 + (i * 7919 + seed * 104729) % 13 for i in range(num_members)]
    steps, _, _ = replay(Scheduler([num_members], num_slots, "fixed-slot"), lambda m: lengths[m.member_index])
    optimum_at_least = lower_bound_steps(lengths, num_slots)
    assert steps <= (2 - 1 / num_slots) * optimum_at_least + 1e-9


@given(num_slots=st.integers(1, 6), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_dynamic_slot_returns_the_first_g_to_finish_and_drops_the_rest(num_slots, sizes):
    def length_of(member: Member) -> int:
        return 1 + (member.member_index * 5 + member.prompt_index) % 7

    scheduler = Scheduler(sizes, num_slots, "dynamic-slot")
    _, finished, dropped = replay(scheduler, length_of)
    for p, size in enumerate(sizes):
        assert sum(m.prompt_index == p for m in finished) == size
    assert not scheduler.active
    if num_slots == 1:
        assert dropped == 0


def test_dynamic_slot_favours_short_members():
    lengths = {0: 50, 1: 2, 2: 2, 3: 50, 4: 2, 5: 2}
    _, finished, dropped = replay(Scheduler([4], 4, "dynamic-slot"), lambda m: lengths.get(m.member_index, 2))
    assert all(lengths[m.member_index] == 2 for m in finished)
    assert dropped > 0


def test_micro_waits_for_its_longest_and_cuts_across_prompts():
    scheduler = Scheduler([3, 1], 2, "micro")
    assert scheduler.refill() == [(0, Member(0, 0)), (1, Member(0, 1))]
    scheduler.finish(0)
    assert scheduler.refill() == []
    scheduler.finish(1)
    assert scheduler.refill() == [(0, Member(0, 2)), (1, Member(1, 0))]


def test_finishing_an_empty_slot_is_an_error():
    with pytest.raises(KeyError):
        Scheduler([1], 1, "fixed-slot").finish(0)


def test_lower_bound_is_the_larger_of_longest_and_average():
    assert lower_bound_steps([9, 1, 1], 2) == 9
    assert lower_bound_steps([3, 3, 3], 2) == 5
    assert lower_bound_steps([], 2) == 0


def replay_in_pages(lengths_P: list[list[int]], prompt_tokens_P: list[int], most: int, budget: int, **options):
    """Steps, recomputed tokens and preemptions of known lengths in a pool of `budget` tokens; no model."""
    contents = [prompt_tokens_P.index(n) for n in prompt_tokens_P]  # equal lengths stand for equal prompts
    plan = plan_pool(
        [prompt_tokens_P[p] for p in sorted(set(contents))],
        num_members=sum(map(len, lengths_P)),
        max_new_tokens=most,
        budget_tokens=budget,
        **options,
    )
    assert plan.num_tokens <= budget
    pages = PageTable(plan.num_pages, plan.page_tokens, plan.num_slots, member_tokens_held(most))
    sizes = [len(row) for row in lengths_P]
    scheduler = Scheduler(sizes, plan.num_slots, "fixed-slot", pages, prompt_tokens_P, contents, most)
    finished, steps, recomputed, preempted = [], 0, 0, 0
    while not scheduler.done:
        preempted += len(scheduler.make_room())
        for _, member in scheduler.refill():
            recomputed += max(scheduler.num_tokens[member] - 1, 0)
        assert scheduler.active, "nobody runs"
        for slot, member in list(scheduler.active.items()):
            assert pages.num_pages_S[slot] * pages.page_tokens >= scheduler.num_tokens[member]
            scheduler.sampled(slot)
            if scheduler.num_tokens[member] == lengths_P[member.prompt_index][member.member_index]:
                scheduler.finish(slot)
                finished.append(member)
        pages.check()
        steps += 1
    assert sorted(finished) == [Member(p, m) for p, size in enumerate(sizes) for m in range(size)]
    assert not pages.prompts and pages.num_free == pages.num_pages, "pages are leaked"
    return steps, recomputed, preempted


@given(
    lengths_P=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=5),
    prompts=st.lists(st.integers(1, 50), min_size=5, max_size=5),
    spare=st.integers(0, 400),
)
def test_any_budget_that_holds_one_member_finishes_all_and_leaks_nothing(lengths_P, prompts, spare):
    prompts = prompts[: len(lengths_P)]
    smallest = -(-max(prompts) // 32) * 32 + 64
    flat = [length for row in lengths_P for length in row]
    steps, recomputed, preempted = replay_in_pages(lengths_P, prompts, 60, smallest + spare)
    assert steps >= lower_bound_steps(flat, len(flat), smallest + spare)
    assert preempted or not recomputed
    assert replay_in_pages(lengths_P, prompts, 60, 10**6)[1:] == (0, 0)


@pytest.mark.shared_data
def test_real_lengths_in_the_bytes_of_eight_slots(shared_data):
    """Same KV bytes as 8 slots that reserve 1024 tokens each, 4 prompts x 64, lengths of SmolLM2 on GSM8K."""
    per_prompt = json.loads((shared_data / "smollm2_gsm8k_lengths.json").read_text())["lengths"]
    steps, recomputed = [], []
    for seed in range(4):
        rng = random.Random(seed)
        lengths_P = [rng.choices(per_prompt[4 * seed + p], k=64) for p in range(4)]
        flat = [length for row in lengths_P for length in row]
        got, again, _ = replay_in_pages(lengths_P, [100, 90, 80, 70], 1024, 8 * 1024 + 512)
        steps.append(got / naive_steps(flat, 8, "fixed-slot"))
        recomputed.append(again / sum(flat))
    print(f"{statistics.mean(steps):.3f} of the steps, {statistics.mean(recomputed):.3f} recomputed")
    assert statistics.mean(recomputed) <= 0.10
    assert statistics.mean(steps) <= 0.35


def test_lower_bound_with_a_pool_counts_what_members_hold():
    assert lower_bound_steps([10, 10], 2, kv_tokens=1) == 90
    assert lower_bound_steps([10, 10], 2, kv_tokens=100) == 10
