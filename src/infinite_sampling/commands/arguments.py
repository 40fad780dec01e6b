"""Command-line flags and YAML keys, generated from dataclasses.

In: argv and a `--config` file in TRL's own format. Out: instances of the dataclasses. Flags
override the file; an unknown flag or key is a ConfigError that suggests the nearest, and a value in
the file that is not of its setting's type one that names the setting.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import logging
import os
import secrets
import sys
import textwrap
import time
import typing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl.scripts.utils import TrlParser

from infinite_sampling.commands.config_file import read_config_file
from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig, nearest

logger = logging.getLogger(__name__)


@dataclass
class SourceArguments:
    """Which model, which prompts, which reward."""

    model: str = field(default="smollm2", metadata={"help": "`smollm2`, a local folder or a hub id."})
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the model on the hub."}
    )
    dataset: str = field(
        default="chain_sum",
        metadata={"help": "A reasoning-gym task, a JSONL file (field prompt or question), or a data set of the hub."},
    )
    dataset_size: int | None = field(
        default=None, metadata={"help": "Number of prompts: the first ones of a file or data set (default: all)."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a hub data set."})
    dataset_subset: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of a reasoning-gym task as JSON, e.g. '{\"max_terms\": 3}'."}
    )
    dataset_suffix: str | None = field(
        default=None, metadata={"help": "A line put after each prompt (reasoning-gym: 'Give only the final answer.')."}
    )
    prompt_field: str | None = field(default=None, metadata={"help": "The field of a row that holds the prompt."})

    def load_task(self, seed: int, tokenizer: Any = None) -> Any:
        """The `Task` these arguments name; a tokenizer without chat template gets plain text. Raises ConfigError."""
        from infinite_sampling.tasks import load_task

        if self.dataset_size is not None and self.dataset_size < 1:
            raise ConfigError(f"dataset_size must be an integer of at least 1, got {self.dataset_size!r}")
        options: Any = self.dataset_options
        if isinstance(options, str):
            try:
                options = json.loads(options)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"dataset_options must be a JSON object, got {options!r}: {error}") from error
        if options is not None and not isinstance(options, dict):
            raise ConfigError(f"dataset_options must be a JSON object such as '{{\"max_terms\": 3}}', got {options!r}")
        chat = tokenizer is None or bool(tokenizer.chat_template)
        if not chat:
            logger.warning(
                "the tokenizer of %s has no chat template: prompts of plain text are given as text", self.model
            )
        return load_task(
            self.dataset,
            size=self.dataset_size,
            seed=seed,
            split=self.dataset_split,
            subset=self.dataset_subset,
            options=options,
            suffix=self.dataset_suffix,
            prompt_field=self.prompt_field,
            chat=chat,
        )


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a config class."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs


_FLAG_TYPES: dict[str, Any] = {"eos_token_ids": list[int] | None, "stop": list[str] | None}
_NO_FLAG = {"forced_lengths", "progress"}


def flags_of(name: str, cls: type) -> type:
    """A mutable dataclass with the fields of a config class, documented for a parser."""
    docs, hints = _field_docs(cls), typing.get_type_hints(cls)
    fields: list[Any] = [
        (
            f.name,
            _FLAG_TYPES.get(f.name, hints[f.name]),
            field(default=_flag_default(f), metadata={"help": docs[f.name]}),
        )
        for f in dataclasses.fields(cls)
        if f.name not in _NO_FLAG
    ]
    return dataclasses.make_dataclass(name, fields)


def _flag_default(f: Any) -> Any:
    return None if f.name in _FLAG_TYPES else f.default


SamplingArguments = flags_of("SamplingArguments", SamplingConfig)
EngineArguments = flags_of("EngineArguments", RolloutConfig)


def to_config(arguments: Any, cls: type, **changes: Any) -> Any:
    """The validated config of parsed flags. Raises ConfigError."""
    values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
    if "stop" in values and values["stop"] is None:
        values["stop"] = ()
    return cls(**{**values, **changes})


class _Parser(TrlParser):  # type: ignore[misc, unused-ignore]
    """TRL's parser, its complaints in one line."""

    def error(self, message: str) -> Any:
        """Raise ConfigError, where argparse would print every flag and exit."""
        raise ConfigError(f"{message}; {self.prog} --help documents the flags")


def parse(dataclasses_: Sequence[Any], argv: Sequence[str], program: str, description: str) -> tuple[Any, ...]:
    """Instances of the dataclasses from flags over `--config`.

    Raises ConfigError for an unknown flag or key, a missing or broken file, a value of the wrong
    type, a refused setting.
    """
    argv = _split_config(argv)
    parser = _Parser(list(dataclasses_), prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="A YAML file of these settings, as TRL's commands take it; flags override it.")
    known = {option for action in parser._actions for option in action.option_strings}
    for argument in argv:
        flag = argument.split("=", 1)[0]
        if flag.startswith("--") and flag not in known:
            raise ConfigError(f"unknown flag {flag}: {nearest(flag, known)}")
    if "--config" in argv:
        index = argv.index("--config") + 1
        if index >= len(argv):
            raise ConfigError("--config needs a YAML file")
        values = read_config_file(Path(argv[index]), dataclasses_)
        parser.set_defaults_with_config(**values)
        del argv[index - 1 : index + 1]
    quiet_libraries()
    try:
        parsed = tuple(parser.parse_args_and_config(argv))
    except ConfigError:
        raise
    except ValueError as error:  # a setting that TRL or transformers refuses
        raise ConfigError(str(error)) from error
    return parsed[: len(dataclasses_)]  # without the namespace that holds --config


def _split_config(argv: Sequence[str]) -> list[str]:
    """`--config=FILE` as two arguments: TRL's parser reads no other form, and would ignore this one."""
    split: list[str] = []
    for argument in argv:
        split += argument.split("=", 1) if argument.startswith("--config=") else [argument]
    if split.count("--config") > 1:
        raise ConfigError("--config was given more than once; put the settings in one file, or override by flags")
    return split


def quiet_libraries() -> None:
    """No bars of other libraries where standard error is not a terminal, no notes on their own code."""
    warnings.filterwarnings("ignore", r".*gradient_checkpointing.* is deprecated", FutureWarning)
    if not sys.stderr.isatty():
        import datasets
        import transformers

        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def default_output_folder(command: str) -> str:
    """A new folder below `runs`, named by the time, and by chance since two runs can start at one time."""
    return os.path.join("runs", f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
