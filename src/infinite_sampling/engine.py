"""`RolloutEngine`: samples groups of completions.

In: prompts as token ids, G, a `SamplingConfig`. Out: `Completion`s, each exactly once, and
`RolloutStats`. All arguments are checked here, before any work; `loop.py` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig
from infinite_sampling.loop import Loop, OnEvent, SlotEvent
from infinite_sampling.model_runner import ModelRunner, UnsupportedModelError, unsupported_reason
from infinite_sampling.prompts import check_prompts, group_prompts
from infinite_sampling.types import Completion, PromptGroup, Rollout

__all__ = ["RolloutEngine", "SlotEvent", "UnsupportedModelError", "unsupported_reason"]


class RolloutEngine:
    """Samples groups of completions from a causal LM with a bounded number of KV slots.

    Args:
        model: a transformers causal LM or a PEFT model around one; its live weights are used.
        tokenizer: needed for stop strings only.
        config: how to run; see `RolloutConfig`.

    Raises UnsupportedModelError (a ConfigError) for a model it cannot decode exactly.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, config: RolloutConfig | None = None) -> None:
        if config is not None and not isinstance(config, RolloutConfig):
            raise ConfigError(f"config must be a RolloutConfig, got {type(config).__name__}")
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or RolloutConfig()
        self.runner = ModelRunner(model, self.config)
        self.reserved_bytes = 0
        """Memory that is free now and soon needed elsewhere: not counted where free memory sets the budget."""

    def rollout(
        self,
        prompt_ids: Sequence[Sequence[int]],
        num_generations: int | Sequence[int] = 1,
        sampling: SamplingConfig | None = None,
        prompt_keys: Sequence[int] | None = None,
        member_keys: Sequence[int] | Sequence[Sequence[int]] | None = None,
        lengths: Sequence[Sequence[int]] | None = None,
        on_event: OnEvent | None = None,
    ) -> Rollout:
        """Sample `num_generations` completions of every prompt; returns them in request order.

        Args:
            prompt_ids: token ids of P prompts.
            num_generations: G, one for all prompts or one each.
            prompt_keys, member_keys: ints that name the random streams; default 0..P-1 and 0..G-1.
                `member_keys` may hold one list for all prompts or one each.
            lengths: true lengths, for policy "oracle" (not available in this version).
            on_event: called with each `SlotEvent` as it happens.

        Raises ConfigError before any work for arguments that cannot work, FloatingPointError for
        NaN logits (naming prompt, member and step).
        """
        loop = self._loop(prompt_ids, num_generations, sampling, prompt_keys, member_keys, lengths, on_event)
        members: list[dict[int, Completion]] = [{} for _ in loop.groups_P]
        for completion in self._run(loop):
            members[completion.prompt_index][completion.member_index] = completion
        return Rollout([[group[m] for m in sorted(group)] for group in members], loop.stats)

    def stream(
        self,
        prompt_ids: Sequence[Sequence[int]],
        num_generations: int | Sequence[int] = 1,
        sampling: SamplingConfig | None = None,
        prompt_keys: Sequence[int] | None = None,
        member_keys: Sequence[int] | Sequence[Sequence[int]] | None = None,
        lengths: Sequence[Sequence[int]] | None = None,
        on_event: OnEvent | None = None,
    ) -> Iterator[Completion]:
        """As `rollout`, but yields each completion when it ends.

        Arguments are checked at the call. The model is switched to decoding until the iterator is
        exhausted or closed; do not train it in between.
        """
        return self._run(self._loop(prompt_ids, num_generations, sampling, prompt_keys, member_keys, lengths, on_event))

    def _loop(
        self,
        prompt_ids: Sequence[Sequence[int]],
        num_generations: int | Sequence[int],
        sampling: SamplingConfig | None,
        prompt_keys: Sequence[int] | None,
        member_keys: Any,
        lengths: Any,
        on_event: OnEvent | None,
    ) -> Loop:
        sampling = sampling or SamplingConfig()
        if not isinstance(sampling, SamplingConfig):
            raise ConfigError(f"sampling must be a SamplingConfig, got {type(sampling).__name__}")
        if lengths is not None:
            raise ConfigError("lengths are for policy 'oracle', not available in this version; use forced_lengths")
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: RolloutEngine(model, tokenizer, ...)")
        groups = group_prompts(prompt_ids, num_generations, prompt_keys, member_keys)
        check_prompts(
            prompt_ids,
            vocab_size=self.runner.vocab_size,
            max_positions=self.runner.max_positions,
            max_new_tokens=sampling.max_new_tokens,
        )
        _check_forced_lengths(sampling, groups, self.config.policy)
        return Loop(self.runner, self.tokenizer, self.config, sampling, groups, on_event, self.reserved_bytes)

    def _run(self, loop: Loop) -> Iterator[Completion]:
        if not loop.groups_P:
            return
        with loop.timed("wall_seconds"), self.runner.attached(), loop.progress_bar(self.config.progress):
            try:
                loop.begin()
                while not loop.scheduler.done:
                    yield from loop.step()
                loop.end()
            finally:
                loop.pool.clear()


def _check_forced_lengths(sampling: SamplingConfig, groups: list[PromptGroup], policy: str) -> None:
    forced = sampling.forced_lengths
    if forced is None:
        return
    if policy == "dynamic-slot":
        raise ConfigError("forced_lengths do not go with policy 'dynamic-slot', which starts members past G")
    sizes, expected = [len(row) for row in forced], [group.num_generations for group in groups]
    if sizes != expected:
        raise ConfigError(f"forced_lengths must hold one length a member, {expected} by prompt; got {sizes}")
