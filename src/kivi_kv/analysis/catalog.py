"""The caches that are compared: KIVI as published, and every remedy alone and in useful combinations."""

from dataclasses import replace
from typing import Any

from ..config import KiviConfig
from .remedies import SimConfig

_KIVI2 = KiviConfig()
_PLAIN = SimConfig(_KIVI2)


def _bits(k: int, v: int, **changes: Any) -> SimConfig:
    return SimConfig(replace(_KIVI2, k_bits=k, v_bits=v, **changes))


def ends(layers: int, n: int, k_bits: int = 4, v_bits: int = 4) -> tuple[tuple[int, int, int], ...]:
    """layer_bits of the first n and the last n layers."""
    return tuple((i, k_bits, v_bits) for i in range(layers) if not n <= i < layers - n)


def worst(errors: list[float], n: int, k_bits: int = 4, v_bits: int = 4) -> tuple[tuple[int, int, int], ...]:
    """layer_bits of the n layers with the largest errors."""
    order = sorted(range(len(errors)), key=lambda i: -errors[i])
    return tuple((i, k_bits, v_bits) for i in sorted(order[:n]))


def mildest(errors: list[float], n: int, k_bits: int = 2, v_bits: int = 2) -> tuple[tuple[int, int, int], ...]:
    """layer_bits of the n layers with the smallest errors."""
    return worst([-error for error in errors], n, k_bits, v_bits)


def catalog(layers: int) -> dict[str, SimConfig]:
    """name: config, for a model of that many layers."""
    configs = {
        "kivi2": _PLAIN,
        "kivi4": _bits(4, 4),
        "kivi8": _bits(8, 8),
        "K4 V2": _bits(4, 2),
        "K2 V4": _bits(2, 4),
        "K8 V4": _bits(8, 4),
        "paper's flush": replace(_PLAIN, paper_flush=True),
        "rotated V": replace(_PLAIN, rotate_v=True),
        "small scales": replace(_PLAIN, small_scales=True),
        "boost 1/8": replace(_PLAIN, k_boost=0.125),
        "boost 1/4": replace(_PLAIN, k_boost=0.25),
        "ends 1": _bits(2, 2, layer_bits=ends(layers, 1)),
        "ends 2": _bits(2, 2, layer_bits=ends(layers, 2)),
    }
    configs |= {f"sinks {n}": _bits(2, 2, sink_length=n) for n in (4, 16, 32, 64, 128)}
    configs |= {f"clip {c}": replace(_PLAIN, clip=c) for c in (0.97, 0.94, 0.91)}
    configs |= {f"group {g}": _bits(2, 2, group_size=g) for g in (64, 128)}
    configs |= {f"residual {r}": _bits(2, 2, residual_length=r) for r in (32, 64, 256)}
    sinks = SimConfig(replace(_KIVI2, sink_length=32))
    better = replace(sinks, rotate_v=True)
    configs |= {
        "sinks 32 + rotated V": better,
        "sinks 32 + boost 1/8": replace(sinks, k_boost=0.125),
        "sinks 32 + boost 1/4": replace(sinks, k_boost=0.25),
        "sinks 32 + boost 1/4 + rotated V": replace(better, k_boost=0.25),
        "sinks 32 + boost 1/2 + rotated V": replace(better, k_boost=0.5),
        "sinks 32 + ends 1": _bits(2, 2, sink_length=32, layer_bits=ends(layers, 1)),
        "sinks 32 + K4 V2": _bits(4, 2, sink_length=32),
        "sinks 32 + K4 V2 + rotated V": replace(_bits(4, 2, sink_length=32), rotate_v=True),
        "sinks 32 + K4 V2 + small scales": replace(_bits(4, 2, sink_length=32), small_scales=True),
        "sinks 32 + K4 V2 g64": _bits(4, 2, sink_length=32, group_size=64),
        "sinks 32 + K4 V2 g128": _bits(4, 2, sink_length=32, group_size=128),
        "sinks 32 + small scales": replace(sinks, small_scales=True),
        "sinks 32 + small scales + boost 1/4 + rotated V": replace(better, small_scales=True, k_boost=0.25),
        "sinks 32 + small scales + boost 1/2 + rotated V": replace(better, small_scales=True, k_boost=0.5),
        "sinks 32 + g64": _bits(2, 2, sink_length=32, group_size=64),
        "sinks 32 + g64 + rotated V": replace(_bits(2, 2, sink_length=32, group_size=64), rotate_v=True),
        "sinks 32 + K4 V4": _bits(4, 4, sink_length=32),
        "sinks 32 + K4 V4 g64": _bits(4, 4, sink_length=32, group_size=64),
        "sinks 32 + K4 V4 g128": _bits(4, 4, sink_length=32, group_size=128),
        "sinks 32 + K8 V4 g128": _bits(8, 4, sink_length=32, group_size=128),
    }
    return configs
