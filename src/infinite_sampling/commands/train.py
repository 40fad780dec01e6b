"""`infinite-sampling train`: GRPO with TRL on a task with a verifier, sampled by the engine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer import TRAINER_STATE_NAME

from infinite_sampling.commands.arguments import SourceArguments, default_output_folder, parse
from infinite_sampling.config import ConfigError
from infinite_sampling.engine import SlotEvent
from infinite_sampling.memory import format_bytes
from infinite_sampling.models import load_model, load_tokenizer
from infinite_sampling.prompts import check_prompts, encode_prompts
from infinite_sampling.run_directory import RunDirectory
from infinite_sampling.tasks import reward_for
from infinite_sampling.trl import STATE_FILE, InfiniteGRPOConfig, InfiniteGRPOTrainer

Say = Callable[[str], None]

DESCRIPTION = "Train with GRPO: TRL's trainer and settings, completions from the engine."


@dataclass
class TrainConfig(InfiniteGRPOConfig):
    """TRL's and the engine's settings; a new output folder below runs/, every step logged."""

    output_dir: str | None = field(
        default=None, metadata={"help": "Run directory and checkpoints; default: a new one below runs/."}
    )

    logging_steps: float = field(default=1, metadata={"help": "Log every so many steps (below 1: that share of all)."})

    def __post_init__(self) -> None:
        if self.output_dir is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("several processes need one output folder, each would name its own: give --output_dir")
        self.output_dir = self.output_dir or default_output_folder("train")
        if self.bf16 is None and not torch.cuda.is_available():
            self.bf16 = False  # TRL's default of bfloat16 is refused, or emulated, without a GPU
        super().__post_init__()


@dataclass
class TrainArguments:
    """Flags of the command beside those of model, data and TRL."""

    reward: str | None = field(
        default=None,
        metadata={"help": "`math` (math-verify) or module:function; default: the task's own verifier."},
    )
    weights_dtype: str = field(default="float32", metadata={"help": "Dtype the weights are loaded and trained in."})
    lora_r: int = field(
        default=0, metadata={"help": "Rank of a LoRA adapter on all linear layers; 0 trains all weights."}
    )
    eval_size: int = field(default=0, metadata={"help": "Hold this many prompts out, for TRL's evaluation settings."})
    no_progress: bool = field(default=False, metadata={"help": "No progress bar on a terminal."})
    json: bool = field(default=False, metadata={"help": "End standard output with one JSON object."})


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    kinds = [TrainArguments, SourceArguments, TrainConfig]
    arguments, source, config = parse(kinds, argv, program, DESCRIPTION)
    _settle(arguments, config)
    say = _say(arguments.json)
    checkpoint = _checkpoint(config, say)
    settings = {**config.to_dict(), **dataclasses.asdict(arguments), **dataclasses.asdict(source)}
    with RunDirectory(
        config.output_dir,
        command="train",
        config=settings,
        seed=config.seed,
        resume=checkpoint is not None and checkpoint.parent == Path(config.output_dir).resolve(),
        process_index=config.process_index,
    ) as directory:
        try:
            _train(arguments, source, config, checkpoint, directory, say)
        except ValueError as error:
            if directory.begun:
                raise
            raise ConfigError(str(error)) from error  # a setting that TRL or torch refuses
    return 0


def _train(
    arguments: TrainArguments,
    source: SourceArguments,
    config: TrainConfig,
    checkpoint: Path | None,
    directory: RunDirectory,
    say: Say,
) -> None:
    names: Any = {"revision": source.model_revision, "trust_remote_code": config.trust_remote_code}
    tokenizer = load_tokenizer(source.model, **names)
    directory.decode = lambda ids: str(tokenizer.decode(ids))
    task = source.load_task(config.seed, tokenizer)
    reward = reward_for(task, arguments.reward)
    prompt_ids = encode_prompts(list(task.dataset["prompt"]), tokenizer)
    model = load_model(source.model, dtype=arguments.weights_dtype, **names)
    check_prompts(
        prompt_ids,
        vocab_size=model.config.get_text_config().vocab_size,
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        max_new_tokens=config.max_completion_length or 1,
        setting="max_completion_length",
    )
    train_set, eval_set = _split(task.dataset, arguments.eval_size)
    report = TrainReport(directory, say)
    trainer = InfiniteGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        peft_config=_lora(arguments.lora_r),
        callbacks=[report],
        event_callback=report.on_event,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    final = os.path.join(str(config.output_dir), "final")
    trainer.save_model(final)
    summary = report.summary(trainer, final, getattr(reward, "num_errors", 0))
    if trainer.is_world_process_zero():
        say(_describe(summary))
        if arguments.json:
            print(json.dumps(summary))


def _settle(arguments: TrainArguments, config: TrainConfig) -> None:
    """Settings that belong to this command rather than to TRL's defaults."""
    config.rollout_progress = not arguments.no_progress and config.process_index == 0
    config.disable_tqdm = True
    config.dataloader_pin_memory = config.dataloader_pin_memory and torch.cuda.is_available()
    if config.report_to in (None, "none", [], "all", ["all"]):
        config.report_to = []
    known = get_available_reporting_integrations()
    for name in [config.report_to] if isinstance(config.report_to, str) else config.report_to:
        if name not in known:
            raise ConfigError(
                f"report_to must name trackers that are installed ({', '.join(known) or 'there is none'}) or be none, "
                f"got {name!r}"
            )
    if arguments.lora_r < 0:
        raise ConfigError(f"lora_r must be 0 or more, got {arguments.lora_r}")


def _checkpoint(config: TrainConfig, say: Say) -> Path | None:
    """The checkpoint to go on from; `true` means the last whole one in the output folder. Raises ConfigError."""
    asked, folder = config.resume_from_checkpoint, Path(str(config.output_dir))
    if asked is None or str(asked).lower() in ("", "false"):
        return None
    if str(asked).lower() != "true":
        if problem := _checkpoint_problem(Path(asked)):
            raise ConfigError(
                "resume_from_checkpoint must be a folder checkpoint-<step> that a training saved, "
                f"got {str(asked)!r}: {problem}"
            )
        return Path(asked).resolve()
    steps = [int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-[0-9]*") if path.is_dir()]
    problems: list[str] = []
    for path in (folder / f"checkpoint-{step}" for step in sorted(steps, reverse=True)):
        problem = _checkpoint_problem(path)
        if problem is None:
            if problems and config.process_index == 0:
                say(f"resuming from {path}, the last whole checkpoint ({'; '.join(problems)})")
            return path.resolve()
        problems.append(f"{path.name}: {problem}")
    raise ConfigError(
        f"no checkpoint to resume from in the output folder {folder}; name one, or its output_dir"
        + (f" ({'; '.join(problems)})" if problems else "")
    )


def _checkpoint_problem(checkpoint: Path) -> str | None:
    """Why a training cannot go on from this folder; None if it can. The state is what the trainer writes last."""
    for name in (TRAINER_STATE_NAME, STATE_FILE):
        path = checkpoint / name
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return f"{name} is cut short"
        except OSError as error:
            if name == TRAINER_STATE_NAME or not isinstance(error, FileNotFoundError):
                return f"no {name} can be read there ({error.strerror})"
    return None


def _split(dataset: Any, eval_size: int) -> tuple[Any, Any]:
    if not eval_size:
        return dataset, None
    if not 0 < eval_size < len(dataset):
        raise ConfigError(f"eval_size must leave prompts to train on: got {eval_size} of {len(dataset)}")
    rest = len(dataset) - eval_size
    return dataset.select(range(rest)), dataset.select(range(rest, len(dataset)))


def _lora(rank: int) -> Any:
    if not rank:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("lora_r needs the package peft: pip install 'infinite-sampling[peft]'") from error
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _say(as_json: bool) -> Say:
    """Print for people: to standard error where standard output is for the JSON object."""
    stream = sys.stderr if as_json else sys.stdout
    return lambda text: print(text, file=stream, flush=True)


class TrainReport(TrainerCallback):
    """Writes the run directory while training, one line a logged step, and the closing summary."""

    def __init__(self, directory: RunDirectory, say: Say) -> None:
        self.directory, self.say = directory, say
        self.logs: list[dict[str, Any]] = []
        self._begun = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the run, now that every setting has been taken: process 0 before the others write."""
        self.directory.begin()
        PartialState().wait_for_everyone()

    def on_event(self, event: SlotEvent, step: int) -> None:
        """Take a `SlotEvent` of the rollout before optimizer step `step`."""
        self.directory.event(event, train_step=step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a log of the trainer, and say the gist of a training step."""
        if not state.is_world_process_zero or not logs:
            return
        record = {"train_step": state.global_step, "seconds": round(time.perf_counter() - self._begun, 3), **logs}
        self.directory.append("metrics", record)
        if "reward" in logs:
            self.logs.append(record)
            self.say(_step_line(record, state.max_steps))
        elif "eval_reward" in logs:
            self.say(f"evaluation after step {state.global_step}: reward {_number(logs['eval_reward'])}")

    def summary(self, trainer: InfiniteGRPOTrainer, checkpoint: str, num_verifier_errors: int) -> dict[str, Any]:
        """What the run did, for the closing lines and `--json`; rewards and lengths by logged step."""

        def column(name: str) -> list[float | None]:
            return [log[name] if _is_known(log[name]) else None for log in self.logs if name in log]

        totals = trainer.rollout_totals["train"]
        return {
            "steps": trainer.state.global_step,
            "logged_steps": [log["train_step"] for log in self.logs],
            "reward_by_step": column("reward"),
            "mean_length_by_step": column("completions/mean_length"),
            "tokens_per_second": totals.tokens_per_second,
            "peak_kv_bytes": totals.peak_kv_bytes,
            "kv_budget_bytes": totals.kv_budget_bytes,
            "running_steps": totals.running_steps,
            "lower_bound_steps": totals.lower_bound_steps,
            "max_logprob_gap": totals.max_logprob_gap,
            "verifier_errors": num_verifier_errors,
            "wall_seconds": round(time.perf_counter() - self._begun, 1),
            "checkpoint": checkpoint,
            "run_directory": str(self.directory.path),
        }


def _is_known(value: float | None) -> bool:
    """Whether there is a number: TRL logs none where no completion has a reward."""
    return value is not None and not math.isnan(value)


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and _is_known(value) else "none"


def _step_line(log: dict[str, Any], max_steps: int) -> str:
    parts = [f"step {log['train_step']}/{max_steps}", f"reward {_number(log['reward'])}"]
    if "completions/mean_length" in log:
        parts.append(f"length {log['completions/mean_length']:.1f}")
    if "rollout/tokens_per_second" in log:
        parts.append(f"{log['rollout/tokens_per_second']:.0f} tok/s")
        parts.append(f"KV {format_bytes(log['rollout/peak_kv_bytes'])}")
        parts.append(f"{log['rollout/running_steps']:.0f} running steps")
    return ", ".join([*parts, f"{log['seconds']:.0f} s"])


def _describe(summary: dict[str, Any]) -> str:
    rewards = " ".join(map(_number, summary["reward_by_step"]))
    budget = summary["kv_budget_bytes"]
    lines = [
        f"reward          {rewards or 'none logged'} (by logged step)",
        f"decoding        {summary['tokens_per_second'] or 0:.0f} tokens/s",
        f"peak KV         {format_bytes(summary['peak_kv_bytes'])}"
        + (f" of {format_bytes(budget)}" if budget else " (bounded by the slots)"),
        f"running steps   {summary['running_steps']} (lower bound {summary['lower_bound_steps']})",
        f"checkpoint      {summary['checkpoint']}",
        f"run directory   {summary['run_directory']}",
        f"time            {summary['wall_seconds']:.0f} s",
    ]
    if summary["verifier_errors"]:
        lines.append(f"verifier raised {summary['verifier_errors']} times (scored 0)")
    return "\n".join(lines)
