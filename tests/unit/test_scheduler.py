"""The scheduler, replayed over known lengths against a naive oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
