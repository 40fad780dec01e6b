"""Where every page of KV stands: members from the low end of the pool, prompts from its high end.

In: which slot grows to how many tokens, which prompt comes and goes. Out: page numbers, and the
moves that keep both ends dense. Pure: no torch; `kv_pool.py` holds the bytes, the simulator none.

A member's pages may lie anywhere below `floor`; used ones are kept at the low end, so that
attention can run over pages 0..num_high-1 as one batch in place. A prompt takes consecutive pages at
`floor` or above, so that its keys are one contiguous matrix.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_COMPACT_ABOVE = 0.25
"""Share of unused pages below the highest used one that triggers compaction."""

Move = Callable[[list[int], list[int]], None]
"""Copies pages (sources, targets); all sources are read before any target is written."""


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free: the scheduler admits so that this does not happen."""


@dataclass(slots=True)
class PromptPages:
    """The place of one prompt's KV: `num_pages` consecutive pages from `first`."""

    first: int
    num_pages: int
    num_tokens: int
    num_references: int = 0
    """Members in slots that share it."""
    is_written: bool = False
    """Whether the prompt has been run, so that its KV is there."""


class PageTable:
    """`num_pages` pages of `page_tokens` tokens, shared by members (`num_slots`) and prompts.

    Integrity (see `check`): every page is free, or belongs to one (slot, ordinal), or to one prompt.
    """

    def __init__(self, num_pages: int, page_tokens: int, num_slots: int, max_tokens: int, move: Move | None = None):
        self.num_pages, self.page_tokens, self.num_slots = num_pages, page_tokens, num_slots
        self.max_pages = -(-max_tokens // page_tokens)
        self.table_SJ = np.full((num_slots, self.max_pages), -1, dtype=np.int64)
        self.num_pages_S = np.zeros(num_slots, dtype=np.int64)
        self.slot_of_page = np.full(num_pages, -1, dtype=np.int64)
        self.ordinal_of_page = np.zeros(num_pages, dtype=np.int64)
        self.prompts: dict[int, PromptPages] = {}
        self.prompt_of_slot: dict[int, int] = {}
        self.floor = num_pages
        """First page of the prompts; members stay below."""
        self.num_high = 0
        """Pages 0..num_high-1 contain every page of a member."""
        self._free = list(range(num_pages))
        self._move = move or (lambda sources, targets: None)

    @property
    def num_tokens(self) -> int:
        """Tokens of KV in all pages."""
        return self.num_pages * self.page_tokens

    @property
    def num_free(self) -> int:
        """Pages that belong to nobody."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one owner."""
        return -(-num_tokens // self.page_tokens)

    def hold_prompt(self, prompt: int, num_tokens: int) -> PromptPages:
        """Make a place for a prompt's KV below the others. Raises OutOfPagesError."""
        count = self.pages_for(num_tokens)
        self._need(count, f"prompt {prompt}")
        self.floor -= count
        self._free = [page for page in self._free if page < self.floor]
        heapq.heapify(self._free)
        self._bring_down(range(self.floor, self.num_high))
        self.prompts[prompt] = PromptPages(self.floor, count, num_tokens)
        return self.prompts[prompt]

    def drop_prompt(self, prompt: int) -> None:
        """Free a prompt's pages and close the gap. Raises ValueError while members share it."""
        gone = self.prompts[prompt]
        if gone.num_references:
            raise ValueError(f"prompt {prompt} is still shared by {gone.num_references} members")
        del self.prompts[prompt]
        sources: list[int] = []
        for other in self.prompts.values():
            if other.first < gone.first:
                sources += range(other.first, other.first + other.num_pages)
                other.first += gone.num_pages
        for page in range(self.floor, self.floor + gone.num_pages):
            heapq.heappush(self._free, page)
        self.floor += gone.num_pages
        if sources:
            self._move(sources, [page + gone.num_pages for page in sources])

    def admit(self, slot: int, prompt: int) -> None:
        """Let the member in `slot` share the KV of a held prompt."""
        self.prompts[prompt].num_references += 1
        self.prompt_of_slot[slot] = prompt

    def ensure(self, slot: int, num_tokens: int) -> None:
        """Give `slot` pages for `num_tokens` tokens. Raises IndexError past `max_tokens`, OutOfPagesError."""
        if num_tokens > self.max_pages * self.page_tokens:
            raise IndexError(
                f"slot {slot} holds at most {self.max_pages * self.page_tokens} tokens, asked {num_tokens}"
            )
        self._need(self.pages_for(num_tokens) - int(self.num_pages_S[slot]), f"slot {slot}")
        while self.num_pages_S[slot] * self.page_tokens < num_tokens:
            self._own(slot, int(self.num_pages_S[slot]), heapq.heappop(self._free))
            self.num_pages_S[slot] += 1

    def release(self, slot: int) -> None:
        """Free the pages of `slot` and its share of the prompt, which stays held."""
        for page in self.table_SJ[slot, : self.num_pages_S[slot]]:
            self.slot_of_page[page] = -1
            heapq.heappush(self._free, int(page))
        self.table_SJ[slot] = -1
        self.num_pages_S[slot] = 0
        self.prompts[self.prompt_of_slot.pop(slot)].num_references -= 1
        self._lower_high()

    def compact(self) -> None:
        """Move the highest pages of members into holes, where too many holes lie between them."""
        if self.num_high - self.num_used > _COMPACT_ABOVE * self.num_high:
            self._bring_down(range(self.num_used, self.num_high))

    @property
    def num_used(self) -> int:
        """Pages of members."""
        return self.floor - len(self._free)

    def check(self) -> None:
        """Raise AssertionError if the tables contradict each other."""
        used = {(s, j): int(self.table_SJ[s, j]) for s, n in enumerate(self.num_pages_S) for j in range(n)}
        assert len(set(used.values())) == len(used), "a page belongs to two slots"
        assert sorted([*used.values(), *self._free]) == list(range(self.floor)), "a page is lost"
        for (slot, ordinal), page in used.items():
            assert (self.slot_of_page[page], self.ordinal_of_page[page]) == (slot, ordinal), "owner table is stale"
        assert all(self.slot_of_page[page] == -1 for page in self._free), "a free page has an owner"
        assert all(page < self.num_high for page in used.values()), "a used page lies above num_high"
        places = sorted(p for q in self.prompts.values() for p in range(q.first, q.first + q.num_pages))
        assert places == list(range(self.floor, self.num_pages)), "the prompts' pages do not fill their end"
        shares = [self.prompt_of_slot.get(slot) for slot in range(self.num_slots)]
        for prompt, held in self.prompts.items():
            assert held.num_references == shares.count(prompt), "a prompt's references are miscounted"

    def _need(self, count: int, who: str) -> None:
        if count > self.num_free:
            raise OutOfPagesError(f"{who} needs {count} pages of KV, {self.num_free} of {self.num_pages} are free")

    def _own(self, slot: int, ordinal: int, page: int) -> None:
        self.table_SJ[slot, ordinal] = page
        self.slot_of_page[page], self.ordinal_of_page[page] = slot, ordinal
        self.num_high = max(self.num_high, page + 1)

    def _bring_down(self, pages: range) -> None:
        """Move the members' pages among `pages` into the lowest free ones below them."""
        sources, targets = [], []
        for source in reversed(pages):
            if self.slot_of_page[source] == -1:
                continue
            target = heapq.heappop(self._free)
            self._own(int(self.slot_of_page[source]), int(self.ordinal_of_page[source]), target)
            self.slot_of_page[source] = -1
            sources.append(source)
            targets.append(target)
        for page in sources:
            if page < self.floor:
                heapq.heappush(self._free, page)
        if sources:
            self._move(sources, targets)
        self._lower_high()

    def _lower_high(self) -> None:
        while self.num_high and self.slot_of_page[self.num_high - 1] == -1:
            self.num_high -= 1
