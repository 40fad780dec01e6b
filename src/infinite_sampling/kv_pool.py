"""Key/value storage: a prompt's KV once, shared by its members; a member's own KV in pages.

In: key and value tensors of one layer at a time, and which slot grows. Out: the tensors, page
tables, and the number of bytes held. It knows no model, policy or sampling.

A page holds `page_tokens` tokens of one member, for every layer. Pages in use are kept at the low
end of one tensor a layer, so that attention can run over all of them as one batch without
gathering: a page is computed alike whoever its neighbours are (DESIGN rule 1).
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from torch import Tensor

from infinite_sampling.memory import member_tokens_reserved, page_tokens_for

_COMPACT_ABOVE = 0.25
"""Share of unused pages below the highest used one that triggers compaction."""


class PromptKV:
    """The keys and values of one prompt, (1, H, T, D) a layer, stored once for all its members."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.keys_L: dict[int, Tensor] = {}
        self.values_L: dict[int, Tensor] = {}
        self.num_references = 0

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (1, H, t, D) at tokens start..start+t-1."""
        for store, new in ((self.keys_L, keys), (self.values_L, values)):
            if layer not in store:
                store[layer] = new.new_empty((*new.shape[:2], self.num_tokens, new.shape[3]))
            store[layer][:, :, start : start + new.shape[2]] = new

    @property
    def num_bytes(self) -> int:
        """Bytes of KV held for this prompt."""
        return sum(t.nbytes for store in (self.keys_L, self.values_L) for t in store.values())


class MemberPages:
    """Pages of member KV: `num_slots` slots that each may grow to `max_tokens`.

    Integrity (see `check`): a page in use belongs to exactly one (slot, ordinal), a free page to
    none, and free and used pages together are all pages.
    """

    def __init__(self, num_slots: int, max_tokens: int, page_tokens: int | None = None) -> None:
        self.page_tokens = page_tokens or page_tokens_for(max_tokens)
        self.max_pages = -(-max_tokens // self.page_tokens)
        self.num_pages = num_slots * self.max_pages
        self.keys_L: dict[int, Tensor] = {}
        self.values_L: dict[int, Tensor] = {}
        self.table_SJ = np.full((num_slots, self.max_pages), -1, dtype=np.int64)
        self.num_pages_S = np.zeros(num_slots, dtype=np.int64)
        self.slot_of_page = np.full(self.num_pages, -1, dtype=np.int64)
        self.ordinal_of_page = np.zeros(self.num_pages, dtype=np.int64)
        self._free = list(range(self.num_pages))
        self.num_high = 0
        """Pages 0..num_high-1 contain every page in use."""

    @property
    def num_bytes(self) -> int:
        """Bytes of KV allocated for members, used or not."""
        return sum(t.nbytes for store in (self.keys_L, self.values_L) for t in store.values())

    @property
    def num_used(self) -> int:
        """Pages that belong to a slot."""
        return self.num_pages - len(self._free)

    def ensure(self, slot: int, num_tokens: int) -> None:
        """Give `slot` pages for `num_tokens` tokens. Raises IndexError past `max_tokens`."""
        if num_tokens > self.max_pages * self.page_tokens:
            raise IndexError(
                f"slot {slot} holds at most {self.max_pages * self.page_tokens} tokens, asked {num_tokens}"
            )
        while self.num_pages_S[slot] * self.page_tokens < num_tokens:
            page, ordinal = heapq.heappop(self._free), int(self.num_pages_S[slot])
            self.table_SJ[slot, ordinal] = page
            self.slot_of_page[page], self.ordinal_of_page[page] = slot, ordinal
            self.num_pages_S[slot] += 1
            self.num_high = max(self.num_high, page + 1)

    def release(self, slot: int) -> None:
        """Free the pages of `slot`."""
        for ordinal in range(int(self.num_pages_S[slot])):
            page = int(self.table_SJ[slot, ordinal])
            self.slot_of_page[page] = -1
            heapq.heappush(self._free, page)
        self.table_SJ[slot] = -1
        self.num_pages_S[slot] = 0
        self._lower_high()

    @torch.no_grad()
    def compact(self) -> None:
        """Move the highest pages into holes, where too many holes lie between pages in use."""
        while self.num_high - self.num_used > _COMPACT_ABOVE * self.num_high:
            source, target = self.num_high - 1, heapq.heappop(self._free)
            for store in (self.keys_L, self.values_L):
                for tensor in store.values():
                    tensor[target] = tensor[source]
            slot, ordinal = int(self.slot_of_page[source]), int(self.ordinal_of_page[source])
            self.table_SJ[slot, ordinal] = target
            self.slot_of_page[target], self.ordinal_of_page[target] = slot, ordinal
            self.slot_of_page[source] = -1
            heapq.heappush(self._free, source)
            self._lower_high()

    def write(self, layer: int, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (r, H, D), row i at token offsets[i] of page pages[i]."""
        if layer not in self.keys_L:
            for store, new in ((self.keys_L, keys), (self.values_L, values)):
                shape = (self.num_pages, new.shape[1], self.page_tokens, new.shape[2])
                store[layer] = torch.zeros(shape, dtype=new.dtype, device=new.device)
        self.keys_L[layer][pages, :, offsets] = keys
        self.values_L[layer][pages, :, offsets] = values

    def check(self) -> None:
        """Raise AssertionError if the tables contradict each other."""
        used = {(s, j): int(self.table_SJ[s, j]) for s, n in enumerate(self.num_pages_S) for j in range(n)}
        assert len(set(used.values())) == len(used), "a page belongs to two slots"
        assert sorted([*used.values(), *self._free]) == list(range(self.num_pages)), "a page is lost"
        for (slot, ordinal), page in used.items():
            assert (self.slot_of_page[page], self.ordinal_of_page[page]) == (slot, ordinal), "owner table is stale"
        assert all(self.slot_of_page[page] == -1 for page in self._free), "a free page has an owner"
        assert all(page < self.num_high for page in used.values()), "a used page lies above num_high"

    def _lower_high(self) -> None:
        while self.num_high and self.slot_of_page[self.num_high - 1] == -1:
            self.num_high -= 1


class KVPool:
    """All KV of one rollout: the prompts' and the members'. `peak_bytes` is the largest sum seen."""

    def __init__(self, num_slots: int, max_new_tokens: int, page_tokens: int | None = None) -> None:
        self.pages = MemberPages(num_slots, member_tokens_reserved(max_new_tokens), page_tokens)
        self.prompts: dict[int, PromptKV] = {}
        self.prompt_of_slot: dict[int, int] = {}
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of KV allocated now."""
        return self.pages.num_bytes + sum(prompt.num_bytes for prompt in self.prompts.values())

    def note_peak(self) -> None:
        """Record the present size in `peak_bytes`."""
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def admit(self, slot: int, prompt_index: int) -> None:
        """Let the member in `slot` share the KV of a stored prompt."""
        self.prompts[prompt_index].num_references += 1
        self.prompt_of_slot[slot] = prompt_index

    def release(self, slot: int, *, keep_prompt: bool) -> None:
        """Free a slot's pages, and its prompt with the last member unless `keep_prompt`."""
        self.pages.release(slot)
        prompt_index = self.prompt_of_slot.pop(slot)
        prompt = self.prompts[prompt_index]
        prompt.num_references -= 1
        if not prompt.num_references and not keep_prompt:
            del self.prompts[prompt_index]

    def clear(self) -> None:
        """Free everything."""
        self.prompts.clear()
        self.prompt_of_slot.clear()
        self.pages = MemberPages(0, 1)


def pad_rows(num_rows: int) -> int:
    """Rows of a forward after padding: multiples of 4, coarser above 32 (fewer distinct shapes)."""
    step = 4 if num_rows <= 32 else 8 if num_rows <= 64 else 32
    return max(-(-num_rows // step) * step, 4)
