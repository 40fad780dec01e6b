"""The engine inside TRL: `InfiniteGRPOTrainer`, `InfiniteGRPOConfig` and `make_rollout_func`.

In: a TRL script. Out: the same training, its completions sampled by `RolloutEngine`. Only the step
from prompt ids to completion ids is replaced: templates, tools, rewards, loss and logging stay
TRL's. It knows nothing of how the engine decodes, and no settings are validated here.

A completion is named by its place, never by its tokens: its seed comes from (run seed, train or
eval, number of rollouts before it, tool turn), its prompt key is the global row // G and its
member key the global row % G. What the engine cannot do goes to TRL's own path, with one warning.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from infinite_sampling.config import ConfigError, RolloutConfig
from infinite_sampling.engine import SlotEvent
from infinite_sampling.trainer_rollout import (
    ToolRows,
    TrainerSampler,
    check_settings,
    fallback_reason,
    mode_of,
    sampling_config,
    stream_seed,
)
from infinite_sampling.types import RolloutStats

EventCallback = Callable[[SlotEvent, int], None]
"""Called with each event of a rollout as it happens and the trainer's global step."""

STATE_FILE = "rollout_state.json"
"""In every checkpoint: how many rollouts there were, for training and for evaluation."""

_EXPECTED_PARAMETERS = {
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    "_tool_call_loop": ("prompts", "prompt_ids", "completion_ids", "completions"),
    "_generate_and_score_completions": ("inputs",),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
    "_compute_loss": ("model", "inputs"),
    "_tokenize_prompts": ("prompts",),
}
"""What this file overrides or calls of TRL's trainer: the leading parameters, all of the first."""


@dataclass
class InfiniteGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` and the fields of `RolloutConfig`, each with `rollout_` before its name.

    Raises ConfigError at construction for a setting that cannot work.
    """

    rollout_policy: str = field(
        default="fixed-slot",
        metadata={
            "help": "Which member is decoded when: `full` (all at once), `micro` (micro groups one after another), "
            "`fixed-slot` (a freed slot takes the next member) or `dynamic-slot` (biased to short completions; "
            "needs rollout_allow_biased)."
        },
    )
    rollout_num_slots: int | None = field(
        default=None,
        metadata={
            "help": "Most completions decoded at once by a process; the default is 32, and with rollout_kv_budget 256. "
            "Ignored by `full`."
        },
    )
    rollout_kv_budget: int | str | None = field(
        default=None,
        metadata={
            "help": "Most bytes of KV held by a process: a number or text such as '2GiB'. With neither this nor "
            "rollout_num_slots, at most half of the free memory."
        },
    )
    rollout_dtype: str = field(
        default="auto",
        metadata={
            "help": "Dtype that completions are sampled in: `auto` (bfloat16 with bf16, float16 with fp16, else that "
            "of the weights), `weights`, `float32`, `bfloat16` or `float16`."
        },
    )
    rollout_prefill_chunk_tokens: int = field(
        default=512, metadata={"help": "Prompt tokens run through the model at once: bounds a long prompt's memory."}
    )
    rollout_progress: bool = field(
        default=False, metadata={"help": "Show a progress bar while a rollout runs (only on a terminal)."}
    )
    rollout_allow_biased: bool = field(
        default=False,
        metadata={"help": "Train with policy `dynamic-slot` although it keeps the members that end first."},
    )
    rollout_logprob_gap: bool = field(
        default=True,
        metadata={
            "help": "Log rollout/max_logprob_gap, the largest difference between the engine's log-probability of a "
            "token and the trainer's own forward before the weights change. Costs no forward."
        },
    )
    rollout_return_logprobs: bool = field(
        default=False,
        metadata={
            "help": "Give TRL the log-probabilities of the distribution drawn from. TRL 1.16 then bases its "
            "off-policy mask on them; its importance sampling correction needs vLLM."
        },
    )

    def __post_init__(self) -> None:
        check_settings(self)
        super().__post_init__()
        config = self.rollout_config()
        if config.policy == "dynamic-slot" and not self.rollout_allow_biased:
            raise ConfigError(
                "rollout_policy 'dynamic-slot' keeps the members that end first, so training favours short "
                "completions; use 'fixed-slot', or set rollout_allow_biased=True to study the effect"
            )

    def rollout_config(self) -> RolloutConfig:
        """The `rollout_*` fields that say how a rollout is run."""
        names = [f.name for f in dataclasses.fields(RolloutConfig)]
        return RolloutConfig(**{name: getattr(self, f"rollout_{name}") for name in names})


@dataclass
class RolloutTotals:
    """What the rollouts of one mode have come to since the trainer was made, over all processes."""

    running_steps: int = 0
    """Of the process that took the most, summed over rollouts; lower bounds and seconds alike."""
    lower_bound_steps: int = 0
    num_tokens: int = 0
    """Of all processes."""
    wall_seconds: float = 0.0
    peak_kv_bytes: int = 0
    """The most that any process held at any time."""
    kv_budget_bytes: int | None = None
    """The bound on it of this process in the last rollout; None where slots bounded it."""
    max_logprob_gap: float | None = None
    """The largest rollout/max_logprob_gap; None where none was measured."""

    @property
    def tokens_per_second(self) -> float | None:
        """Sampled tokens of all processes by the time that sampling took; None before any rollout."""
        return self.num_tokens / self.wall_seconds if self.wall_seconds else None


class InfiniteGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer`, its completions sampled by `RolloutEngine` with the live weights.

    Args:
        *args, **kwargs: as `trl.GRPOTrainer`; `args` may be a plain `GRPOConfig`.
        event_callback: called with each `SlotEvent` as it happens and the global step; those of
            kind `finish` hold the completion, its indices those of the engine's call.

    Logs beside TRL's metrics: rollout/peak_kv_bytes, running_steps, lower_bound_steps, occupancy,
    tokens_per_second (of all processes) and max_logprob_gap. TRL logs the mean since its last log;
    peak_kv_bytes and max_logprob_gap are the largest since then. `rollout_totals` holds the
    `RolloutTotals` of "train" and "eval", whatever is logged.

    Raises ConfigError under FSDP and DeepSpeed ZeRO-3 and for a version of TRL it does not know.
    """

    _rollout_rows: ToolRows | None = None
    _rollout_sources: Mapping[str, Any] | None = None
    _rollout_warned = False

    def __init__(self, *args: Any, event_callback: EventCallback | None = None, **kwargs: Any) -> None:
        check_trl(GRPOTrainer)
        super().__init__(*args, **kwargs)
        check_settings(self.args)
        self.event_callback = event_callback
        config = self.args.rollout_config() if isinstance(self.args, InfiniteGRPOConfig) else RolloutConfig()
        self._rollout_sampler = TrainerSampler(config)
        self._rollout_counts = {"train": 0, "eval": 0}
        self._rollout_turns: list[RolloutStats] = []
        self._rollout_logprobs: list[list[float]] | None = None
        self._rollout_global_step = {"train": -1, "eval": -1}
        self.rollout_totals = {"train": RolloutTotals(), "eval": RolloutTotals()}
        if not self._falls_back(images=None):
            _refuse_sharding(self)
            sampling_config(self, self.model, seed=0, max_new_tokens=None)  # so that a wrong value fails here

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Completions of rows of prompt ids, in order; logprobs None unless `rollout_return_logprobs`."""
        rows = self._rollout_rows
        mode = mode_of(self)
        if rows is None:
            self._rollout_turns, self._rollout_logprobs = [], None
            self._rollout_counts[mode] += 1
            local_rows, num_rows, turn = list(range(len(prompt_ids))), len(prompt_ids), 0
        else:
            local_rows, num_rows, turn = rows.waiting(len(prompt_ids)), len(rows.completion_ids), rows.turn
            rows.turn += 1
        if self._falls_back(images):
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        completions, stats, comparable = self._rollout_sampler.sample(
            self,
            prompt_ids,
            local_rows,
            num_rows,
            stream_seed(self.args.seed, mode, self._rollout_counts[mode] - 1, turn),
            max_new_tokens=None if rows is None else rows.room(prompt_ids, local_rows),
            on_event=self._on_event,
        )
        self._rollout_turns.append(stats)
        if rows is None and comparable and getattr(self.args, "rollout_logprob_gap", True):
            self._rollout_logprobs = [completion.logprobs for completion in completions]
        asked = getattr(self.args, "rollout_return_logprobs", False)
        logprobs = [completion.sampling_logprobs for completion in completions] if asked else None
        return [completion.token_ids for completion in completions], logprobs

    def _on_event(self, event: SlotEvent) -> None:
        if self.event_callback is not None:
            self.event_callback(event, self.state.global_step)

    def _falls_back(self, images: Any) -> bool:
        """Whether TRL's own path has to sample; the first time, say so and why."""
        reason = "the prompts hold images" if images is not None else fallback_reason(self)
        if reason and not self._rollout_warned:
            self._rollout_warned = True
            warnings.warn(
                f"infinite-sampling: completions come from TRL's own generation, because {reason}", stacklevel=3
            )
        return reason is not None

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        assert self.max_completion_length is not None  # TRL's loop compares with it
        self._rollout_rows = ToolRows(prompt_ids, completion_ids, completions, self.max_completion_length)
        try:
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest, **kwargs)
        finally:
            self._rollout_rows = None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        mode = mode_of(self)
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._rollout_global_step[mode] = self.state.global_step
        if self._rollout_turns:
            self._log_rollout(mode, self._rollout_turns)
        if self._rollout_logprobs is not None:
            # Beside the completions, so that TRL shuffles and splits both alike. NaN: nothing to compare.
            output["rollout_logprobs"] = _padded(self._rollout_logprobs, output["completion_ids"])
        self._rollout_turns, self._rollout_logprobs = [], None
        return output

    def _log_rollout(self, mode: str, turns: list[RolloutStats]) -> None:
        steps = sum(stats.num_running_steps for stats in turns)
        seconds = sum(stats.wall_seconds for stats in turns)
        local = {
            "peak_kv_bytes": max(stats.peak_kv_bytes for stats in turns),
            "running_steps": steps,
            "lower_bound_steps": sum(stats.lower_bound_steps for stats in turns),
            "occupancy": sum(stats.occupancy * stats.num_running_steps for stats in turns) / max(steps, 1),
            "tokens_per_second": sum(stats.num_tokens for stats in turns) / max(seconds, 1e-9),
            "num_tokens": sum(stats.num_tokens for stats in turns),
            "wall_seconds": seconds,
        }
        values = torch.tensor([list(local.values())], dtype=torch.float64, device=self.accelerator.device)
        gathered = self.accelerator.gather(values)
        reduced = dict(zip(local, gathered.amax(dim=0).tolist(), strict=True))
        reduced["occupancy"] = gathered[:, 3].mean().item()
        reduced["tokens_per_second"] = gathered[:, 4].sum().item()
        totals = self.rollout_totals[mode]
        totals.running_steps += int(reduced["running_steps"])
        totals.lower_bound_steps += int(reduced["lower_bound_steps"])
        totals.num_tokens += int(gathered[:, 5].sum().item())
        totals.wall_seconds += reduced["wall_seconds"]
        totals.peak_kv_bytes = max(totals.peak_kv_bytes, int(reduced["peak_kv_bytes"]))
        totals.kv_budget_bytes = self._rollout_turns[-1].kv_budget_bytes
        del reduced["num_tokens"], reduced["wall_seconds"]
        self._keep_largest(mode, "rollout/peak_kv_bytes", reduced.pop("peak_kv_bytes"))
        for name, value in reduced.items():
            self._metrics[mode][f"rollout/{name}"].append(value)

    def _keep_largest(self, mode: str, name: str, value: float) -> None:
        # TRL logs the mean of the list: keep one entry, the largest since the last log.
        values = self._metrics[mode][name]
        values[:] = [max([*values, value])]

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        # Only before an optimizer step is the trainer's forward of the weights that were sampled from. By mode:
        # an evaluation between two steps of one batch samples from weights that the batch does not know.
        fresh = self.state.global_step == self._rollout_global_step[mode_of(self)] and "rollout_logprobs" in inputs
        self._rollout_sources = inputs if fresh else None
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._rollout_sources = None

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._rollout_sources is not None:
            inputs, self._rollout_sources = self._rollout_sources, None
            self._log_gap(inputs, result[0].detach())
        return result

    def _log_gap(self, inputs: Mapping[str, Any], trainer_logprobs: Tensor) -> None:
        difference = (inputs["rollout_logprobs"] - trainer_logprobs.float()).abs()
        known = inputs["completion_mask"].bool() & ~inputs["rollout_logprobs"].isnan()
        gap = difference[known].max() if known.any() else difference.new_zeros(())
        mode, value = mode_of(self), self.accelerator.gather(gap[None]).max().item()
        self._keep_largest(mode, "rollout/max_logprob_gap", value)
        totals = self.rollout_totals[mode]
        totals.max_logprob_gap = max(value, totals.max_logprob_gap or 0.0)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            with open(os.path.join(output_dir, STATE_FILE), "w") as file:
                json.dump(self._rollout_counts, file)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = os.path.join(checkpoint or "", STATE_FILE)
        if checkpoint is not None and os.path.isfile(path):
            with open(path) as file:
                self._rollout_counts = {mode: int(count) for mode, count in json.load(file).items()}


def make_rollout_func(
    config: RolloutConfig | None = None,
    *,
    return_logprobs: bool = False,
    event_callback: EventCallback | None = None,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func` for TRL's plain `GRPOTrainer` that samples with the engine.

    Later tool turns bypass it (TRL generates them itself), and no metrics are added. Streams are
    named by (global step, rollouts at that step), so that resuming needs no state of ours. With
    `return_logprobs` TRL gets those of the distribution drawn from, else None.

    Raises ConfigError at the first call for a model or a setting the engine does not know.
    """
    sampler = TrainerSampler(config or RolloutConfig())
    at_step: dict[str, tuple[int, int]] = {}

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        check_trl(GRPOTrainer)
        if reason := fallback_reason(trainer):
            raise ConfigError(f"the rollout function cannot sample, because {reason}; leave rollout_func out")
        _refuse_sharding(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ConfigError("the rollout function takes text prompts only, got images; leave rollout_func out")
        mode, step = mode_of(trainer), trainer.state.global_step
        last_step, count = at_step.get(mode, (step, -1))
        at_step[mode] = (step, count + 1 if last_step == step else 0)
        completions, _, _ = sampler.sample(
            trainer,
            prompt_ids,
            list(range(len(prompt_ids))),
            len(prompt_ids),
            stream_seed(trainer.args.seed, f"{mode} step", *at_step[mode]),
            on_event=lambda event: event_callback(event, step) if event_callback else None,
        )
        logprobs = [completion.sampling_logprobs for completion in completions] if return_logprobs else None
        token_ids = [completion.token_ids for completion in completions]
        return {"prompt_ids": prompt_ids, "completion_ids": token_ids, "logprobs": logprobs}

    return rollout_func


def check_trl(trainer_class: type[GRPOTrainer]) -> None:
    """Raise ConfigError if TRL's trainer lacks the methods this file builds on."""
    for name, expected in _EXPECTED_PARAMETERS.items():
        method = getattr(trainer_class, name, None)
        got = tuple(inspect.signature(method).parameters)[1:] if method else ()
        whole = name == "_generate_single_turn"
        if (got if whole else got[: len(expected)]) != expected:
            raise ConfigError(
                f"expected {trainer_class.__name__}.{name}({', '.join(expected)}{'' if whole else ', ...'}) as in trl "
                f"1.16, got ({', '.join(got)}) in trl {trl.__version__}; install trl 1.16, or a version of "
                "infinite-sampling made for yours"
            )


def _refuse_sharding(trainer: Any) -> None:
    if trainer._dist.is_fsdp or trainer._dist.is_zero3:
        kind = "FSDP" if trainer._dist.is_fsdp else "DeepSpeed ZeRO-3"
        raise ConfigError(
            f"expected whole weights on every process, got {kind}: processes decode different numbers of steps and "
            "would wait for each other's shards forever; use DDP or ZeRO-2, or trl.GRPOTrainer"
        )


def _padded(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Rows as a float32 tensor of the shape of `like`, NaN where a row has ended."""
    padded = torch.full(like.shape, float("nan"), dtype=torch.float32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.tensor(row, dtype=torch.float32)
    return padded.to(like.device)
