"""The state machine of a rollout: which member sits in which slot, who waits, who is done.

In: group sizes, a number of slots, a policy, and the page table of the KV pool; then `sampled` and
`finish` as members go on and end. Out: from `make_room`, the members to take out; from `refill`, the
members to start and their slots. It knows nothing of tokens' values, tensors or time, so that the
simulator and the engine replay the same decisions.

Slots whose pages were all reserved never meet a full pool. Where the pool is smaller (a budget in
bytes), a member is admitted while the pages held and those that running members are expected to
need still fit, and preempted when the pool is full all the same: it waits at the head of the queue
with its tokens, and its KV is recomputed when it comes back.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinite_sampling.types import Member

if TYPE_CHECKING:
    from infinite_sampling.pages import PageTable

NEED_SHARE = 0.5
"""Share of the tokens that members are expected to still need that admission keeps free: they do not
all reach their ends at once. Larger: fewer rows; smaller: more recomputed (docs/memory.md)."""
LEAST_NEED = 0.3
"""A member past the mean length is expected to need this share of the mean."""


class Scheduler:
    """Waiting, active and finished members under one policy.

    Args:
        group_sizes_P: G of each prompt, in request order.
        num_slots: slots g; policy `full` ignores it and gives every member one.
        policy: `full`, `micro`, `fixed-slot` or `dynamic-slot` (see `RolloutConfig`).
        pages: the page table, which the scheduler alone fills; None where memory does not matter.
        prompt_tokens_P, contents_P: tokens of each prompt, and the first prompt with the same tokens:
            equal prompts share one KV. Needed with `pages`.
        max_new_tokens: longest completion.

    The first three policies run the members in request order and differ in *when* a freed slot is
    refilled. `dynamic-slot` instead keeps starting new members of the first unfinished group
    (member indices run past G-1) until any G have finished, then drops its active ones.
    """

    def __init__(
        self,
        group_sizes_P: Sequence[int],
        num_slots: int,
        policy: str,
        pages: PageTable | None = None,
        prompt_tokens_P: Sequence[int] = (),
        contents_P: Sequence[int] = (),
        max_new_tokens: int = 0,
    ) -> None:
        self.group_sizes_P = tuple(group_sizes_P)
        self.policy, self.pages = policy, pages
        self.num_slots = sum(self.group_sizes_P) if policy == "full" else num_slots
        self.prompt_tokens_P, self.contents_P, self.max_new_tokens = prompt_tokens_P, contents_P, max_new_tokens
        self.active: dict[int, Member] = {}
        self.num_tokens: Counter[Member] = Counter()
        """Tokens sampled so far by members not finished."""
        self.num_finished_P = [0] * len(self.group_sizes_P)
        self._free_slots = list(range(self.num_slots))
        self._waiting: deque[Member] = deque()
        if policy != "dynamic-slot":
            self._waiting.extend(Member(p, m) for p, size in enumerate(self.group_sizes_P) for m in range(size))
        self._num_started_P = [0] * len(self.group_sizes_P)
        self._most_active = self.num_slots
        self._finished_tokens = self._num_finished = 0

    @property
    def done(self) -> bool:
        """Whether every group has its G finished members."""
        return all(n >= size for n, size in zip(self.num_finished_P, self.group_sizes_P, strict=True))

    def make_room(self) -> list[int]:
        """Give every active member pages for its next token; returns the slots preempted for it.

        Idle prompts go first, then the member that loses least: the one with the fewest tokens.
        """
        if self.pages is None:
            return []
        preempted = []
        while not self._free_up(self._next_pages()):
            slot = min(self.active, key=self._loss)
            self._preempt(slot)
            preempted.append(slot)
        for slot, member in self.active.items():
            self.pages.ensure(slot, self.num_tokens[member])
        return preempted

    def limit_active(self, most: int) -> list[int]:
        """Never run more than `most` members from now on; returns the slots preempted for it."""
        self._most_active = max(most, 1)
        order = sorted(self.active, key=self._loss)
        preempted = order[: max(len(order) - self._most_active, 0)]
        for slot in preempted:
            self._preempt(slot)
        return preempted

    def refill(self) -> list[tuple[int, Member]]:
        """Start members in free slots, lowest slot first; returns (slot, member) of each.

        `micro` waits until its whole micro group has finished. A member that had been preempted
        starts with the tokens it has (`num_tokens`).
        """
        if self.policy == "micro" and self.active:
            return []
        started: list[tuple[int, Member]] = []
        while self._free_slots and len(self.active) < self._most_active:
            member = self._peek()
            if member is None or not self._fits(member):
                break
            self._take(member)
            slot = heapq.heappop(self._free_slots)
            self.active[slot] = member
            if self.pages is not None:
                self.pages.admit(slot, self.contents_P[member.prompt_index])
                self.pages.ensure(slot, self.num_tokens[member])
            started.append((slot, member))
        return started

    def sampled(self, slot: int, count: int = 1) -> None:
        """The member in `slot` has `count` tokens more."""
        self.num_tokens[self.active[slot]] += count

    def finish(self, slot: int) -> list[int]:
        """Retire the member in `slot`; returns the slots whose members are dropped with it.

        Only `dynamic-slot` drops any: the active ones of a group that has its G. Raises KeyError
        if the slot is empty.
        """
        member = self._vacate(slot)
        self._finished_tokens += self.num_tokens.pop(member, 0)
        self._num_finished += 1
        p = member.prompt_index
        self.num_finished_P[p] += 1
        if self.num_finished_P[p] < self.group_sizes_P[p]:
            return []
        dropped = [other for other, m in self.active.items() if m.prompt_index == p]
        for other in dropped:
            self.num_tokens.pop(self._vacate(other), None)
        self._waiting = deque(m for m in self._waiting if m.prompt_index != p)
        self._drop_finished_prompt(p)
        return dropped

    def _vacate(self, slot: int) -> Member:
        member = self.active.pop(slot)
        heapq.heappush(self._free_slots, slot)
        if self.pages is not None:
            self.pages.release(slot)
        return member

    def _loss(self, slot: int) -> tuple[int, int]:
        """What preempting `slot` costs: the tokens to recompute; the lower slot of equals."""
        return self.num_tokens[self.active[slot]], slot

    def _preempt(self, slot: int) -> None:
        self._waiting.appendleft(self._vacate(slot))

    def _peek(self) -> Member | None:
        """The member to start next."""
        if self._waiting or self.policy != "dynamic-slot":
            return self._waiting[0] if self._waiting else None
        open_groups = (p for p, size in enumerate(self.group_sizes_P) if self.num_finished_P[p] < size)
        p = next(open_groups, None)
        return None if p is None else Member(p, self._num_started_P[p])

    def _take(self, member: Member) -> None:
        if self._waiting:
            self._waiting.popleft()
        else:
            self._num_started_P[member.prompt_index] += 1

    def _fits(self, member: Member) -> bool:
        """Whether to admit `member` now; if so, its prompt is held and its pages are free."""
        if self.pages is None:
            return True
        content = self.contents_P[member.prompt_index]
        prompt = 0
        if content not in self.pages.prompts:
            prompt = self.pages.pages_for(self.prompt_tokens_P[member.prompt_index])
        if self.active and not self._is_expected_to_fit(member, prompt):
            return False
        # A member without a token needs its first page in the next step.
        own = max(self.pages.pages_for(self.num_tokens[member]), 1)
        if not self._free_up(prompt + own, keep=content):
            return False
        if prompt:
            self.pages.hold_prompt(content, self.prompt_tokens_P[member.prompt_index])
        return True

    def _is_expected_to_fit(self, member: Member, prompt_pages: int) -> bool:
        """Whether the pages held and still needed, with `member` and its prompt, stay within the pool."""
        assert self.pages is not None
        if self.num_slots * self.pages.max_pages <= self.pages.num_pages - self._prompt_pages(prompt_pages):
            return True
        mean = (self._finished_tokens + self.max_new_tokens / 2) / (self._num_finished + 1)
        held = [self.num_tokens[other] for other in (*self.active.values(), member)]
        tokens = sum(n + NEED_SHARE * max(mean - n, LEAST_NEED * mean) for n in held)
        pages = tokens / self.pages.page_tokens + len(held) / 2
        return pages + self._prompt_pages(prompt_pages) <= self.pages.num_pages

    def _prompt_pages(self, more: int) -> int:
        """Pages of prompts that members share now, and `more`."""
        assert self.pages is not None
        return more + sum(held.num_pages for held in self.pages.prompts.values() if held.num_references)

    def _next_pages(self) -> int:
        """Pages that the active members lack for their next token."""
        pages = self.pages
        assert pages is not None
        return sum(
            max(pages.pages_for(self.num_tokens[member]) - int(pages.num_pages_S[slot]), 0)
            for slot, member in self.active.items()
        )

    def _free_up(self, count: int, keep: int | None = None) -> bool:
        """Whether `count` pages are free, after dropping idle prompts (but `keep`) as far as needed."""
        assert self.pages is not None
        for content in [c for c, held in self.pages.prompts.items() if not held.num_references and c != keep]:
            if self.pages.num_free >= count:
                break
            self.pages.drop_prompt(content)
        return self.pages.num_free >= count

    def _drop_finished_prompt(self, p: int) -> None:
        """Free the KV of prompt `p` once all groups with its tokens have finished."""
        if self.pages is None or self.contents_P[p] not in self.pages.prompts:
            return
        same = [q for q, content in enumerate(self.contents_P) if content == self.contents_P[p]]
        if all(self.num_finished_P[q] >= self.group_sizes_P[q] for q in same):
            self.pages.drop_prompt(self.contents_P[p])


def lower_bound_steps(lengths: Sequence[int], num_slots: int, kv_tokens: int | None = None) -> int:
    """Running steps that no schedule can undercut.

    max(longest, ceil(total / num_slots)), and with `kv_tokens` also ceil(sum of L (L - 1) / 2 / kv_tokens):
    a member of L tokens holds the KV of 0, 1, ... L-1 of them in its L steps.
    """
    if not lengths:
        return 0
    bound = max(max(lengths), -(-sum(lengths) // num_slots))
    if kv_tokens is not None:
        bound = max(bound, -(-sum(n * (n - 1) // 2 for n in lengths) // kv_tokens))
    return bound
