"""Byte arithmetic: what a rollout will hold, before any weight is loaded.

In: the shape of a model's KV, G, lengths, slots or a budget. Out: `MemoryPlan`, the bytes of each
part and the slots that fit. Pure: no torch; the KV pool takes its page size from here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from infinite_sampling.config import ConfigError

PAGE_TOKENS = 128
"""Tokens of a full page of member KV. Attention's bits are independent of padding up to 256 keys
(measured); small pages waste less, large ones cost fewer kernel tasks."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def page_tokens_for(max_tokens: int) -> int:
    """Tokens of a page where a member holds at most `max_tokens`: a short limit needs no full page."""
    return min(PAGE_TOKENS, -(-max_tokens // 16) * 16)


def member_tokens_reserved(max_new_tokens: int) -> int:
    """Tokens of KV that a slot reserves: the last token is never run, so it needs none."""
    held = max(max_new_tokens - 1, 1)
    page_tokens = page_tokens_for(held)
    return -(-held // page_tokens) * page_tokens


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
    """What one slot reserves for a member."""
    num_slots: int
    """Slots asked for, or the most that fit the budget."""
    kv_bytes: int
    """Held prompts and all slots: the most that the rollout can come to."""
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
) -> MemoryPlan:
    """Bytes of a rollout of `num_prompts` x `num_generations` members.

    At most one prompt a slot is held at a time, and all of them only with as many slots (policy
    `full`: one for each member). With `kv_budget_bytes` the most slots that fit, at most `num_slots`
    where given. Raises ConfigError on a number below 1, and on a budget too small for one member,
    naming the smallest that would do.
    """
    counts = {"num_generations": num_generations, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
    counts |= {"num_prompts": num_prompts, "num_slots": 1 if num_slots is None else num_slots}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    per_token = shape.bytes_per_token(dtype)
    num_members = num_prompts * num_generations
    prompt_kv, member_kv = prompt_tokens * per_token, member_tokens_reserved(max_new_tokens) * per_token
    slots = min(num_slots or num_members, num_members)
    if kv_budget_bytes is not None:
        fitting = kv_budget_bytes // (prompt_kv + member_kv)  # each slot with a prompt of its own
        if fitting > num_prompts:
            fitting = (kv_budget_bytes - num_prompts * prompt_kv) // member_kv
        slots = min(slots, fitting)
        if slots < 1:
            raise ConfigError(
                f"a KV budget of {kv_budget_bytes} bytes does not hold one member: its prompt takes {prompt_kv} bytes "
                f"and it {member_kv}; the smallest that would do is {prompt_kv + member_kv} bytes"
            )
    held_prompts = min(num_prompts, slots)
    return MemoryPlan(
        weight_bytes=weight_bytes,
        working_copy_bytes=working_copy_bytes,
        kv_bytes_per_token=per_token,
        num_held_prompts=held_prompts,
        prompt_kv_bytes=held_prompts * prompt_kv,
        member_kv_bytes=member_kv,
        num_slots=slots,
        kv_bytes=held_prompts * prompt_kv + slots * member_kv,
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
