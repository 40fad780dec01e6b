"""`RolloutEngine`: the one loop that samples groups of completions.

In: prompts as token ids, G, a `SamplingConfig`. Out: `Completion`s, each exactly once, and
`RolloutStats`. A step is: refill free slots, run the last token of every running member through
the model, sample one token for each, retire those that ended. Policies differ only in the
scheduler; the engine knows nothing of rewards, trainers or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig
from infinite_sampling.kv_pool import KVPool
from infinite_sampling.model_runner import ModelRunner, UnsupportedModelError, unsupported_reason
from infinite_sampling.progress import RolloutProgress, wants_progress
from infinite_sampling.prompts import check_prompts, group_prompts
from infinite_sampling.sampling import SampledTokens, Sampler
from infinite_sampling.scheduler import Scheduler, lower_bound_steps
from infinite_sampling.types import Completion, FinishReason, Member, PromptGroup, Rollout, RolloutStats

__all__ = ["RolloutEngine", "SlotEvent", "UnsupportedModelError", "unsupported_reason"]

DEFAULT_NUM_SLOTS = 32


@dataclass(frozen=True, slots=True)
class SlotEvent:
    """Something that happened in the loop, for progress bars, traces and run directories."""

    kind: Literal["start", "finish", "drop", "step"]
    """A member took a slot, ended, or was dropped; or a running step ended."""
    step: int
    """Running steps done before this one."""
    slot: int | None = None
    member: Member | None = None
    completion: Completion | None = None
    """The whole member, with kind `finish`."""
    num_active: int = 0
    """Slots that sampled a token, with kind `step`."""


OnEvent = Callable[[SlotEvent], None]


class RolloutEngine:
    """Samples groups of completions from a causal LM with a bounded number of KV slots.

    Args:
        model: a transformers causal LM or a PEFT model around one; its live weights are used.
        tokenizer: needed for stop strings only.
        config: how to run; see `RolloutConfig`.

    Raises UnsupportedModelError (a ConfigError) for a model it cannot decode exactly.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, config: RolloutConfig | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or RolloutConfig()
        self.runner = ModelRunner(model, self.config)

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
    ) -> _Loop:
        sampling = sampling or SamplingConfig()
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
        return _Loop(self.runner, self.tokenizer, self.config, sampling, groups, on_event)

    def _run(self, loop: _Loop) -> Iterator[Completion]:
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


@dataclass(slots=True)
class _Running:
    """A member in a slot and what it has sampled so far."""

    member: Member
    prompt_key: int
    member_key: int
    limit_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)


class _Loop:
    """The state of one rollout."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        config: RolloutConfig,
        sampling: SamplingConfig,
        groups_P: list[PromptGroup],
        on_event: OnEvent | None,
    ) -> None:
        self.runner, self.tokenizer, self.sampling, self.groups_P = runner, tokenizer, sampling, groups_P
        self.on_event = on_event
        sizes_P = [group.num_generations for group in groups_P]
        num_slots = min(config.num_slots or DEFAULT_NUM_SLOTS, sum(sizes_P))
        if config.policy == "dynamic-slot":
            num_slots = config.num_slots or DEFAULT_NUM_SLOTS
        self.scheduler = Scheduler(sizes_P, num_slots, config.policy)
        self.eos_token_ids = _eos_token_ids(runner.model, sampling)
        self.sampler = Sampler(sampling, self.eos_token_ids, runner.vocab_size)
        self.pool = KVPool(self.scheduler.num_slots, sampling.max_new_tokens)
        self.running: dict[int, _Running] = {}
        self.prompt_logits: dict[int, Tensor] = {}
        self.seen_SV: Tensor | None = None
        self.lengths: list[int] = []
        self._active_slot_steps = 0
        self.stats = RolloutStats(
            policy=config.policy,
            num_slots=self.scheduler.num_slots,
            num_prompts=len(groups_P),
            num_members=sum(sizes_P),
        )

    @contextmanager
    def progress_bar(self, asked: bool) -> Iterator[None]:
        """Show a bar while the rollout runs, where asked for and on a terminal."""
        if not wants_progress(asked):
            yield
            return
        observer = self.on_event
        with RolloutProgress(self.stats.num_members) as bar:

            def both(event: SlotEvent) -> None:
                bar(event)
                if observer:
                    observer(event)

            self.on_event = both
            yield

    def begin(self) -> None:
        """Measure whether the run is deterministic."""
        self.stats.deterministic = self.runner.is_deterministic(self.scheduler.num_slots)

    def step(self) -> list[Completion]:
        """One running step; returns the members that ended in it."""
        with self.timed("schedule_seconds"):
            started = self.scheduler.refill()
        for slot, member in started:
            self._start(slot, member)
        self.pool.pages.compact()
        fed = [slot for slot in sorted(self.running) if self.running[slot].token_ids]
        fresh = [slot for slot, _ in started]
        ended = self._take(fed, self._sample(fed, self._decode(fed))) if fed else []
        ended += self._take(fresh, self._sample(fresh, self._first_logits(fresh))) if fresh else []
        self._active_slot_steps += len(self.running)
        self._emit("step", num_active=len(self.running))
        completions = [self._finish(slot, reason) for slot, reason in ended if slot in self.running]
        self.stats.num_running_steps += 1
        return completions

    def _start(self, slot: int, member: Member) -> None:
        group = self.groups_P[member.prompt_index]
        if member.prompt_index not in self.pool.prompts:
            with self.timed("prefill_seconds"):
                prompt, logits = self.runner.prefill(group.prompt_ids)
            self.pool.prompts[member.prompt_index] = prompt
            self.prompt_logits[member.prompt_index] = logits
            self.stats.num_prompt_tokens += prompt.num_tokens
            self.pool.note_peak()
        self.pool.admit(slot, member.prompt_index)
        self.running[slot] = _Running(member, group.prompt_key, _member_key(group, member), self._limit(member))
        if self.sampling.repetition_penalty != 1.0:
            self._mark_seen(slot, group.prompt_ids)
        self._emit("start", slot, member)

    def _limit(self, member: Member) -> int:
        forced = self.sampling.forced_lengths
        return forced[member.prompt_index][member.member_index] if forced else self.sampling.max_new_tokens

    def _decode(self, slots: list[int]) -> Tensor:
        """Logits (r, V) after the last token of each slot."""
        with self.timed("decode_seconds"):
            running = [self.running[slot] for slot in slots]
            tokens = [r.token_ids[-1] for r in running]
            logits = self.runner.forward(self.pool, tokens, slots, [len(r.token_ids) - 1 for r in running])
            self.pool.note_peak()
            return logits

    def _first_logits(self, slots: list[int]) -> Tensor:
        """Logits (r, V) of members that have no token yet: their prompt's."""
        return torch.stack([self.prompt_logits[self.running[slot].member.prompt_index] for slot in slots])

    def _sample(self, slots: list[int], logits: Tensor) -> SampledTokens:
        with self.timed("sample_seconds"):
            running = [self.running[slot] for slot in slots]
            columns = [
                [r.prompt_key for r in running],
                [r.member_key for r in running],
                [len(r.token_ids) for r in running],
            ]
            prompt_keys, member_keys, positions = torch.tensor(columns, dtype=torch.int64, device=logits.device)
            seen = None if self.seen_SV is None else self.seen_SV[slots]
            return self.sampler.sample(logits, prompt_keys, member_keys, positions, seen)

    def _take(self, slots: list[int], sampled: SampledTokens) -> list[tuple[int, FinishReason]]:
        """Append one sampled token to each slot's member; returns those that end with it."""
        with self.timed("sample_seconds"):
            rows = zip(
                slots,
                sampled.token_ids.tolist(),
                sampled.logprobs.tolist(),
                sampled.sampling_logprobs.tolist(),
                strict=True,
            )
        if self.seen_SV is not None:
            self.seen_SV[slots, sampled.token_ids] = True
        ended = []
        for slot, token, logprob, sampling_logprob in rows:
            running = self.running[slot]
            if logprob != logprob:
                p, m = running.member
                raise FloatingPointError(
                    f"NaN logits at prompt {p}, member {m}, token {len(running.token_ids)} (running step "
                    f"{self.stats.num_running_steps}); check the weights, or compute in float32"
                )
            running.token_ids.append(token)
            running.logprobs.append(logprob)
            running.sampling_logprobs.append(sampling_logprob)
            if reason := self._finish_reason(running):
                ended.append((slot, reason))
        return ended

    def _finish_reason(self, running: _Running) -> FinishReason | None:
        length, sampling = len(running.token_ids), self.sampling
        may_end = not (sampling.ignore_eos or sampling.forced_lengths) and length >= sampling.min_new_tokens
        if may_end and running.token_ids[-1] in self.eos_token_ids:
            return FinishReason.EOS
        if may_end and sampling.stop and self._has_stop(running.token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= running.limit_tokens else None

    def _has_stop(self, token_ids: list[int]) -> bool:
        """Whether the text of the last tokens contains a stop string (each token is >= 1 byte)."""
        window = max(len(text.encode()) for text in self.sampling.stop) + 8
        text = self.tokenizer.decode(token_ids[-window:])
        return any(stop in text for stop in self.sampling.stop)

    def _finish(self, slot: int, reason: FinishReason) -> Completion:
        running = self._release(slot)
        for dropped in self.scheduler.finish(slot):
            loser = self._release(dropped)
            self.stats.num_discarded_tokens += len(loser.token_ids)
            self._emit("drop", dropped, loser.member)
        completion = Completion(*running.member, running.token_ids, running.logprobs, running.sampling_logprobs, reason)
        self.lengths.append(completion.num_tokens)
        self._emit("finish", slot, running.member, completion)
        return completion

    def _release(self, slot: int) -> _Running:
        running = self.running.pop(slot)
        p = running.member.prompt_index
        finished = self.scheduler.num_finished_P[p] + 1
        last = not any(other.member.prompt_index == p for other in self.running.values())
        self.pool.release(slot, keep_prompt=not last or finished < self.groups_P[p].num_generations)
        if p not in self.pool.prompts:
            self.prompt_logits.pop(p, None)
        return running

    def _mark_seen(self, slot: int, prompt_ids: Sequence[int]) -> None:
        """Let the member that took `slot` start from its prompt's tokens alone."""
        if self.seen_SV is None:
            shape = (self.scheduler.num_slots, self.runner.vocab_size)
            self.seen_SV = torch.zeros(shape, dtype=torch.bool, device=self.runner.device)
        self.seen_SV[slot] = False
        self.seen_SV[slot, torch.tensor(list(prompt_ids), device=self.runner.device)] = True

    def _emit(
        self,
        kind: Literal["start", "finish", "drop", "step"],
        slot: int | None = None,
        member: Member | None = None,
        completion: Completion | None = None,
        num_active: int = 0,
    ) -> None:
        if self.on_event:
            self.on_event(SlotEvent(kind, self.stats.num_running_steps, slot, member, completion, num_active))

    def end(self) -> None:
        """Settle the counts that need the whole rollout."""
        stats, steps = self.stats, max(self.stats.num_running_steps, 1)
        stats.num_tokens = sum(self.lengths)
        stats.lower_bound_steps = lower_bound_steps(self.lengths, stats.num_slots)
        stats.mean_active_slots = self._active_slot_steps / steps
        stats.occupancy = stats.mean_active_slots / stats.num_slots
        stats.peak_kv_bytes = self.pool.peak_bytes

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `stats.<name>`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.stats, name, getattr(self.stats, name) + time.perf_counter() - begun)


def _member_key(group: PromptGroup, member: Member) -> int:
    """The stream of a member; `dynamic-slot` starts members past G, on keys past the largest."""
    extra = member.member_index - group.num_generations
    return group.member_keys[member.member_index] if extra < 0 else max(group.member_keys) + 1 + extra


def _eos_token_ids(model: Any, sampling: SamplingConfig) -> tuple[int, ...]:
    """The tokens that end a completion: the sampling config's, else the model's generation config's."""
    eos = sampling.eos_token_ids
    if eos is None:
        generation_config = getattr(model, "generation_config", None)
        eos = getattr(generation_config, "eos_token_id", None)
        eos = eos if eos is not None else getattr(model.config.get_text_config(), "eos_token_id", None)
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _check_forced_lengths(sampling: SamplingConfig, groups: list[PromptGroup], policy: str) -> None:
    forced = sampling.forced_lengths
    if forced is None:
        return
    if policy == "dynamic-slot":
        raise ConfigError("forced_lengths do not go with policy 'dynamic-slot', which starts members past G")
    sizes, expected = [len(row) for row in forced], [group.num_generations for group in groups]
    if sizes != expected:
        raise ConfigError(f"forced_lengths must hold one length a member, {expected} by prompt; got {sizes}")
