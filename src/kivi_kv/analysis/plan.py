"""How much memory a cache takes, and what fits."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..config import PRESETS, KiviConfig
from ..storage import kivi_cache_bytes, kv_cache_bytes
from .shape import ModelShape

DENSE = {"fp16": 2, "fp8": 1}  # bytes per element
CACHES = (*DENSE, *PRESETS)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}{suffix}": 2 ** (10 * power)
    for power, prefix in enumerate("KMGT", start=1)
    for suffix in ("iB", "i", "")
}
_MOST = 1 << 40  # beyond this many tokens or sequences, something else is the limit


@dataclass(frozen=True, slots=True)
class Plan:
    """One cache format: its bytes, and what fits in memory (None without a memory size)."""

    cache: str
    cache_bytes: int
    bits_per_element: float
    longest_context: int | None
    largest_batch: int | None


def cache_bytes(shape: ModelShape, cache: str, batch: int, tokens: int) -> int:
    """Bytes of a cache of that format: "fp16", "fp8" or a preset. Layers that are not packed count as fp16."""
    total = 0
    for group in shape.groups:
        kept = tokens if group.window is None else min(tokens, group.window)
        sizes = (group.count, batch, kept, group.kv_heads, group.head_dim)
        if cache in DENSE:
            total += kv_cache_bytes(*sizes, bytes_per_element=DENSE[cache])
        elif group.reason is None:
            total += kivi_cache_bytes(KiviConfig.preset(cache), *sizes)
        else:
            total += kv_cache_bytes(*sizes)
    return total


def make_plan(shape: ModelShape, batch: int, tokens: int, memory: int | None = None) -> list[Plan]:
    """A Plan for each cache format. memory is what weights and cache may take together.

    longest_context is for `batch` sequences, at most the model's own limit; largest_batch for `tokens` tokens.
    Raises ValueError for sizes below 1, and for a memory that the weights alone fill.
    """
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    free = None if memory is None else memory - (shape.weight_bytes or 0)
    if free is not None and free <= 0:
        raise ValueError(
            f"gpu-memory: expected more than the weights' {(shape.weight_bytes or 0) / 2**30:.2f} GiB, "
            f"got {(memory or 0) / 2**30:.2f} GiB"
        )
    elements = cache_bytes(shape, "fp8", batch, tokens)  # one byte each
    plans = []
    for cache in CACHES:
        size = cache_bytes(shape, cache, batch, tokens)
        longest = largest = None
        if free is not None:
            fits = partial(_fits, shape, cache, free)
            longest = _largest(partial(fits, batch), shape.max_tokens or _MOST)
            largest = _largest(partial(fits, tokens=tokens), _MOST)
        plans.append(Plan(cache, size, 8 * size / elements, longest, largest))
    return plans


def parse_bytes(text: str) -> int:
    """'24GiB', '80GB', '24G' (binary) or a number of bytes. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    unit = {name.upper(): size for name, size in _UNITS.items()}.get(match.group(2).upper()) if match else None
    if match is None or unit is None or match.group(1).count(".") > 1:
        raise ValueError(f"expected a size like 24GiB or 80GB, got {text!r}")
    return int(float(match.group(1)) * unit)


def format_bytes(size: float) -> str:
    """In binary units, three significant digits or so: '16.0 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"


def _fits(shape: ModelShape, cache: str, free: int, batch: int, tokens: int) -> bool:
    return cache_bytes(shape, cache, batch, tokens) <= free


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n of 0 .. limit that fits, memory growing with n."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
