"""The commands of `infinite-sampling`, one module each: `train`, `rollout`, `memory`."""
