"""Byte arithmetic: what a rollout will hold, before any weight is loaded.

In: the shape of a model's KV, G, lengths, slots or a budget. Out: `MemoryPlan`, the bytes of each
part and the slots that fit. Pure: no torch; the KV pool takes its page size from here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Protocol

from infinite_sampling.config import ConfigError

PAGE_TOKENS = 32
"""Tokens of a page of KV: a member wastes half a page on average (docs/memory.md has the table)."""

DEFAULT_NUM_SLOTS = 32
"""Most members decoded at once where neither slots nor a budget are given."""
MAX_NUM_SLOTS = 256
"""Most members decoded at once under a budget in bytes, where `num_slots` does not say."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def page_tokens_for(max_tokens: int) -> int:
    """Tokens of a page where a member holds at most `max_tokens`: a short limit needs no full page."""
    return min(PAGE_TOKENS, -(-max_tokens // 16) * 16)


def member_tokens_held(max_new_tokens: int) -> int:
    """Most tokens of KV that a member holds: its last token is never run, so it needs none."""
    return max(max_new_tokens - 1, 1)


def member_tokens_reserved(max_new_tokens: int) -> int:
    """The same in whole pages: what a slot takes at the most."""
    held = member_tokens_held(max_new_tokens)
    page_tokens = page_tokens_for(held)
    return -(-held // page_tokens) * page_tokens


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of a KV pool: what the engine allocates, and what `memory` predicts."""

    page_tokens: int
    num_pages: int
    num_slots: int
    num_held_prompts: int
    """Most distinct prompts held at once, where every slot has one of its own."""

    @property
    def num_tokens(self) -> int:
        """Tokens of KV in all pages."""
        return self.num_pages * self.page_tokens


def plan_pool(
    prompt_tokens: Sequence[int],
    *,
    num_members: int,
    max_new_tokens: int,
    num_slots: int | None = None,
    budget_tokens: int | None = None,
    may_preempt: bool = True,
) -> PoolPlan:
    """Pages for `num_members` members of distinct prompts of these lengths.

    Without a budget every slot (default 32) can hold its longest completion and a prompt of its own.
    With one the pool is at most `budget_tokens`; where `may_preempt`, slots may then outnumber the
    whole completions that fit (up to 256), else they are as many as fit. Raises ConfigError for a
    budget below one member, with the smallest that would do, counted in tokens.
    """
    page_tokens = page_tokens_for(member_tokens_held(max_new_tokens))
    member_pages = member_tokens_reserved(max_new_tokens) // page_tokens
    prompt_pages = sorted((-(-tokens // page_tokens) for tokens in prompt_tokens), reverse=True)
    needed = [0, *accumulate(prompt_pages)]  # by number of prompts held, the longest first

    def pages_for(slots: int) -> int:
        return slots * member_pages + needed[min(slots, len(prompt_pages))]

    def plan(slots: int, pages: int) -> PoolPlan:
        return PoolPlan(page_tokens, pages, slots, min(slots, len(prompt_pages)))

    if budget_tokens is None:
        slots = min(num_slots or DEFAULT_NUM_SLOTS, num_members)
        return plan(slots, pages_for(slots))
    budget_pages = budget_tokens // page_tokens
    if budget_pages < pages_for(1):
        raise BudgetError(budget_tokens, needed[1] * page_tokens, member_pages * page_tokens)
    wanted = min(num_slots or (MAX_NUM_SLOTS if may_preempt else num_members), num_members)
    if may_preempt:
        slots = min(wanted, budget_pages - prompt_pages[-1])
    else:
        slots = bisect_right(range(1, wanted + 1), budget_pages, key=pages_for)
    return plan(slots, min(pages_for(slots), budget_pages))


class BudgetError(ConfigError):
    """A KV budget that does not hold one member; its numbers are in tokens of KV."""

    def __init__(self, budget: int, prompt: int, member: int, unit: str = "tokens") -> None:
        self.budget, self.prompt, self.member = budget, prompt, member
        super().__init__(
            f"a KV budget of {budget} {unit} does not hold one member: its prompt takes {prompt} {unit} and it "
            f"{member}; the smallest that would do is {prompt + member} {unit}"
        )

    def in_bytes(self, budget_bytes: int, bytes_per_token: int) -> BudgetError:
        """The same error with its numbers in bytes."""
        return BudgetError(budget_bytes, self.prompt * bytes_per_token, self.member * bytes_per_token, "bytes")


class TextConfig(Protocol):
    """The attributes of a transformers text config that are read here."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token of KV consists of: `num_layers` x 2 x `num_kv_heads` x `head_dim` numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: TextConfig) -> KVShape:
        """The shape of a transformers text config (`config.get_text_config()`)."""
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token in all layers. Raises ConfigError on an unknown dtype."""
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a rollout, by part. KV figures are what the engine allocates, padding included."""

    weight_bytes: int
    working_copy_bytes: int
    kv_bytes_per_token: int
    num_held_prompts: int
    """Most prompts held at once: one comes with its first member and goes with its last."""
    prompt_kv_bytes: int
    """KV of the prompts held at once, each stored once."""
    member_kv_bytes: int
    """What one member comes to at the longest."""
    num_slots: int
    """Most members decoded at once."""
    kv_bytes: int
    """The pool that the engine allocates: the most that the rollout can come to."""
    full_kv_bytes: int
    """The same with all members at once, each with its own copy of the prompt, as `generate` holds."""
    kv_budget_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Weights, working copy and KV."""
        return self.weight_bytes + self.working_copy_bytes + self.kv_bytes

    def to_dict(self) -> dict[str, Any]:
        """The fields and the total, ready for JSON."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def plan_memory(
    shape: KVShape,
    *,
    dtype: str,
    num_generations: int,
    prompt_tokens: int,
    max_new_tokens: int,
    num_prompts: int = 1,
    num_slots: int | None = None,
    kv_budget_bytes: int | None = None,
    weight_bytes: int = 0,
    working_copy_bytes: int = 0,
    may_preempt: bool = True,
) -> MemoryPlan:
    """Bytes of a rollout of `num_prompts` x `num_generations` members with equal prompts' lengths.

    See `plan_pool` for slots and budget. Raises ConfigError on a number below 1, and on a budget too
    small for one member, naming the smallest that would do.
    """
    counts = {"num_generations": num_generations, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
    counts |= {"num_prompts": num_prompts, "num_slots": 1 if num_slots is None else num_slots}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    per_token = shape.bytes_per_token(dtype)
    num_members = num_prompts * num_generations
    try:
        pool = plan_pool(
            [prompt_tokens] * num_prompts,
            num_members=num_members,
            max_new_tokens=max_new_tokens,
            num_slots=num_slots,
            budget_tokens=None if kv_budget_bytes is None else kv_budget_bytes // per_token,
            may_preempt=may_preempt,
        )
    except BudgetError as error:
        raise error.in_bytes(kv_budget_bytes or 0, per_token) from None
    return MemoryPlan(
        weight_bytes=weight_bytes,
        working_copy_bytes=working_copy_bytes,
        kv_bytes_per_token=per_token,
        num_held_prompts=pool.num_held_prompts,
        prompt_kv_bytes=pool.num_held_prompts * -(-prompt_tokens // pool.page_tokens) * pool.page_tokens * per_token,
        member_kv_bytes=member_tokens_reserved(max_new_tokens) * per_token,
        num_slots=pool.num_slots,
        kv_bytes=pool.num_tokens * per_token,
        full_kv_bytes=num_members * (prompt_tokens + max_new_tokens) * per_token,
        kv_budget_bytes=kv_budget_bytes,
    )


def format_bytes(num_bytes: float) -> str:
    """Bytes as text for people, in powers of two."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
