"""Infinite Sampling: rollouts for group-based RL whose group size memory does not limit."""

from infinite_sampling.config import ConfigError, RolloutConfig, SamplingConfig
from infinite_sampling.types import Completion, FinishReason, Member, PromptGroup, Rollout, RolloutStats

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "ConfigError",
    "FinishReason",
    "Member",
    "PromptGroup",
    "Rollout",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutStats",
    "SamplingConfig",
    "__version__",
]


def __getattr__(name: str) -> object:
    # Lazy, so that the pure modules can be imported without torch.
    if name == "RolloutEngine":
        from infinite_sampling.engine import RolloutEngine

        return RolloutEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
