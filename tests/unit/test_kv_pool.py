"""The KV pool keeps every token where its owner put it, whatever comes, grows, goes and moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinite_sampling.kv_pool import KVPool, pad_rows
from infinite_sampling.pages import OutOfPagesError, PageTable

NUM_PAGES, NUM_SLOTS, MAX_TOKENS, PAGE = 20, 4, 50, 16


def append(pool: KVPool, slot: int, length: int, value: float) -> None:
    """Store one token of `value` at index `length` of `slot`, in two layers."""
    pages = pool.pages
    page = torch.tensor([pages.table_SJ[slot, length // pages.page_tokens]])
    offset = torch.tensor([length % pages.page_tokens])
    for layer in range(2):
        row = torch.full((1, 2, 3), value + layer)
        pool.write_members(layer, page, offset, row, -row)


def read(pool: KVPool, slot: int, length: int, layer: int) -> list[float]:
    """The stored values of `slot`, in order."""
    table = pool.pages.table_SJ[slot]
    return [float(pool.keys_L[layer][table[i // PAGE], 1, i % PAGE, 2]) for i in range(length)]


def token_values(prompt: int, layer: int, num_tokens: int) -> torch.Tensor:
    """(1, 2, T, 3): another number for every token."""
    return (1000.0 * prompt + layer + torch.arange(num_tokens).float())[None, None, :, None].expand(1, 2, -1, 3)


def write_prompt(pool: KVPool, prompt: int, num_tokens: int) -> None:
    pool.pages.hold_prompt(prompt, num_tokens)
    for layer in range(2):
        keys = (
            (1000.0 * prompt + layer + torch.arange(num_tokens))
            .expand(1, 2, num_tokens)[..., None]
            .expand(1, 2, num_tokens, 3)
        )
        for start in range(0, num_tokens, 7):
            pool.write_prompt(prompt, layer, start, keys[:, :, start : start + 7], -keys[:, :, start : start + 7])


def check_prompt(pool: KVPool, prompt: int, num_tokens: int) -> None:
    for layer in range(2):
        keys, values = pool.prompt_kv(prompt, layer)
        expected = token_values(prompt, layer, num_tokens)
        assert torch.equal(keys, expected) and torch.equal(values, -expected)


ACTIONS = st.one_of(
    st.tuples(st.just("hold"), st.integers(0, 5), st.integers(1, 60)),
    st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("admit"), st.integers(0, NUM_SLOTS - 1), st.integers(0, 5)),
    st.tuples(st.just("grow"), st.integers(0, NUM_SLOTS - 1), st.integers(1, 40)),
    st.tuples(st.just("release"), st.integers(0, NUM_SLOTS - 1), st.just(0)),
    st.tuples(st.just("compact"), st.just(0), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=60))
def test_random_admissions_growth_preemption_and_release_lose_nothing(actions):
    pool = KVPool(NUM_PAGES, PAGE, NUM_SLOTS, MAX_TOKENS)
    pages, prompts, members = pool.pages, {}, {}
    counter, allocated = 0.0, None
    for kind, who, what in actions:
        free = pages.num_free
        if kind == "hold" and who not in prompts:
            if pages.pages_for(what) > free:
                with pytest.raises(OutOfPagesError):
                    pages.hold_prompt(who, what)
            else:
                write_prompt(pool, who, what)
                prompts[who] = what
        elif kind == "drop" and who in prompts:
            if who in pages.prompt_of_slot.values():
                with pytest.raises(ValueError, match="still shared"):
                    pages.drop_prompt(who)
            else:
                pages.drop_prompt(who)
                assert pages.num_free == free + pages.pages_for(prompts.pop(who))
        elif kind == "admit" and who not in members and what in prompts:
            pages.admit(who, what)
            members[who] = []
        elif kind == "grow" and who in members:
            values = members[who]
            longer = min(len(values) + what, MAX_TOKENS)
            if pages.pages_for(longer) - pages.pages_for(len(values)) > free:
                with pytest.raises(OutOfPagesError):
                    pages.ensure(who, longer)
            else:
                pages.ensure(who, longer)
                while len(values) < longer:
                    counter += 10
                    append(pool, who, len(values), counter)
                    values.append(counter)
        elif kind == "release" and who in members:
            pages.release(who)
            assert pages.num_free == free + pages.pages_for(len(members.pop(who)))
        elif kind == "compact":
            pages.compact()
        pages.check()
        owned = sum(map(pages.pages_for, [*prompts.values(), *map(len, members.values())]))
        assert pages.num_free == NUM_PAGES - owned
        for slot, values in members.items():
            for layer in range(2 if values else 0):
                assert read(pool, slot, len(values), layer) == [v + layer for v in values]
        for prompt, num_tokens in prompts.items():
            check_prompt(pool, prompt, num_tokens)
        if pool.num_bytes:
            allocated = allocated or pool.num_bytes
            assert pool.num_bytes == pool.peak_bytes == allocated == NUM_PAGES * PAGE * 2 * 3 * 4 * 4


def test_compaction_brings_the_highest_page_down():
    pool = KVPool(5, PAGE, 4, PAGE)
    write_prompt(pool, 0, 3)
    for slot in range(4):
        pool.pages.admit(slot, 0)
        pool.pages.ensure(slot, 1)
        append(pool, slot, 0, float(slot))
    for slot in range(3):
        pool.pages.release(slot)
    assert pool.pages.num_high == 4
    pool.pages.compact()
    assert pool.pages.num_high == 1
    assert read(pool, 3, 1, 0) == [3.0]
    pool.pages.check()


def test_a_slot_cannot_grow_past_its_most_tokens():
    with pytest.raises(IndexError):
        PageTable(9, PAGE, 2, 20).ensure(0, 33)


def test_the_integrity_check_sees_a_page_given_twice():
    pages = PageTable(4, PAGE, 2, PAGE)
    pages.ensure(0, 1)
    pages.ensure(1, 1)
    pages.table_SJ[1, 0] = pages.table_SJ[0, 0]
    with pytest.raises(AssertionError):
        pages.check()


def test_clearing_frees_the_bytes():
    pool = KVPool(3, PAGE, 1, PAGE)
    write_prompt(pool, 7, 5)
    assert pool.num_bytes > 0
    pool.clear()
    assert pool.num_bytes == 0


def test_row_padding_is_a_multiple_of_four_and_monotone():
    sizes = [pad_rows(n) for n in range(1, 300)]
    assert all(size % 4 == 0 and size >= n for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
