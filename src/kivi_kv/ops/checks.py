"""Argument checks. Every message names the argument, what was expected and what came."""

import torch
from torch import Tensor

from ..config import BITS
from ..format import CACHE_DTYPES, MIN_HEAD_DIM


def check_bits(bits: int) -> None:
    if not isinstance(bits, int) or bits not in BITS:
        raise ValueError(f"bits: expected one of {', '.join(map(str, BITS))}, got {bits!r}")


def check_group_size(group_size: int) -> None:
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ValueError(f"group_size: expected a positive int, got {group_size!r}")


def check_multiple(name: str, size: int, of: int, why: str) -> None:
    if size % of:
        raise ValueError(f"{name}: expected a multiple of {of} ({why}), got {size}")


def check_shape(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")


def check_float(name: str, x: Tensor) -> None:
    if x.dtype not in CACHE_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in CACHE_DTYPES)
        raise ValueError(f"{name}: expected a dtype of {names}, got {str(x.dtype).removeprefix('torch.')}")


def check_kv(name: str, x: Tensor) -> None:
    """A K or V tensor [B, H, T, D] of a dtype that a cache stores."""
    if x.ndim != 4:
        raise ValueError(f"{name}: expected [B, H, T, D], got shape {tuple(x.shape)}")
    if not x.numel():
        raise ValueError(f"{name}: expected at least one element, got shape {tuple(x.shape)}")
    check_float(name, x)
    if x.shape[-1] < MIN_HEAD_DIM:
        raise ValueError(f"{name}: expected a head dimension of at least {MIN_HEAD_DIM}, got {x.shape[-1]}")


def check_finite(name: str, x: Tensor) -> None:
    """Refuse NaN and inf. On a GPU this waits for the device."""
    if not x.numel():
        return
    low, high = x.aminmax()  # NaN comes through, and nothing as large as x is allocated
    if not (low.isfinite() and high.isfinite()):
        bad = (~torch.isfinite(x)).sum().item()
        raise ValueError(f"{name}: expected finite values, got {bad} NaN or inf of {x.numel()}")
