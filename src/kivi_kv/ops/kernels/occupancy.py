"""How much work fills a device."""

from functools import lru_cache

import torch

_WARPS_PER_SM = 8  # that the kernels' registers allow: every program runs at once, and there is no last wave


@lru_cache(maxsize=64)
def resident_warps(device: torch.device) -> int:
    """Warps that fill the device once."""
    if device.type != "cuda":
        return 16  # the interpreter: a few splits
    return torch.cuda.get_device_properties(device).multi_processor_count * _WARPS_PER_SM
