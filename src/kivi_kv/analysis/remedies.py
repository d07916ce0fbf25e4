"""Remedies for the accuracy of 2-bit caches, in simulation: what a page would hold, and what that costs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import reference
from ..config import PAGE, KiviConfig


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A cache to simulate: a KiviConfig and switches for what no page can hold yet.

    cache: bits, by layer if they differ, group size, residual and sinks.
    k_boost: share of the key channels, those of the largest mean |K| in a page, whose codes get 2 more bits.
    rotate_v: values are quantized after a Hadamard rotation of their channels.
    clip: groups use this share of their range, about its centre; values beyond it saturate.
    small_scales: 8-bit scales and zeros (a key channel keeps one fp16 offset per page).
    paper_flush: pack as in KIVI's paper: keys residual_length tokens at a time, down to none, values one by one.
    """

    cache: KiviConfig = field(default_factory=KiviConfig)
    k_boost: float = 0.0
    rotate_v: bool = False
    clip: float = 1.0
    small_scales: bool = False
    paper_flush: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.k_boost <= 1:
            raise ValueError(f"k_boost: expected from 0 to 1, got {self.k_boost}")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip: expected above 0 and up to 1, got {self.clip}")

    @property
    def is_real(self) -> bool:
        """Whether a KiviCache of this config exists: no switch is on."""
        return self == SimConfig(self.cache)

    def bits(self, layer: int) -> tuple[int, int]:
        """(k_bits, v_bits) of a layer."""
        config = self.cache.for_layer(layer)
        return config.k_bits, config.v_bits

    def bits_per_element(self, layers: int, head_dim: int, tokens: int | None = None) -> float:
        """Bits of one element of K and V on average, scales and all. With tokens, sinks and residual count too."""
        G = self.cache.group_size
        per_group = 16 if self.small_scales else 32
        v_groups = -(-head_dim // G) / head_dim
        total = 0.0
        for layer in range(layers):
            k_bits, v_bits = self.bits(layer)
            total += k_bits + per_group / G + v_bits + per_group * v_groups
            total += 16 / PAGE if self.small_scales else 0
            total += 2 * self.k_boost + 1 / PAGE if self.k_boost else 0  # and a bit to say which channels
        packed = total / (2 * layers)
        if tokens is None:
            return packed
        share = PAGE * self.cache.pages(tokens) / tokens
        return share * packed + (1 - share) * 16


def quantize_keys(k: Tensor, config: SimConfig, layer: int) -> Tensor:
    """K [B, H, P * 128, D] of whole pages, quantized and dequantized."""
    bits, _ = config.bits(layer)
    pages = k.unflatten(2, (-1, PAGE)).transpose(-1, -2)  # [B, H, P, D, 128]
    out = _roundtrip(pages, bits, config, offset=True)
    if config.k_boost:
        count = round(config.k_boost * k.shape[-1])
        size = pages.float().abs().mean(-1)  # [B, H, P, D]
        top = torch.zeros_like(size, dtype=torch.bool).scatter_(-1, size.topk(count, dim=-1).indices, True)
        out = torch.where(top.unsqueeze(-1), _roundtrip(pages, bits + 2, config, offset=True), out)
    return out.transpose(-1, -2).flatten(2, 3)


def quantize_values(v: Tensor, config: SimConfig, layer: int) -> Tensor:
    """V [B, H, T, D], quantized and dequantized."""
    _, bits = config.bits(layer)
    if not config.rotate_v:
        return _roundtrip(v, bits, config)
    rotation = hadamard(v.shape[-1], v.device)
    rotated = (v.float() @ rotation).to(v.dtype)
    return (_roundtrip(rotated, bits, config).float() @ rotation.T).to(v.dtype)


def hadamard(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Orthogonal [size, size]: Hadamard blocks of the largest power of two that divides size."""
    block = size & -size
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix / block**0.5] * (size // block))


def _roundtrip(x: Tensor, bits: int, config: SimConfig, offset: bool = False) -> Tensor:
    """x [..., N] in groups along the last dimension, quantized and dequantized."""
    G = config.cache.group_size
    if config.clip == 1 and not config.small_scales:
        return reference.roundtrip(x, bits, G)
    size, top = x.shape[-1], 2**bits - 1
    groups = reference.grouped(x.float(), G)  # [..., N/G, G]
    low, high = groups.aminmax(dim=-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2 * config.clip
    low, scale = middle - reach, 2 * reach / top
    if config.small_scales:
        base = low.mean(-2, keepdim=True).to(x.dtype).float() if offset else torch.zeros_like(low)
        scale = _to_8_bits(scale)
        step = scale / 16
        low = base + ((low - base) / torch.where(step == 0, 1.0, step)).round().clamp(-128, 127) * step
    else:
        low, scale = low.to(x.dtype).float(), scale.to(x.dtype).float()
    code = ((groups - low) / torch.where(scale == 0, 1.0, scale)).round().clamp(0, top)
    return (code * scale + low).to(x.dtype).flatten(-2)[..., :size]


def _to_8_bits(scale: Tensor) -> Tensor:
    """Round a positive scale to 5 bits of exponent and 3 of mantissa."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 16).round() / 16, exponent)
