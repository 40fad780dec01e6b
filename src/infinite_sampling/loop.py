"""The loop of one rollout: every running step, from refill to the members that end.

In: a model runner, configs and prompt groups. Out: `Completion`s, `RolloutStats`, and a `SlotEvent`
for whatever happens. A step is: make room in the KV pool, refill free slots, run the last token of
every running member through the model, sample one token for each, retire those that ended. Which
member goes where is the scheduler's decision; the loop knows nothing of rewards, trainers or files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig, parse_bytes
from infinite_sampling.device import empty_cache, free_memory_bytes, is_out_of_memory
from infinite_sampling.kv_pool import KVPool
from infinite_sampling.memory import (
    DEFAULT_NUM_SLOTS,
    BudgetError,
    KVShape,
    PoolPlan,
    format_bytes,
    member_tokens_held,
    plan_pool,
)
from infinite_sampling.model_runner import ModelRunner
from infinite_sampling.progress import RolloutProgress, wants_progress
from infinite_sampling.sampling import SampledTokens, Sampler
from infinite_sampling.scheduler import Scheduler, lower_bound_steps
from infinite_sampling.types import Completion, FinishReason, Member, PromptGroup, RolloutStats

logger = logging.getLogger(__name__)

RECOMPUTE_ROWS = 32
"""Tokens of a preempted member run at once when it comes back."""

FREE_MEMORY_SHARE = 0.5
"""Share of the device's free memory that KV may take where neither slots nor a budget are given."""

EventKind = Literal["start", "preempt", "finish", "drop", "step"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SlotEvent:
    """Something that happened in the loop, for progress bars, traces and run directories."""

    kind: EventKind
    """A member took a slot, left it for want of memory, ended, or was dropped; or a running step ended."""
    step: int
    """Running steps done before this one."""
    slot: int | None = None
    member: Member | None = None
    completion: Completion | None = None
    """The whole member, with kind `finish`."""
    num_active: int = 0
    """Slots that sampled a token, with kind `step`."""


OnEvent = Callable[[SlotEvent], None]


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


class Loop:
    """The state of one rollout."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        config: RolloutConfig,
        sampling: SamplingConfig,
        groups_P: list[PromptGroup],
        on_event: OnEvent | None,
        reserved_bytes: int = 0,
    ) -> None:
        self.runner, self.tokenizer, self.sampling, self.groups_P = runner, tokenizer, sampling, groups_P
        self.on_event = on_event
        sizes_P = [group.num_generations for group in groups_P]
        first: dict[tuple[int, ...], int] = {}
        contents_P = [first.setdefault(group.prompt_ids, p) for p, group in enumerate(groups_P)]
        prompt_tokens_P = [len(group.prompt_ids) for group in groups_P]
        self.stats = RolloutStats(policy=config.policy, num_prompts=len(groups_P), num_members=sum(sizes_P))
        plan = self._plan_pool(config, [prompt_tokens_P[p] for p in first.values()], sum(sizes_P), reserved_bytes)
        self.stats.num_slots = plan.num_slots
        max_tokens = member_tokens_held(sampling.max_new_tokens)
        self.pool = KVPool(plan.num_pages, plan.page_tokens, plan.num_slots, max_tokens)
        self.scheduler = Scheduler(
            sizes_P,
            plan.num_slots,
            config.policy,
            self.pool.pages,
            prompt_tokens_P,
            contents_P,
            sampling.max_new_tokens,
        )
        self.eos_token_ids = _eos_token_ids(runner.model, sampling)
        if sampling.min_new_tokens and set(range(runner.vocab_size)) <= set(self.eos_token_ids):
            raise ConfigError("min_new_tokens withholds EOS tokens, and every token of the vocabulary is one")
        self.sampler = Sampler(sampling, self.eos_token_ids, runner.vocab_size)
        self.running: dict[int, _Running] = {}
        self.preempted: dict[Member, _Running] = {}
        self.prompt_logits: dict[int, Tensor] = {}
        self.seen_SV: Tensor | None = None
        self.lengths: list[int] = []
        self.failure: Exception | None = None
        self._active_slot_steps = 0

    def _plan_pool(
        self, config: RolloutConfig, prompt_tokens: list[int], num_members: int, reserved_bytes: int
    ) -> PoolPlan:
        """The size of the KV pool. Raises BudgetError (a ConfigError) for a budget below one member."""
        dtype = str(self.runner.dtype).removeprefix("torch.")
        bytes_per_token = KVShape.of(self.runner.text_config).bytes_per_token(dtype)
        budget = None if config.kv_budget is None else parse_bytes(config.kv_budget)
        if budget is None and config.num_slots is None and config.policy == "fixed-slot":
            free = free_memory_bytes(self.runner.device) - reserved_bytes
            budget = max(int(FREE_MEMORY_SHARE * free), 1)
        slots = config.num_slots
        if config.kv_budget is None and slots is None:
            slots = DEFAULT_NUM_SLOTS
        if config.policy == "full":
            slots = num_members
        if config.policy == "dynamic-slot":
            num_members = max(num_members, slots or 1)
        self.stats.kv_budget_bytes = budget
        try:
            plan = plan_pool(
                prompt_tokens,
                num_members=num_members,
                max_new_tokens=self.sampling.max_new_tokens,
                num_slots=slots,
                budget_tokens=None if budget is None else budget // bytes_per_token,
                may_preempt=config.policy == "fixed-slot",
            )
        except BudgetError as error:
            raise error.in_bytes(budget or 0, bytes_per_token) from None
        if config.policy == "full" and plan.num_slots < num_members:
            raise ConfigError(
                f"policy 'full' decodes all {num_members} members at once, and a KV budget of {budget} bytes holds "
                f"{plan.num_slots}; use policy 'fixed-slot'"
            )
        return plan

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
        """Measure whether the run is deterministic, in as many rows as the device has memory for."""
        num_rows = self.scheduler.num_slots
        while num_rows:
            try:
                self.stats.deterministic = self.runner.is_deterministic(num_rows)
                return
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            num_rows //= 2

    def step(self) -> list[Completion]:
        """One running step; returns the members that ended in it.

        Raises FloatingPointError if the step before met NaN logits: what it finished is out by then.
        """
        if self.failure:
            raise self.failure
        with self.timed("schedule_seconds"):
            self._preempt(self.scheduler.make_room())
            started = self.scheduler.refill()
        for slot, member in started:
            self._start(slot, member)
        self.pool.pages.compact()
        ended = [end for slots, sampled in self._with_less_memory(self._next) for end in self._take(slots, sampled)]
        self._active_slot_steps += len(self.running)
        self._emit("step", num_active=len(self.running))
        completions = [self._finish(slot, reason) for slot, reason in ended if slot in self.running]
        self.stats.num_running_steps += 1
        return completions

    def _start(self, slot: int, member: Member) -> None:
        """Put a member into its slot: new, or with the tokens it had when it was preempted."""
        group, content = self.groups_P[member.prompt_index], self.scheduler.contents_P[member.prompt_index]
        known = self.preempted.pop(member, None)
        self.running[slot] = running = known or _Running(
            member, group.prompt_key, _member_key(group, member), self._limit(member)
        )
        self._emit("start", slot, member)
        if not self.pool.pages.prompts[content].is_written:
            with self.timed("prefill_seconds"):
                self._with_less_memory(lambda: self._prefill(slot, content, group.prompt_ids))
        if self.sampling.repetition_penalty != 1.0:
            self._mark_seen(slot, [*group.prompt_ids, *running.token_ids])
        if running.token_ids:
            with self.timed("decode_seconds"):
                self._with_less_memory(lambda: self._recompute(slot))

    def _prefill(self, slot: int, content: int, prompt_ids: Sequence[int]) -> None:
        if slot not in self.running:
            return
        self.prompt_logits[content] = self.runner.prefill(self.pool, content, prompt_ids)
        self.stats.num_prompt_tokens += len(prompt_ids)

    def _recompute(self, slot: int) -> None:
        """Write the KV of all tokens but the last again; the last is run with the step."""
        if slot not in self.running:
            return
        tokens = self.running[slot].token_ids[:-1]
        for start in range(0, len(tokens), RECOMPUTE_ROWS):
            piece = tokens[start : start + RECOMPUTE_ROWS]
            self.runner.forward(self.pool, piece, [slot] * len(piece), range(start, start + len(piece)))
        self.stats.num_recomputed_tokens += len(tokens)

    def _preempt(self, slots: list[int]) -> None:
        """Take the members out of `slots`, which the scheduler has freed, and keep their tokens."""
        for slot in slots:
            running = self.running.pop(slot)
            self.preempted[running.member] = running
            self.stats.num_preemptions += 1
            self._emit("preempt", slot, running.member)

    def _with_less_memory(self, work: Callable[[], Result]) -> Result:
        """Do `work`, with half of the running members while the device is out of memory.

        Raises the device's error, with the numbers, when one member alone does not fit.
        """
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if (num_running := len(self.running)) <= 1:
                    raise type(error)(
                        f"one member alone does not fit in the memory of {self.runner.device}, beside "
                        f"{format_bytes(self.pool.num_bytes)} of KV; lower kv_budget, or free memory: {error}"
                    ) from error
            empty_cache(self.runner.device)
            self._preempt(self.scheduler.limit_active(num_running // 2))
            logger.warning("out of memory on %s: going on with %d slots", self.runner.device, num_running // 2)

    def _limit(self, member: Member) -> int:
        forced = self.sampling.forced_lengths
        return forced[member.prompt_index][member.member_index] if forced else self.sampling.max_new_tokens

    def _next(self) -> list[tuple[list[int], SampledTokens]]:
        """The next token of every running member: of those that have tokens, then of the new ones."""
        slots, sampled = sorted(self.running), []
        if fed := [slot for slot in slots if self.running[slot].token_ids]:
            sampled.append((fed, self._sample(fed, self._decode(fed))))
        if fresh := [slot for slot in slots if not self.running[slot].token_ids]:
            sampled.append((fresh, self._sample(fresh, self._first_logits(fresh))))
        return sampled

    def _decode(self, slots: list[int]) -> Tensor:
        """Logits (r, V) after the last token of each slot."""
        with self.timed("decode_seconds"):
            tokens = [self.running[slot].token_ids for slot in slots]
            return self.runner.forward(self.pool, [t[-1] for t in tokens], slots, [len(t) - 1 for t in tokens])

    def _first_logits(self, slots: list[int]) -> Tensor:
        """Logits (r, V) of members that have no token yet: their prompt's."""
        contents_P = self.scheduler.contents_P
        return torch.stack([self.prompt_logits[contents_P[self.running[slot].member.prompt_index]] for slot in slots])

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
                self.failure = self.failure or FloatingPointError(
                    f"NaN logits at prompt {p}, member {m}, token {len(running.token_ids)} (running step "
                    f"{self.stats.num_running_steps}); check the weights, or compute in float32"
                )
                continue
            running.token_ids.append(token)
            running.logprobs.append(logprob)
            running.sampling_logprobs.append(sampling_logprob)
            self.scheduler.sampled(slot)
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
        """Whether the last token completes a stop string (each token is at least one byte of text)."""
        window = token_ids[-max(len(text.encode()) for text in self.sampling.stop) - 8 :]
        before, now = self.tokenizer.decode(window[:-1]), self.tokenizer.decode(window)
        return any(now.count(stop) > before.count(stop) for stop in self.sampling.stop)

    def _finish(self, slot: int, reason: FinishReason) -> Completion:
        running = self.running.pop(slot)
        for dropped in self.scheduler.finish(slot):
            loser = self.running.pop(dropped)
            self.stats.num_discarded_tokens += len(loser.token_ids)
            self._emit("drop", dropped, loser.member)
        self.prompt_logits = {p: held for p, held in self.prompt_logits.items() if p in self.pool.pages.prompts}
        completion = Completion(*running.member, running.token_ids, running.logprobs, running.sampling_logprobs, reason)
        self.lengths.append(completion.num_tokens)
        self._emit("finish", slot, running.member, completion)
        return completion

    def _mark_seen(self, slot: int, token_ids: Sequence[int]) -> None:
        """Let the member that took `slot` have these tokens behind it, and no others."""
        if self.seen_SV is None:
            shape = (self.scheduler.num_slots, self.runner.vocab_size)
            self.seen_SV = torch.zeros(shape, dtype=torch.bool, device=self.runner.device)
        self.seen_SV[slot] = False
        self.seen_SV[slot, torch.tensor(list(token_ids), device=self.runner.device)] = True

    def _emit(
        self,
        kind: EventKind,
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
        stats.lower_bound_steps = lower_bound_steps(self.lengths, stats.num_slots, self.pool.pages.num_tokens)
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
    """The tokens that end a completion: the sampling config's, else the model's generation config's.

    Raises ConfigError if they are no token ids.
    """
    eos = sampling.eos_token_ids
    if eos is None:
        generation_config = getattr(model, "generation_config", None)
        eos = getattr(generation_config, "eos_token_id", None)
        eos = eos if eos is not None else getattr(model.config.get_text_config(), "eos_token_id", None)
    tokens = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        raise ConfigError(f"the model's eos_token_id must be a token id or a list of them, got {eos!r}")
    return tuple(token for token in tokens if token >= 0)
