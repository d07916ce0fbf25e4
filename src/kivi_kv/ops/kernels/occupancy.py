"""How much work fills a device, and whether its kernels overlap."""

from functools import lru_cache

import torch

_WARPS_PER_SM = 8  # that the kernels' registers allow: every program runs at once, and there is no last wave


@lru_cache(maxsize=64)
def resident_warps(device: torch.device) -> int:
    """Warps that fill the device once."""
    if device.type != "cuda":
        return 16  # the interpreter: a few splits
    return torch.cuda.get_device_properties(device).multi_processor_count * _WARPS_PER_SM


@lru_cache(maxsize=64)
def kernels_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(device).major >= 9
