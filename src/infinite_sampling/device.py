"""The machine: what a device's memory can still take, what it says when it is full, where a cache may stand."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch


def free_memory_bytes(device: torch.device) -> int:
    """Bytes of memory that are free now on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(psutil.virtual_memory().available)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's allocator refused (the CPU's raises a plain RuntimeError)."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def empty_cache(device: torch.device) -> None:
    """Give cached blocks back, so that smaller pieces fit."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).empty_cache()


def cache_root() -> Path:
    """The folder for what is computed once on a machine: INFINITE_SAMPLING_CACHE, else the user's cache folder."""
    root = os.environ.get("INFINITE_SAMPLING_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "infinite-sampling")
    return Path(root).expanduser()
