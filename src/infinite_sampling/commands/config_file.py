"""The `--config` file of a command: settings in YAML, as TRL's own commands take them.

In: a path, and the dataclasses that the settings belong to. Out: settings by name, each of its type,
and the variables under `env` in the environment. Whether a value makes sense is not known here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from transformers.hf_argparser import string_to_bool

from infinite_sampling.config import ConfigError, nearest

_ALSO_BOOL = {"resume_from_checkpoint", "scale_rewards"}
"""Settings that are text to TRL, and which take `true` and `false` too."""

_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", dict: "a mapping", type(None): "null"}


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice; keep one of them", key.start_mark
                )
            keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_config_file(path: Path, dataclasses_: Sequence[Any]) -> dict[str, Any]:
    """The settings in a file; those under `env` are put into the environment.

    Raises ConfigError for a file that is missing or no YAML, for a key that stands twice or is no
    field of the dataclasses, and for a value that is not of its field's type.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read the config file {path} as YAML in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(values).__name__}")
    environment = values.pop("env", {})
    if not isinstance(environment, dict):
        raise ConfigError(f"{path}: env must be a mapping of variables to values, got {environment!r}")
    hints = {
        field.name: hint
        for cls in dataclasses_
        for hints_of_class in [typing.get_type_hints(cls)]
        for field in dataclasses.fields(cls)
        if field.init
        for hint in [hints_of_class[field.name]]
    }
    for key in values:
        if key not in hints:
            raise ConfigError(f"{path}: unknown key {key!r}: {nearest(str(key), hints)}")
    settings = {key: _typed(path, key, value, hints[key]) for key, value in values.items()}
    os.environ.update({str(name): str(value) for name, value in environment.items()})
    return settings


def _typed(path: Path, key: str, value: Any, hint: Any) -> Any:
    """A value as its field takes it. Raises ConfigError where it is of another type."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if is_union else (hint,)
    if (isinstance(value, str) and str in options) or (isinstance(value, bool) and key in _ALSO_BOOL):
        return value
    single = [typing.get_args(option)[0] for option in options if typing.get_origin(option) is list]
    for wanted, wrap in [(option, False) for option in options] + [(item, True) for item in single]:
        try:
            converted = _converted(value, wanted)
        except (ValueError, argparse.ArgumentTypeError):
            continue
        return [converted] if wrap else converted  # a flag's one value is a list as well
    expected = " or ".join(dict.fromkeys(map(_name, options)))
    quotes = str in options and not isinstance(value, (list, dict, type(None)))
    raise ConfigError(f"{path}: {key} must be {expected}, got {value!r}{'; put it in quotes' if quotes else ''}")


def _converted(value: Any, wanted: Any) -> Any:
    """The value as this type: numbers in quotes are read as flags are (to YAML 1e-6 is text). Raises ValueError."""
    kind = typing.get_origin(wanted) or wanted
    if kind is list and isinstance(value, list):
        return [_converted(item, typing.get_args(wanted)[0]) for item in value]
    if isinstance(value, str) and kind in (int, float, bool):
        read: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: string_to_bool}
        return read[kind](value)
    if kind is typing.Literal:
        fits = value in typing.get_args(wanted)
    elif isinstance(value, bool) or kind is bool:
        fits = isinstance(value, bool) and kind is bool
    elif isinstance(kind, type) and issubclass(kind, Enum):
        fits = isinstance(value, str)
    else:
        fits = kind is Any or isinstance(value, (int, float) if kind is float else kind)
    if not fits:
        raise ValueError
    return value


def _name(option: Any) -> str:
    """A type in words."""
    kind = typing.get_origin(option) or option
    if kind is list:
        return f"a list (each {_name(typing.get_args(option)[0])})"
    if kind is str or (isinstance(kind, type) and issubclass(kind, Enum)):
        return "text"
    return _TYPE_NAMES.get(kind, str(option))
