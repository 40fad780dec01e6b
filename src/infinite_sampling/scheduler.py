"""The state machine of a rollout: which member sits in which slot, who waits, who is done.

In: group sizes, a number of slots, a policy; then `finish` for each member that ends. Out: from
`refill`, the members to start and their slots. It knows nothing of tokens, tensors, time or
lengths, so that the simulator and the engine replay the same decisions.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from infinite_sampling.types import Member


class Scheduler:
    """Waiting, active and finished members under one policy.

    Args:
        group_sizes_P: G of each prompt, in request order.
        num_slots: slots g; policy `full` ignores it and gives every member one.
        policy: `full`, `micro`, `fixed-slot` or `dynamic-slot` (see `RolloutConfig`).

    The first three run the members in request order and differ in *when* a freed slot is
    refilled. `dynamic-slot` instead keeps starting new members of the first unfinished group
    (member indices run past G-1) until any G have finished, then drops its active ones.
    """

    def __init__(self, group_sizes_P: Sequence[int], num_slots: int, policy: str) -> None:
        self.group_sizes_P = tuple(group_sizes_P)
        self.policy = policy
        self.num_slots = sum(self.group_sizes_P) if policy == "full" else num_slots
        self.active: dict[int, Member] = {}
        self.num_finished_P = [0] * len(self.group_sizes_P)
        self._free_slots = list(range(self.num_slots))
        self._waiting = deque(Member(p, m) for p, size in enumerate(self.group_sizes_P) for m in range(size))
        self._num_started_P = [0] * len(self.group_sizes_P)
        self._group = 0

    @property
    def done(self) -> bool:
        """Whether every group has its G finished members."""
        return all(n >= size for n, size in zip(self.num_finished_P, self.group_sizes_P, strict=True))

    def refill(self) -> list[tuple[int, Member]]:
        """Start members in free slots, lowest slot first; returns (slot, member) of each.

        `micro` waits until its whole micro group has finished.
        """
        if self.policy == "micro" and self.active:
            return []
        started: list[tuple[int, Member]] = []
        while self._free_slots and (member := self._next()) is not None:
            slot = heapq.heappop(self._free_slots)
            self.active[slot] = member
            started.append((slot, member))
        return started

    def finish(self, slot: int) -> list[int]:
        """Retire the member in `slot`; returns the slots whose members are dropped with it.

        Only `dynamic-slot` drops any: the active ones of a group that has its G. Raises KeyError
        if the slot is empty.
        """
        member = self.active.pop(slot)
        heapq.heappush(self._free_slots, slot)
        p = member.prompt_index
        self.num_finished_P[p] += 1
        if self.policy != "dynamic-slot" or self.num_finished_P[p] < self.group_sizes_P[p]:
            return []
        dropped = [other for other, m in self.active.items() if m.prompt_index == p]
        for other in dropped:
            del self.active[other]
            heapq.heappush(self._free_slots, other)
        return dropped

    def _next(self) -> Member | None:
        if self.policy != "dynamic-slot":
            return self._waiting.popleft() if self._waiting else None
        sizes = self.group_sizes_P
        while self._group < len(sizes) and self.num_finished_P[self._group] >= sizes[self._group]:
            self._group += 1
        if self._group == len(sizes):
            return None
        member = Member(self._group, self._num_started_P[self._group])
        self._num_started_P[self._group] += 1
        return member


def lower_bound_steps(lengths: Sequence[int], num_slots: int) -> int:
    """Running steps that no schedule can undercut: max(longest, ceil(total / num_slots))."""
    return max(max(lengths), -(-sum(lengths) // num_slots)) if lengths else 0
