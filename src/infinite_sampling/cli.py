"""The `infinite-sampling` command.

In: argv. Out: an exit code; with one line on standard error 2 for anything the user can mend, and 1
where the machine failed (a full disk, a folder taken away).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from infinite_sampling import __version__
from infinite_sampling.config import ConfigError, nearest
from infinite_sampling.rewards import RewardError

COMMANDS = {
    "train": "GRPO with TRL, its completions sampled by the engine",
    "rollout": "sample groups of completions as JSONL",
    "memory": "bytes a rollout needs, before loading any weights",
}

_WRITING = ("train", "rollout")
"""The commands that write a run directory."""


def usage() -> str:
    """The help of the bare command."""
    lines = [f"  {name:8} {text}" for name, text in COMMANDS.items()]
    head = "usage: infinite-sampling COMMAND [--config FILE.yaml] [flags]"
    return "\n".join([head, "", *lines, "", "infinite-sampling COMMAND --help documents every flag."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"infinite-sampling {__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            raise ConfigError(f"unknown command {argv[0]!r}: {nearest(argv[0], COMMANDS)}")
        command = importlib.import_module(f"infinite_sampling.commands.{argv[0]}")
        return int(command.main(argv[1:], f"infinite-sampling {argv[0]}"))
    except (ConfigError, RewardError, FloatingPointError) as error:
        return _failed(error, 2)
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        kept = "; a run directory, if one was begun, holds what had finished" if argv[0] in _WRITING else ""
        print(f"infinite-sampling: interrupted{kept}", file=sys.stderr)
        return 130


def _failed(error: Exception, code: int) -> int:
    """Say what went wrong in one line; returns `code`."""
    print(f"infinite-sampling: error: {' '.join(str(error).split())}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try once more, say so, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
