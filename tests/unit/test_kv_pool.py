"""The KV pool keeps every token where its member put it, whatever comes and goes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinite_sampling.kv_pool import KVPool, MemberPages, PromptKV, pad_rows

NUM_SLOTS, MAX_TOKENS, PAGE = 4, 50, 16


def append(pages: MemberPages, slot: int, length: int, value: float) -> None:
    """Store one token of `value` at index `length` of `slot`, in two layers."""
    pages.ensure(slot, length + 1)
    page = torch.tensor([pages.table_SJ[slot, length // pages.page_tokens]])
    offset = torch.tensor([length % pages.page_tokens])
    for layer in range(2):
        row = torch.full((1, 2, 3), value + layer)
        pages.write(layer, page, offset, row, -row)


def read(pages: MemberPages, slot: int, length: int, layer: int) -> list[float]:
    """The stored values of `slot`, in order."""
    table = pages.table_SJ[slot]
    return [
        float(pages.keys_L[layer][table[i // pages.page_tokens], 1, i % pages.page_tokens, 2]) for i in range(length)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 30), st.booleans()), max_size=40))
def test_random_growth_release_and_compaction_loses_nothing(actions):
    pages = MemberPages(NUM_SLOTS, MAX_TOKENS, page_tokens=PAGE)
    expected: dict[int, list[float]] = {s: [] for s in range(NUM_SLOTS)}
    counter = 0.0
    for slot, count, release in actions:
        if release:
            pages.release(slot)
            expected[slot] = []
            pages.compact()
        for _ in range(min(count, MAX_TOKENS - len(expected[slot]))):
            counter += 10
            append(pages, slot, len(expected[slot]), counter)
            expected[slot].append(counter)
        pages.check()
        for s, values in expected.items():
            for layer in range(2 if values else 0):
                assert read(pages, s, len(values), layer) == [v + layer for v in values]


def test_compaction_brings_the_highest_page_down():
    pages = MemberPages(4, PAGE, page_tokens=PAGE)
    for slot in range(4):
        append(pages, slot, 0, slot)
    for slot in range(3):
        pages.release(slot)
    assert pages.num_high == 4
    pages.compact()
    assert pages.num_high == 1
    assert read(pages, 3, 1, 0) == [3.0]
    pages.check()


def test_a_slot_cannot_grow_past_its_reserve():
    pages = MemberPages(2, 20, page_tokens=PAGE)
    with pytest.raises(IndexError):
        pages.ensure(0, 33)


def test_the_integrity_check_sees_a_page_given_twice():
    pages = MemberPages(2, PAGE, page_tokens=PAGE)
    pages.ensure(0, 1)
    pages.ensure(1, 1)
    pages.table_SJ[1, 0] = pages.table_SJ[0, 0]
    with pytest.raises(AssertionError):
        pages.check()


def test_prompt_kv_is_stored_once_and_freed_with_its_last_member():
    pool = KVPool(3, 8)
    pool.prompts[7] = PromptKV(5)
    pool.prompts[7].write(0, 0, torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    assert pool.num_bytes == 2 * 2 * 5 * 4 * 4
    for slot in range(3):
        pool.admit(slot, 7)
    assert pool.num_bytes == 2 * 2 * 5 * 4 * 4
    pool.release(0, keep_prompt=False)
    pool.release(1, keep_prompt=True)
    assert 7 in pool.prompts
    pool.release(2, keep_prompt=False)
    assert pool.num_bytes == 0


def test_row_padding_is_a_multiple_of_four_and_monotone():
    sizes = [pad_rows(n) for n in range(1, 300)]
    assert all(size % 4 == 0 and size >= n for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
