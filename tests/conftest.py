"""Fixtures and rules that every test shares.

A test that cannot run says why: `gpu` needs a CUDA device, and `shared_data` a folder of real data
that is not part of the repository. Both skips are listed at the end of a run (`-ra`). Nothing else
is skipped: what `make test` installs and does not find is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports transformers: no test waits for a hub, and forked workers stay quiet.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Small models gain nothing from threads, and a barrier between threads costs a time slice for each
# operation where another process wants the core. Tests that are about threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = Path(os.environ.get("INFINITE_SAMPLING_SHARED_DATA", ROOT.parent / "shared" / "data"))
"""GSM8K and traces of real lengths; by default beside the checkout."""

# No deadline: two shared cores make one example slow at random. In CI the same examples each time.
settings.register_profile("suite", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("suite")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("shared_data") and not SHARED_DATA.is_dir():
        pytest.skip("no shared data folder; name one with INFINITE_SAMPLING_SHARED_DATA")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; a test that takes it is marked `shared_data`."""
    return SHARED_DATA


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer: one pair a run, so leave it as it was."""
    from infinite_sampling.models import load_model, load_tokenizer

    return load_model("smollm2"), load_tokenizer("smollm2")


@pytest.fixture(autouse=True)
def _same_random_state_for_every_test() -> Iterator[None]:
    """Whatever ran before, a test starts from the same global seeds; the engine uses none of them."""
    import random
    import sys

    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
