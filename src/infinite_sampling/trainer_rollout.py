"""One rollout for a TRL trainer, in the engine's terms.

In: a trainer (its live model, its generation settings, the place of its rows). Out: a
`SamplingConfig`, groups with their keys, completions a row; or the reason why the engine or TRL cannot.
It knows nothing of rewards, losses, metrics or checkpoints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from trl.extras.profiling import profiling_context
from trl.models.utils import unwrap_model_for_generation

from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig
from infinite_sampling.engine import RolloutEngine, SlotEvent, unsupported_reason
from infinite_sampling.model_runner import base_model
from infinite_sampling.prompts import group_rows
from infinite_sampling.types import Completion, RolloutStats

_STOCK_GENERATE = GenerationMixin.generate

_READ_SETTINGS = {
    "max_new_tokens", "min_new_tokens", "do_sample", "eos_token_id", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "stop_strings",
}  # fmt: skip
_SETTINGS_WITHOUT_EFFECT = {
    # Tokens that never reach a completion here, and how `generate` stores, compiles and returns.
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "max_length", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "prefill_chunk_size", "disable_compile", "compile_config", "low_memory",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "transformers_version", "_from_model_config",
}  # fmt: skip
_NEUTRAL_SETTINGS = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "min_length": 0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "diversity_penalty": 0.0, "guidance_scale": 1.0,
}  # fmt: skip


_COUNTS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_generations",
    "num_generations_eval", "num_iterations", "generation_batch_size", "steps_per_generation", "max_completion_length",
)  # fmt: skip


def check_settings(args: Any) -> None:
    """Refuse settings that TRL's trainer takes and fails on later, or trains to nothing with.

    Raises ConfigError.
    """
    for name in _COUNTS:
        value = getattr(args, name)
        optional = name not in ("num_generations", "max_completion_length")
        if not (value is None and optional) and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
    for field in dataclasses.fields(args):
        if isinstance(value := getattr(args, field.name, None), float) and math.isnan(value):
            raise ConfigError(f"{field.name} must be a number, got {value!r}")
    if not 0 < args.temperature < math.inf:
        raise ConfigError(
            f"temperature must be a finite number above 0, got {args.temperature!r}: the loss divides by it; to "
            "train on greedy completions, set do_sample to false in generation_kwargs"
        )
    if not 0 <= args.learning_rate < math.inf:
        raise ConfigError(f"learning_rate must be a finite number of at least 0, got {args.learning_rate!r}")
    if not 0 <= args.seed < 2**32:
        raise ConfigError(f"seed must be at least 0 and below 2**32, got {args.seed!r}")


class TrainerSampler:
    """The engine over a trainer's live weights: built at the first rollout, then reused."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.engine: RolloutEngine | None = None

    def sample(
        self,
        trainer: Any,
        prompt_ids: Sequence[Sequence[int]],
        local_rows: Sequence[int],
        num_local_rows: int,
        seed: int,
        *,
        max_new_tokens: int | None = None,
        on_event: Callable[[SlotEvent], None] | None = None,
    ) -> tuple[list[Completion], RolloutStats, bool]:
        """One completion a row, in order; and whether `logprobs` are at the trainer's temperature.

        `local_rows` are the places of the rows among this process's `num_local_rows`.
        """
        group_size = trainer.num_generations if mode_of(trainer) == "train" else trainer.num_generations_eval
        start = trainer.accelerator.process_index * num_local_rows
        groups, members = group_rows(prompt_ids, [start + row for row in local_rows], group_size)
        with _live_model(trainer) as model:
            sampling = sampling_config(trainer, model, seed, max_new_tokens)
            rollout = self._engine(trainer, model).rollout(
                [group.prompt_ids for group in groups],
                num_generations=[group.num_generations for group in groups],
                sampling=sampling,
                prompt_keys=[group.prompt_key for group in groups],
                member_keys=[group.member_keys for group in groups],
                on_event=on_event,
            )
        comparable = (sampling.temperature or 1.0) == trainer.temperature
        completions = [rollout.completions[member.prompt_index][member.member_index] for member in members]
        return completions, rollout.stats, comparable

    def _engine(self, trainer: Any, model: Any) -> RolloutEngine:
        if self.engine is None or self.engine.model is not model:
            dtype = self.config.dtype
            if dtype == "auto":
                dtype = "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else "weights"
            self.engine = RolloutEngine(model, trainer._tokenizer, dataclasses.replace(self.config, dtype=dtype))
        self.engine.reserved_bytes = _bytes_before_the_first_step(trainer)
        return self.engine


def _bytes_before_the_first_step(trainer: Any) -> int:
    """What the first step will add to the memory held: gradients, and the two moments of Adam."""
    if trainer.optimizer is not None and trainer.optimizer.state:
        return 0
    return sum(3 * p.nbytes for p in trainer.model.parameters() if p.requires_grad)


@contextmanager
def _live_model(trainer: Any) -> Iterator[Any]:
    """The model that is being trained, unwrapped as TRL unwraps it to generate."""
    with (
        profiling_context(trainer, "infinite_sampling.rollout"),
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        yield model


@dataclass
class ToolRows:
    """The state of TRL's tool loop, from which the rows of a turn are known.

    TRL passes a turn the rows that called a tool, in order and without their numbers. They are the
    rows whose last message is a tool's answer; a row that ended on one has no room left.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    completions: list[list[dict[str, Any]]]
    max_completion_length: int
    turn: int = 1

    def waiting(self, expected: int) -> list[int]:
        """The local rows of this turn; their positions in it if they cannot be told."""
        rows = [
            i
            for i, (messages, ids) in enumerate(zip(self.completions, self.completion_ids, strict=True))
            if messages and messages[-1].get("role") == "tool" and len(ids) < self.max_completion_length
        ]
        # Positions name distinct streams too: the turn is in the seed.
        return rows if len(rows) == expected else list(range(expected))

    def room(self, prompt_ids: Sequence[Sequence[int]], local_rows: Sequence[int]) -> int:
        """Most tokens any row of this turn can keep: TRL cuts the rest off."""
        used = [len(ids) - len(self.prompt_ids[row]) for ids, row in zip(prompt_ids, local_rows, strict=True)]
        return max(1, self.max_completion_length - min(used))


def mode_of(trainer: Any) -> str:
    """Whether the trainer is in "train" or "eval", as TRL tells them apart."""
    return "train" if trainer.model.training else "eval"


def stream_seed(seed: int, mode: str, count: int, turn: int) -> int:
    """A 64-bit seed for one rollout, the same on every process and machine."""
    digest = hashlib.blake2b(f"{seed}/{mode}/{count}/{turn}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _generation_settings(trainer: Any, model: Any) -> dict[str, Any]:
    """What `generate` would go by: the trainer's settings over the model's own."""
    known, own = GenerationConfig().to_dict(), getattr(model, "generation_config", None)
    own = {name: value for name, value in own.to_diff_dict().items() if name in known} if own is not None else {}
    return own | {name: value for name, value in trainer.generation_kwargs.items() if value is not None}


def _unread_settings(settings: Mapping[str, Any]) -> list[str]:
    """The settings that would change a completion and that the engine does not read."""
    return sorted(
        name
        for name, value in settings.items()
        if name not in _READ_SETTINGS | _SETTINGS_WITHOUT_EFFECT
        and value is not None
        and value is not False
        and value != _NEUTRAL_SETTINGS.get(name)
    )


def sampling_config(trainer: Any, model: Any, seed: int, max_new_tokens: int | None) -> SamplingConfig:
    """The trainer's generation settings as the engine's, at most `max_new_tokens` long.

    Raises ConfigError for a value that cannot work.
    """
    settings = _generation_settings(trainer, model)
    eos = settings.get("eos_token_id")
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    limit, least = settings["max_new_tokens"], settings.get("min_new_tokens") or 0
    if max_new_tokens is not None:
        limit, least = min(limit, max_new_tokens), min(least, max_new_tokens)
    stop = settings.get("stop_strings") or ()
    return SamplingConfig(
        temperature=settings.get("temperature", 1.0) if settings.get("do_sample", True) else 0.0,
        top_k=settings.get("top_k"),
        top_p=settings.get("top_p", 1.0),
        min_p=settings.get("min_p"),
        repetition_penalty=settings.get("repetition_penalty", 1.0),
        max_new_tokens=limit,
        min_new_tokens=least,
        eos_token_ids=list(dict.fromkeys([*eos, *trainer.eos_token_ids])),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=seed,
    )


def fallback_reason(trainer: Any) -> str | None:
    """Why TRL's own path has to sample for this trainer, or None if the engine can."""
    if trainer.use_vllm:
        return "use_vllm is set"
    if trainer.use_transformers_continuous_batching:
        return "use_transformers_continuous_batching is set"
    if trainer._is_vlm:
        return "the processing class handles images"
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = base_model(model)
    if unread := _unread_settings(_generation_settings(trainer, base)):
        return f"the engine does not know the generation settings {', '.join(unread)}"
    if "generate" in vars(base) or type(base).generate is not _STOCK_GENERATE:
        return f"{type(base).__name__} has a `generate` of its own"
    if reason := unsupported_reason(model):
        return f"the engine cannot decode {type(base).__name__}: {reason}"
    return None
