"""`infinite-sampling rollout`: groups of completions as JSONL, a summary on standard error."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from infinite_sampling.commands.arguments import (
    EngineArguments,
    SamplingArguments,
    SourceArguments,
    default_output_folder,
    parse,
    to_config,
)
from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig

DESCRIPTION = "Sample groups of completions; JSONL on standard output, a run directory on disk."


@dataclass
class RolloutArguments:
    """Flags of the command beside those of model, sampling and engine."""

    num_generations: int = field(default=8, metadata={"help": "Group size G: completions of each prompt."})
    output_dir: str | None = field(
        default=None, metadata={"help": "The run directory; default: a new one below runs/."}
    )
    weights_dtype: str = field(default="float32", metadata={"help": "Dtype the weights are loaded in."})
    device: str | None = field(
        default=None, metadata={"help": "cpu, cuda or cuda:N; default: CUDA where there is one."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    no_progress: bool = field(default=False, metadata={"help": "No progress bar on a terminal."})
    json: bool = field(default=False, metadata={"help": "Instead of completions, one JSON object of statistics."})


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    kinds = [RolloutArguments, SourceArguments, SamplingArguments, EngineArguments]
    arguments, source, sampling_flags, engine_flags = parse(kinds, argv, program, DESCRIPTION)
    device = choose_device(arguments.device)
    sampling = to_config(sampling_flags, SamplingConfig)
    config = to_config(engine_flags, RolloutConfig, progress=not arguments.no_progress)

    from infinite_sampling.engine import RolloutEngine, SlotEvent
    from infinite_sampling.models import load_model, load_tokenizer
    from infinite_sampling.progress import format_stats
    from infinite_sampling.prompts import encode_prompts
    from infinite_sampling.run_directory import RunDirectory, WriteError, completion_record

    settings = [dataclasses.asdict(part) for part in (arguments, source, sampling, config)]
    with RunDirectory(
        arguments.output_dir or default_output_folder("rollout"),
        command="rollout",
        config={key: value for part in settings for key, value in part.items()},
        seed=sampling.seed,
    ) as directory:
        options: Any = {"revision": source.model_revision, "trust_remote_code": arguments.trust_remote_code}
        tokenizer = load_tokenizer(source.model, **options)
        directory.decode = lambda ids: str(tokenizer.decode(ids))
        task = source.load_task(sampling.seed, tokenizer)
        prompt_ids = encode_prompts(list(task.dataset["prompt"]), tokenizer)
        model = load_model(source.model, dtype=arguments.weights_dtype, device=device, **options)
        engine = RolloutEngine(model, tokenizer, config)

        def show(event: SlotEvent) -> None:
            if event.completion is None or arguments.json:
                return
            try:
                print(json.dumps(completion_record(event.completion, directory.decode), ensure_ascii=False), flush=True)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise WriteError(
                    f"cannot write standard output: {error.strerror}; {directory.path} holds what has finished"
                ) from error

        def on_event(event: SlotEvent) -> None:
            try:
                directory.event(event)
            except OSError:  # a full disk: what has just finished can still be shown
                with suppress(OSError):
                    show(event)
                raise
            show(event)

        rollout = engine.rollout(prompt_ids, arguments.num_generations, sampling, on_event=on_event)
        directory.append("metrics", rollout.stats.to_dict())
    print(f"{format_stats(rollout.stats)}\nrun directory: {directory.path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({**rollout.stats.to_dict(), "run_directory": str(directory.path)}))
    return 0


def choose_device(name: str | None) -> str:
    """The device to load the model on; None takes CUDA where there is one. Raises ConfigError."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):  # others lack the float64 that the sampler needs
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= (num_devices := torch.cuda.device_count()):
        raise ConfigError(f"no device {name!r}: torch finds {num_devices} CUDA devices; name another, or cpu")
    return name
