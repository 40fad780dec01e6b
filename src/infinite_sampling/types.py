"""The records that travel through the system. No torch, no behaviour.

In: nothing. Out: `PromptGroup`, `Member`, `Completion`, `RolloutStats`, `Rollout`.
Deliberately ignorant of models, tensors and schedules.

Axes (see CONTRIBUTING): P prompts, G members of a group, S slots, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class FinishReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    """It sampled one of the end-of-sequence tokens (kept as its last token)."""
    LENGTH = "length"
    """It reached `max_new_tokens`, or its forced length."""
    STOP = "stop"
    """Its text came to contain one of the stop strings (kept)."""


class Member(NamedTuple):
    """The identity of one completion: position of its prompt in the call, position in its group.

    Identity is never taken from text or token equality: two equal prompts are two prompts.
    """

    prompt_index: int
    member_index: int


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """One prompt and the group of completions asked of it.

    `prompt_key` and `member_keys` name the random streams: they, and not the indices, enter the
    noise, so that a prompt sampled alone gives the same completions as in a larger call.
    """

    prompt_index: int
    prompt_key: int
    prompt_ids: tuple[int, ...]
    member_keys: tuple[int, ...]

    @property
    def num_generations(self) -> int:
        """G, the number of completions asked for."""
        return len(self.member_keys)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished member.

    `token_ids`, `logprobs` and `sampling_logprobs` have equal length T. `logprobs` are of
    the full-vocabulary distribution at the sampling temperature (1 when greedy) before
    repetition penalty and filters; `sampling_logprobs` of the distribution really drawn from.
    """

    prompt_index: int
    member_index: int
    token_ids: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    finish_reason: FinishReason

    @property
    def num_tokens(self) -> int:
        """Length of the completion, its EOS token included."""
        return len(self.token_ids)


@dataclass(slots=True)
class RolloutStats:
    """What a rollout did, counted in the loop and never estimated.

    A running step is one step of the loop in which every active slot samples one token.
    """

    policy: str = ""
    num_slots: int = 0
    num_prompts: int = 0
    num_members: int = 0
    num_running_steps: int = 0
    lower_bound_steps: int = 0
    """max(longest member, ceil(total tokens / num_slots)), or more where the KV pool is the bound."""
    num_tokens: int = 0
    """Tokens of the completions returned."""
    num_prompt_tokens: int = 0
    """Prompt tokens prefilled (each distinct request once)."""
    num_discarded_tokens: int = 0
    """Tokens sampled for members that were then dropped (`dynamic-slot` only)."""
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    peak_kv_bytes: int = 0
    """Largest number of bytes of KV allocated at one time: prompts and members."""
    kv_budget_bytes: int | None = None
    mean_active_slots: float = 0.0
    occupancy: float = 0.0
    """Mean active slots over the number of slots."""
    wall_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sample_seconds: float = 0.0
    predict_seconds: float = 0.0
    schedule_seconds: float = 0.0
    deterministic: bool | None = None
    """True where the start-up probe found that a row's bits do not depend on its batch."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of returned completions by wall second of the rollout."""
        return self.num_tokens / self.wall_seconds if self.wall_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields and `tokens_per_second`, ready for JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(slots=True)
class Rollout:
    """The result of `RolloutEngine.rollout`: `completions[p][m]`, in request order."""

    completions: list[list[Completion]]
    stats: RolloutStats = field(default_factory=RolloutStats)

    def __iter__(self) -> Iterator[Completion]:
        """Every completion, prompt by prompt."""
        return (completion for group in self.completions for completion in group)
