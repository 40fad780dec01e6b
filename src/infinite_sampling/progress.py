"""A progress bar for a rollout: members done of all, tokens/s, active slots, time left.

In: `SlotEvent`s. Out: a line on standard error, on a terminal only. It knows nothing else.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from infinite_sampling.memory import format_bytes
from infinite_sampling.types import RolloutStats


class RolloutProgress:
    """A bar over the members of one rollout; use as a context manager and pass it events."""

    def __init__(self, num_members: int, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("rollout"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tok/s, {task.fields[active]} active"),
            TimeRemainingColumn(),
            console=console or Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._progress.add_task("rollout", total=num_members, rate=0.0, active=0)
        self._num_tokens = 0
        self._begun = time.perf_counter()

    def __enter__(self) -> RolloutProgress:
        self._progress.start()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, event: Any) -> None:
        """Take a `SlotEvent`."""
        if event.kind == "finish":
            self._progress.advance(self._task)
        elif event.kind == "step":
            self._num_tokens += event.num_active
            rate = self._num_tokens / max(time.perf_counter() - self._begun, 1e-9)
            self._progress.update(self._task, rate=rate, active=event.num_active)


def wants_progress(progress: bool) -> bool:
    """Whether to draw: asked for, and standard error is a terminal."""
    return progress and sys.stderr.isatty()


def format_stats(stats: RolloutStats) -> str:
    """One line on a finished rollout."""
    steps = f"{stats.num_running_steps} running steps (lower bound {stats.lower_bound_steps})"
    return (
        f"{stats.num_members} members, {stats.num_tokens} tokens in {stats.wall_seconds:.1f} s "
        f"({stats.tokens_per_second:.0f} tok/s), {steps}, occupancy {stats.occupancy:.0%}, "
        f"peak KV {format_bytes(stats.peak_kv_bytes)}"
    )
