"""Configuration: what is sampled (`SamplingConfig`) and how it is run (`RolloutConfig`).

In: keyword arguments from Python, the command line or YAML. Out: frozen, validated records.
All validation of settings is here; nothing here knows torch or a model. A wrong value raises
`ConfigError` (a ValueError) that says what was expected, what came, and the mend.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Policy = Literal["full", "micro", "fixed-slot", "dynamic-slot", "length-aware", "oracle"]
POLICIES: tuple[str, ...] = get_args(Policy)
AVAILABLE_POLICIES = ("full", "micro", "fixed-slot", "dynamic-slot")
"""The policies on this version; the others are named so that asking for them explains itself."""

DTYPES = ("auto", "weights", "float32", "bfloat16", "float16")

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
_MAX_KEY = 2**32 - 1


class ConfigError(ValueError):
    """A setting or an argument that cannot work, found before any work started."""


def parse_bytes(text: int | str) -> int:
    """Bytes from an int or from text such as "512MiB", "2GB" (powers of ten) or "2G" (of two).

    Raises ConfigError if the text is not a positive size.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise ConfigError(f"a size must be an int of bytes or text such as '512MiB', got {text!r}")
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"cannot read the size {text!r}; expected for example '512MiB', '2GiB', 1073741824")
        text = int(float(match[1]) * _UNITS[match[2].lower()])
    if text <= 0:
        raise ConfigError(f"a size must be positive, got {text} bytes")
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known name if there is one, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(sorted(known))}"


def _integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list or a tuple, got {value!r}")
    return value


def _real(name: str, value: Any, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (low <= value <= high):
        raise ConfigError(f"{name} must be {expected}, got {value!r}")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """The law that completions are drawn from. Equal configs and keys give equal completions."""

    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens; None or 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the most likely one; None or 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens already in prompt or completion."""
    max_new_tokens: int = 256
    """Longest completion, in tokens."""
    min_new_tokens: int = 0
    """EOS tokens are not sampled, and stop strings not heeded, before this many tokens."""
    eos_token_ids: Sequence[int] | None = None
    """Tokens that end a completion; None takes the model's generation config."""
    stop: Sequence[str] = ()
    """Strings that end a completion with the token that completes one (also across tokens)."""
    seed: int = 0
    """Seed of the counter-based noise, 0 <= seed < 2**64."""
    ignore_eos: bool = False
    """Run every member to its length limit (for benchmarks)."""
    forced_lengths: Sequence[Sequence[int]] | None = None
    """Exact length of member m of prompt p, ignoring EOS (for benchmarks and replays)."""

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, 0.0, 1e4, "a finite number >= 0 (0 is greedy)")
        if 0 < self.temperature < 1e-4:
            raise ConfigError(f"temperature {self.temperature!r} is too small; use 0 for greedy decoding")
        if self.top_k is not None:
            _integer("top_k", self.top_k, 0)
        _real("top_p", self.top_p, 1e-9, 1.0, "in (0, 1]")
        if self.min_p is not None:
            _real("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        _real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "a finite number > 0")
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({self.max_new_tokens})"
            )
        _integer("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise ConfigError(f"seed must be below 2**64, got {self.seed}")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.eos_token_ids is not None:
            tokens = (self.eos_token_ids,) if isinstance(self.eos_token_ids, int) else self.eos_token_ids
            for token in _sequence("eos_token_ids", tokens):
                _integer("each of eos_token_ids", token, 0)
            object.__setattr__(self, "eos_token_ids", tuple(tokens))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(_sequence("stop", self.stop or ()))
        if any(not isinstance(text, str) or not text for text in stop):
            raise ConfigError(f"stop must be non-empty strings, got {stop!r}")
        object.__setattr__(self, "stop", stop)
        for row in _sequence("forced_lengths", () if self.forced_lengths is None else self.forced_lengths):
            for length in _sequence("each of forced_lengths", row):
                _integer("each of forced_lengths", length, 1)
                if length > self.max_new_tokens:
                    raise ConfigError(f"forced length {length} exceeds max_new_tokens ({self.max_new_tokens})")

    @property
    def has_filters(self) -> bool:
        """Whether the distribution drawn from differs from the softmax at the temperature."""
        return bool(self.top_k) or self.top_p < 1.0 or bool(self.min_p) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How a rollout is run: it changes time and memory, never a completion."""

    policy: str = "fixed-slot"
    """`full`: all members at once. `micro`: micro groups one after another. `fixed-slot`: a freed
    slot takes the next member. `dynamic-slot`: start new members until G have finished, drop the
    rest (biased to short completions; for study)."""
    num_slots: int | None = None
    """Most members decoded at once; None chooses 32, and under a `kv_budget` up to 256. Ignored by `full`."""
    kv_budget: int | str | None = None
    """Most bytes of KV held, prompts and padding included, as an int or as "2GiB". A member that no
    longer fits waits and is recomputed (`fixed-slot`); the other policies run as many slots as fit whole.
    None: what `num_slots` need, but where that is None too at most half of the device's free memory."""
    dtype: str = "auto"
    """Compute dtype: `auto` (the trainer's, else the weights'), `weights`, or a torch dtype's name."""
    prefill_chunk_tokens: int = 512
    """Prompt tokens run through the model at once: bounds the activations of a long prompt. A
    different chunk may change a completion by rounding."""
    progress: bool = False
    """Show a progress bar while a rollout runs (only on a terminal)."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown policy {self.policy!r}: {nearest(str(self.policy), AVAILABLE_POLICIES)}")
        if self.policy not in AVAILABLE_POLICIES:
            raise ConfigError(
                f"policy {self.policy!r} is not available in this version; use one of {', '.join(AVAILABLE_POLICIES)}"
            )
        if self.num_slots is not None:
            _integer("num_slots", self.num_slots, 1)
        if self.kv_budget is not None:
            parse_bytes(self.kv_budget)
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}: {nearest(str(self.dtype), DTYPES)}")
        _integer("prefill_chunk_tokens", self.prefill_chunk_tokens, 16)


def check_keys(name: str, keys: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Random-stream keys, by default 0..count-1; each must fit 32 unsigned bits.

    Raises ConfigError on a wrong count or a key out of range.
    """
    if keys is None:
        return tuple(range(count))
    if len(keys) != count:
        raise ConfigError(f"{name} must hold {count} keys, got {len(keys)}")
    for key in keys:
        _integer(f"each of {name}", key, 0)
        if key > _MAX_KEY:
            raise ConfigError(f"each of {name} must be below 2**32, got {key}")
    return tuple(keys)
