"""The bytes of the KV pool: one tensor of pages a layer, for members and prompts alike.

In: key and value tensors of one layer at a time, and the page table that says where they stand. Out:
the tensors, a prompt's keys as one matrix, and the bytes allocated. It knows no model, policy or
sampling.

A page holds `page_tokens` tokens of one member: (H, page_tokens, D) of each layer. A prompt's pages
are consecutive, and the same memory is read as one (1, H, T, D). The tensors are allocated once, at the
first write, and never grow: the budget is what they take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infinite_sampling.pages import PageTable


class KVPool:
    """All KV of one rollout, in `pages.num_pages` pages.

    Args:
        num_pages, page_tokens: size of the pool.
        num_slots, max_tokens: slots of members, and the most tokens that each may hold.
    """

    def __init__(self, num_pages: int, page_tokens: int, num_slots: int, max_tokens: int) -> None:
        self.pages = PageTable(num_pages, page_tokens, num_slots, max_tokens, self._move)
        self.keys_L: dict[int, Tensor] = {}
        self.values_L: dict[int, Tensor] = {}
        self.peak_bytes = 0
        self._prompt_views: dict[tuple[int, int], tuple[Any, ...]] = {}
        """By prompt and layer: where it stood when they were built, and the views."""

    @property
    def num_bytes(self) -> int:
        """Bytes of KV allocated now."""
        return sum(t.nbytes for store in (self.keys_L, self.values_L) for t in store.values())

    def write_members(self, layer: int, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (r, H, D), row i at token offsets[i] of page pages[i]."""
        self.layer(layer, keys, values)
        self.keys_L[layer][pages, :, offsets] = keys
        self.values_L[layer][pages, :, offsets] = values

    def write_prompt(self, prompt: int, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (1, H, t, D) at tokens start..start+t-1 of a held prompt."""
        self.layer(layer, keys, values)
        for store, new in zip(self.prompt_kv(prompt, layer), (keys, values), strict=True):
            store[:, :, start : start + new.shape[2]] = new

    def prompt_kv(self, prompt: int, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a prompt's keys and values, (1, H, T, D)."""
        held = self.pages.prompts[prompt]
        place = (held.first, held.num_tokens)
        known, *views = self._prompt_views.get((prompt, layer), (None,))
        if known != place:
            views = [
                store[layer][held.first : held.first + held.num_pages]
                .view(-1)[: store[layer].shape[1] * held.num_tokens * store[layer].shape[3]]
                .view(1, store[layer].shape[1], held.num_tokens, store[layer].shape[3])
                for store in (self.keys_L, self.values_L)
            ]
            self._prompt_views[prompt, layer] = (place, *views)
        return views[0], views[1]

    def clear(self) -> None:
        """Free everything."""
        self.keys_L.clear()
        self.values_L.clear()
        self._prompt_views.clear()

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, (P, H, page_tokens, D), allocated for such as these (r, H, ..., D)."""
        if layer not in self.values_L:
            for store, new in ((self.keys_L, keys), (self.values_L, values)):
                # Zeros, since a masked key still meets its value: weight 0 times whatever stands there.
                shape = (self.pages.num_pages, keys.shape[1], self.pages.page_tokens, new.shape[-1])
                store[layer] = torch.zeros(shape, dtype=new.dtype, device=new.device)
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return self.keys_L[layer], self.values_L[layer]

    @torch.no_grad()
    def _move(self, sources: list[int], targets: list[int]) -> None:
        for store in (self.keys_L, self.values_L):
            for tensor in store.values():
                tensor[targets] = tensor[sources]


def pad_rows(num_rows: int) -> int:
    """Rows of a forward after padding: multiples of 4, coarser above 32 (fewer distinct shapes)."""
    step = 4 if num_rows <= 32 else 8 if num_rows <= 64 else 32
    return max(-(-num_rows // step) * step, 4)
