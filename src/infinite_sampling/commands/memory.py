"""`infinite-sampling memory`: what a rollout will hold, before any weight is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from infinite_sampling.commands.arguments import parse
from infinite_sampling.config import ConfigError, parse_bytes
from infinite_sampling.memory import DTYPE_BYTES, KVShape, MemoryPlan, format_bytes, plan_memory

DESCRIPTION = "Bytes of weights, prompt and members, and the slots that fit, before loading any weights."


@dataclass
class MemoryArguments:
    """Flags of the command."""

    model: str = field(default="smollm2", metadata={"help": "`smollm2`, a local folder or a hub id."})
    num_generations: int = field(default=16, metadata={"help": "Group size G."})
    prompt_tokens: int = field(default=128, metadata={"help": "Tokens of a prompt."})
    num_prompts: int = field(default=1, metadata={"help": "Prompts in one rollout."})
    max_new_tokens: int = field(default=256, metadata={"help": "Longest completion, in tokens."})
    num_slots: int | None = field(default=None, metadata={"help": "Slots g; default 32, and under a budget up to 256."})
    budget: int | str | None = field(
        default=None, metadata={"help": "Bytes of KV allowed, e.g. 512MiB: how many slots fit?"}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Dtype of decoding and KV: float32, bfloat16, float16."})
    weights_dtype: str = field(default="float32", metadata={"help": "Dtype the weights are held in."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    json: bool = field(default=False, metadata={"help": "End standard output with one JSON object."})


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    (arguments,) = parse([MemoryArguments], argv, program, DESCRIPTION)
    plan = plan_for(arguments)
    print(_table(arguments, plan), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps({"model": arguments.model, **plan.to_dict()}))
    return 0


def plan_for(arguments: MemoryArguments) -> MemoryPlan:
    """The plan of a named model. Raises ConfigError."""
    from infinite_sampling.models import load_config

    for name in (arguments.dtype, arguments.weights_dtype):
        if name not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {name!r}")
    config = load_config(arguments.model, trust_remote_code=arguments.trust_remote_code)
    num_parameters, num_linear = count_parameters(config, arguments.trust_remote_code)
    return plan_memory(
        KVShape.of(config.get_text_config()),
        dtype=arguments.dtype,
        num_generations=arguments.num_generations,
        prompt_tokens=arguments.prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        num_prompts=arguments.num_prompts,
        num_slots=arguments.num_slots,
        kv_budget_bytes=None if arguments.budget is None else parse_bytes(arguments.budget),
        weight_bytes=num_parameters * DTYPE_BYTES[arguments.weights_dtype],
        working_copy_bytes=num_linear * _copy_bytes(arguments.dtype, arguments.weights_dtype),
    )


def count_parameters(config: object, trust_remote_code: bool = False) -> tuple[int, int]:
    """Parameters of the model, and those of its plain linear layers; no weight is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    linear = (m.weight.numel() for m in model.modules() if type(m) is torch.nn.Linear)
    return sum(p.numel() for p in model.parameters()), sum(linear)


def _copy_bytes(dtype: str, weights_dtype: str) -> int:
    """Bytes a weight of the working copy that decoding makes on this machine."""
    import torch

    from infinite_sampling.linear import copy_bytes_per_weight

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return copy_bytes_per_weight(device, getattr(torch, dtype), getattr(torch, weights_dtype))


def _table(arguments: MemoryArguments, plan: MemoryPlan) -> str:
    rows = [
        (f"weights ({arguments.weights_dtype})", plan.weight_bytes),
        ("working copy of the linear layers while decoding", plan.working_copy_bytes),
        (f"KV of one token ({arguments.dtype})", plan.kv_bytes_per_token),
        (
            f"KV of the prompts held at once ({plan.num_held_prompts} x {arguments.prompt_tokens} tokens, each once)",
            plan.prompt_kv_bytes,
        ),
        (f"KV reserved by one slot (up to {arguments.max_new_tokens} tokens)", plan.member_kv_bytes),
        (f"KV of the rollout: prompts and {plan.num_slots} slots", plan.kv_bytes),
        (
            f"for comparison, all {arguments.num_generations} x {arguments.num_prompts} members at once",
            plan.full_kv_bytes,
        ),
        ("total", plan.total_bytes),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {format_bytes(value):>12}" for name, value in rows]
    fits = f"{plan.num_slots} slots fit" if plan.kv_budget_bytes is not None else f"{plan.num_slots} slots"
    return "\n".join([*lines, f"{fits} (group size {arguments.num_generations} does not change this)"])
