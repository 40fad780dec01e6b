"""What a device's memory can still take, and what it says when it is full: CPU, CUDA and MPS alike."""

from __future__ import annotations

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
