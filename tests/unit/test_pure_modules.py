"""The modules that hold policy import nothing heavy, so they load at once and run anywhere."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PURE = ("types", "config", "memory", "scheduler")
HEAVY = {"torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy", "scipy", "pandas"}

PROBE = """
import importlib, json, sys
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def imported_by(module: str) -> set[str]:
    """Top-level packages that a fresh interpreter loads for `module`."""
    done = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", ["infinite_sampling", *(f"infinite_sampling.{name}" for name in PURE)])
def test_a_pure_module_imports_nothing_heavy(module):
    loaded = imported_by(module)
    assert "infinite_sampling" in loaded
    assert not loaded & HEAVY


def test_the_probe_sees_an_import_further_down():
    assert "torch" in imported_by("infinite_sampling.kv_pool")
