"""Attention of decode rows on PyTorch's own operations, for every device.

In: a layer's query, key and value, the KV pool and the rows of one forward. Out: the attention output;
keys and values are stored on the way. CPUs with a compiler take `native.py` instead, which is faster.

A decode row attends in segments: its prompt, then each page of its own tokens. Every segment
gives a partial output and the log-sum-exp of its scores; the partial outputs are then weighted by
softmax of the log-sum-exps, which is the exact softmax over all keys. A segment is computed from
the row's query and that segment's keys alone, in shapes that do not depend on the batch: this is
what keeps a row's bits independent of its batch mates (DESIGN rule 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinite_sampling.kv_pool import KVPool
from infinite_sampling.linear import has_native_bfloat16

_MASKED = float("-inf")
_SMALL_PRODUCT = 4096
"""Multiplications up to which a CPU takes another kernel for bfloat16, by the size of the whole batch."""


class ScoreRule(NamedTuple):
    """How a layer turns products of query and key into scores."""

    scale: float
    window: int | None
    """A token sees this many tokens back, itself included; None sees all."""
    softcap: float | None
    """Scores are softcap * tanh(score / softcap)."""


@dataclass(slots=True)
class _Masks:
    """What one attention window hides: additive masks inside segments, and whole segments."""

    pages: Tensor
    """(E, 1, 1, K) for the page entries."""
    prompts: list[Tensor | None]
    """(1, 1, r * Hq/Hkv, T) for the rows of each prompt; None hides nothing."""
    hidden_RJ: Tensor
    """(R, J, 1) segments that a row does not see at all."""


class _PromptRows(NamedTuple):
    """The rows of a forward that attend to one prompt."""

    prompt: int
    rows: np.ndarray
    rows_index: Tensor | None
    """The same rows as a tensor; None where they are all rows in order."""


class SegmentContext:
    """One forward of R rows, each the token at `local_R[r]` of the member in `slots_R[r]`.

    The last rows may be padding: from `num_real` on they repeat row 0 and store nothing. A slot
    may bring several rows (recomputation, drafts); each sees the keys up to its own token.
    """

    def __init__(
        self,
        pool: KVPool,
        slots_R: np.ndarray,
        local_R: np.ndarray,
        num_real: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.pool, self.device, self.dtype, self.num_real = pool, device, dtype, num_real
        self.slots_R, self.local_R = slots_R, local_R
        pages = pool.pages
        written = pages.table_SJ[slots_R[:num_real], local_R[:num_real] // pages.page_tokens]
        if written.min() < 0:
            raise RuntimeError(
                f"slot {slots_R[written.argmin()]} has no page for its token {local_R[written.argmin()]}"
            )
        self._write_pages = self._tensor(written)
        self._write_offsets = self._tensor(local_R[:num_real] % pages.page_tokens)
        self.prompt_R = np.array([pages.prompt_of_slot[int(s)] for s in slots_R], dtype=np.int64)
        self.prompt_tokens_R = np.array([pages.prompts[int(p)].num_tokens for p in self.prompt_R], dtype=np.int64)
        self._plan_pages()
        self._prompt_rows: dict[int, list[_PromptRows]] = {}
        self._masks: dict[tuple[int | None, int], _Masks] = {}

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _plan_pages(self) -> None:
        """Which (page, row) pairs to compute, and for each row where its segments will stand."""
        pages, slots_R, local_R, num_real = self.pool.pages, self.slots_R, self.local_R, self.num_real
        # With the prompt, a multiple of 4 segments a row (see `merge_segments`).
        ordinals_J = np.arange((int(local_R.max()) // pages.page_tokens + 2 + 3) // 4 * 4 - 1)
        needed_RJ = ordinals_J * pages.page_tokens <= local_R[:, None]
        page_RJ = pages.table_SJ[slots_R[:, None], np.minimum(ordinals_J, pages.max_pages - 1)]
        num_needed = int(needed_RJ[:num_real].sum())
        one_row_a_slot = len(np.unique(slots_R[:num_real])) == num_real
        if one_row_a_slot and num_needed * 2 > pages.num_high:
            # Every page below num_high once, in place: no keys are copied.
            row_of_slot = np.zeros(len(pages.table_SJ), dtype=np.int64)
            row_of_slot[slots_R[:num_real]] = np.arange(num_real)
            owner_E = pages.slot_of_page[: pages.num_high]
            self.page_E, row_E = None, np.where(owner_E >= 0, row_of_slot[owner_E], 0)
            ordinal_E = pages.ordinal_of_page[: pages.num_high]
            segment_RJ = np.where(needed_RJ, page_RJ, 0)
        else:
            row_E, ordinal_E = np.nonzero(needed_RJ[:num_real])
            self.page_E = self._tensor(page_RJ[row_E, ordinal_E])
            segment_RJ = np.zeros(needed_RJ.shape, dtype=np.int64)
            segment_RJ[row_E, ordinal_E] = np.arange(num_needed)
            segment_RJ[num_real:] = segment_RJ[0]
        self.row_E, self.start_E = row_E, ordinal_E * pages.page_tokens
        self._row_E = self._tensor(row_E)
        self.needed_RJ = needed_RJ
        self.end_E = np.clip(local_R[row_E] + 1 - self.start_E, 1, pages.page_tokens)
        # Segments stand in one tensor: a row's prompt at its own index, then the pages.
        prompt_R1 = np.arange(len(slots_R))[:, None]
        self._segment_RJ = self._tensor(np.concatenate([prompt_R1, segment_RJ + len(slots_R)], axis=1))

    def _plan_prompts(self, heads: int) -> list[_PromptRows]:
        """For each prompt in the batch its rows, padded by repetition (see `_segment_rows`)."""
        plan = []
        half_precision = self.device.type == "cpu" and self.dtype != torch.float32
        for prompt_index in np.unique(self.prompt_R):
            rows = np.flatnonzero(self.prompt_R == prompt_index)
            num_rows = _segment_rows(len(rows), heads, half_precision)
            whole = len(rows) == len(self.prompt_R) == num_rows
            rows = np.concatenate([rows, np.full(num_rows - len(rows), rows[0], dtype=np.int64)])
            plan.append(_PromptRows(int(prompt_index), rows, None if whole else self._tensor(rows)))
        return plan

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Attend rows (R, Hq, 1, D); returns (R, 1, Hq, D)."""
        real, pool = self.num_real, self.pool
        new_keys, new_values = key[:real, :, 0].to(self.dtype), value[:real, :, 0].to(self.dtype)
        pool.write_members(layer, self._write_pages, self._write_offsets, new_keys, new_values)
        keys, values = pool.keys_L[layer], pool.values_L[layer]
        num_rows, num_heads, _, dim = query.shape
        query = query.to(self.dtype).view(num_rows, keys.shape[1], -1, dim)  # (R, Hkv, Hq/Hkv, D)
        heads = query.shape[2]
        if heads not in self._prompt_rows:
            self._prompt_rows[heads] = self._plan_prompts(heads)
        masks = self._masks_for(rule.window, heads)
        if self.page_E is None:
            keys, values = keys[: pool.pages.num_high], values[: pool.pages.num_high]
        else:
            keys, values = keys[self.page_E], values[self.page_E]
        # In pages this short, plain products take half the time of the flash kernel in bfloat16.
        attend_pages = attend_plain if has_native_bfloat16() or query.device.type != "cpu" else attend_segment
        page_out, page_lse = attend_pages(query[self._row_E], keys, values, masks.pages, rule)
        prompt_out = page_out.new_empty(num_rows, num_heads, page_out.shape[-1])
        prompt_lse = page_lse.new_empty(num_rows, num_heads)
        for (prompt, _, rows), mask in zip(self._prompt_rows[heads], masks.prompts, strict=True):
            queries = query if rows is None else query[rows]
            shape = queries.shape
            queries = queries.transpose(0, 1).reshape(1, shape[1], -1, dim)  # (1, Hkv, r * Hq/Hkv, D)
            out, lse = attend_prompt(queries, *pool.prompt_kv(prompt, layer), mask, rule)
            out = out.view(shape[1], shape[0], shape[2], -1).transpose(0, 1).reshape(shape[0], num_heads, -1)
            lse = lse.view(shape[1], shape[0], shape[2]).transpose(0, 1).reshape(shape[0], num_heads)
            if rows is None:
                prompt_out, prompt_lse = out, lse
            else:
                prompt_out[rows], prompt_lse[rows] = out, lse
        merged = merge_segments(
            torch.cat([prompt_out, page_out.reshape(-1, num_heads, page_out.shape[-1])]),
            torch.cat([prompt_lse, page_lse.reshape(-1, num_heads)]),
            self._segment_RJ,
            masks.hidden_RJ,
        )
        return merged.to(self.dtype)[:, None]

    def _masks_for(self, window: int | None, heads: int) -> _Masks:
        if (window, heads) not in self._masks:
            self._masks[window, heads] = self._build_masks(window, heads)
        return self._masks[window, heads]

    def _build_masks(self, window: int | None, heads: int) -> _Masks:
        prompt_rows = self._prompt_rows[heads]
        position_R = self.prompt_tokens_R + self.local_R
        offsets_K = np.arange(self.pool.pages.page_tokens)
        first_E = np.zeros_like(self.start_E)
        hidden_RJ = np.concatenate([np.zeros((len(position_R), 1), bool), ~self.needed_RJ], axis=1)
        prompt_masks: list[np.ndarray | None] = [None] * len(prompt_rows)
        if window is not None:
            # Key at own index i is seen by the row at own index l if l - i < window.
            first_E = np.maximum(self.local_R[self.row_E] - window + 1 - self.start_E, 0)
            first_E = np.where(first_E >= self.end_E, 0, first_E)  # wholly out of sight: hidden below
            page_end_J = np.arange(1, self.needed_RJ.shape[1] + 1) * self.pool.pages.page_tokens
            hidden_RJ[:, 1:] |= page_end_J <= self.local_R[:, None] - window + 1
            hidden_RJ[:, 0] = position_R - (self.prompt_tokens_R - 1) >= window
            for i, (prompt, rows, _) in enumerate(prompt_rows):
                tokens = self.pool.pages.prompts[prompt].num_tokens
                if tokens + self.pool.pages.max_pages * self.pool.pages.page_tokens > window:
                    seen = np.arange(tokens) > (position_R[rows] - window)[:, None]
                    seen |= ~seen.any(axis=1, keepdims=True)
                    prompt_masks[i] = seen
        seen_E = (offsets_K < self.end_E[:, None]) & (offsets_K >= first_E[:, None])
        return _Masks(
            pages=self._bias(seen_E)[:, None, None, :],
            prompts=[
                None if m is None else self._bias(m).repeat_interleave(heads, 0)[None, None] for m in prompt_masks
            ],
            hidden_RJ=self._tensor(hidden_RJ)[:, :, None],
        )

    def _bias(self, seen: np.ndarray) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~self._tensor(seen), _MASKED)


def _segment_rows(num_rows: int, heads: int, half_precision: bool) -> int:
    """Rows of a prompt segment after padding: a multiple of 4 whose matrix has no thin last block.

    The flash kernel cuts the rows x heads of its matrix into blocks of 32; a last block of less than
    12 was measured to change bits for head sizes from 96. In half precision it packs its keys from 64
    rows x heads on, and rounds otherwise than below: there every segment has as many.
    """
    num_rows = -(-num_rows // 4) * 4
    while 0 < num_rows * heads % 32 < 12 or (half_precision and num_rows * heads < 64):
        num_rows += 4
    return num_rows


def attend_prompt(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """`attend_segment` for a prompt and all its rows, with bits that do not depend on how many there are.

    On a CPU that emulates half precision only float32 has them.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype != torch.float32 and not has_native_bfloat16():
        query, keys, values = query.float(), keys.float(), values.float()
        bias = None if bias is None else bias.float()
    out, lse = attend_segment(query, keys, values, bias, rule)
    return out.to(dtype), lse


def attend_segment(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Attention of query (B, H, M, D) to keys and values (B, H, T, D), with the scores' log-sum-exp.

    `bias` is added to the scaled scores, broadcast from (B or 1, 1, M or 1, T). Returns
    ((B, H, M, D), (B, H, M) float32).
    """
    if _has_cpu_kernel(query, values) and rule.softcap is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=bias, scale=rule.scale
        )
        return out, lse
    return attend_plain(query, keys, values, bias, rule)


def _has_cpu_kernel(query: Tensor, values: Tensor) -> bool:
    """PyTorch's own flash kernel for the CPU takes equal head sizes and returns the log-sum-exp."""
    return (
        query.device.type == "cpu"
        and query.shape[-1] == values.shape[-1]
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def attend_plain(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """`attend_segment` by matrix products, on any device and with a softcap."""
    dtype = values.dtype
    if query.device.type == "cpu" and keys[0].numel() * min(query.shape[2], 4) <= _SMALL_PRODUCT:
        query, keys, values = query.float(), keys.float(), values.float()
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if bias is not None:
        scores = scores + bias
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul((weights / total).to(values.dtype), values).to(dtype)
    return out, (largest + torch.log(total)).squeeze(-1)


def merge_segments(out_N: Tensor, lse_N: Tensor, segment_RJ: Tensor, hidden_RJ: Tensor) -> Tensor:
    """Join partial attentions exactly: out_N (N, H, D) weighted by softmax of lse_N (N, H).

    Row r takes segments segment_RJ[r], less those where hidden_RJ (R, J, 1) is true; J, a multiple of 4, does
    not change its bits. Returns (R, H, D) float32. Source: the online softmax (Milakov and Gimelshein 2018).
    """
    lse = lse_N[segment_RJ].masked_fill_(hidden_RJ, _MASKED)  # (R, J, H)
    weights = torch.exp(lse - lse.amax(1, keepdim=True))
    # A running sum adds in order; `sum` takes four addends at once, so J is a multiple of 4 below.
    weights = weights / weights.cumsum(1)[:, -1:]
    out = out_N.view(len(out_N), -1).index_select(0, segment_RJ.view(-1)).view(*segment_RJ.shape, *out_N.shape[1:])
    return (out.float() * weights[..., None]).sum(1)
