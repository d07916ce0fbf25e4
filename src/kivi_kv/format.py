"""Stored shapes, the page layout and byte counts: the one place that knows them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from . import reference
from .config import PAGE, KiviConfig

CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM = 16
_LANE = 16  # a page pads D to a multiple of this, so that 2-bit codes fill whole words


@dataclass(frozen=True, slots=True)
class Packed:
    """x ~ code * scale + zero, zero being the group's minimum. Groups and words run along the last dimension.

    axis "tokens" (keys): code [B, H, D, T * bits / 32], scale and zero [B, H, D, T / G].
    axis "channels" (values): code [B, H, T, D * bits / 32], scale and zero [B, H, T, ceil(D / G)].
    code is int32, lowest bits first; scale and zero have the dtype of the input.
    """

    code: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group_size: int
    axis: Literal["tokens", "channels"]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.code.nbytes + self.scale.nbytes + self.zero.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The represented values [B, H, T, D], in dtype (default: that of the input)."""
        code = reference.unpack(self.code, self.bits)
        x = reference.decode(code, self.scale, self.zero, self.group_size, dtype or self.scale.dtype)
        return x.transpose(-1, -2) if self.axis == "tokens" else x


def quantize(x: Tensor, bits: int, group_size: int, axis: Literal["tokens", "channels"]) -> Packed:
    """Quantize x [B, H, T, D] by the reference. Shapes and values must have been checked."""
    lines = x.transpose(-1, -2) if axis == "tokens" else x
    code, scale, zero = reference.encode(lines, bits, group_size)
    return Packed(reference.pack(code, bits), scale, zero, bits, group_size, axis)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where everything lies in a page: 128 tokens of one kv head, K and V, as int32 words.

    A page is k_code | k_scale | k_zero | v_code | v_scale | v_zero. D is padded to a multiple of 16 with zeros.
    """

    k_bits: int
    v_bits: int
    group_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: KiviConfig, head_dim: int, dtype: torch.dtype) -> "PageLayout":
        return cls(config.k_bits, config.v_bits, config.group_size, head_dim, dtype)

    @property
    def padded_dim(self) -> int:
        return -(-self.head_dim // _LANE) * _LANE

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and elements of the six parts, in order; elements are int32 words or scales and zeros."""
        D, G = self.padded_dim, self.group_size
        k_code, k_param = (D, PAGE * self.k_bits // 32), (D, PAGE // G)
        v_code, v_param = (PAGE, D * self.v_bits // 32), (PAGE, -(-self.head_dim // G))
        return k_code, k_param, k_param, v_code, v_param, v_param

    @property
    def sizes(self) -> tuple[int, ...]:
        """int32 words of the six parts, in order."""
        width = self.dtype.itemsize
        return tuple(
            rows * n if part in (0, 3) else rows * n * width // 4 for part, (rows, n) in enumerate(self.shapes)
        )

    @property
    def words(self) -> int:
        """int32 words of a page."""
        return _words(self)


@lru_cache(maxsize=256)
def _words(layout: PageLayout) -> int:
    return sum(layout.sizes)


def to_pages(k: Tensor, v: Tensor, layout: PageLayout) -> Tensor:
    """Quantize k and v [B, H, P * 128, D] into pages [B, P, H, words] int32."""
    pad = layout.padded_dim - k.shape[-1]
    by_token = k.unflatten(2, (-1, PAGE)).permute(0, 2, 1, 4, 3)  # [B, P, H, D, 128]
    k_code, k_scale, k_zero = reference.encode(by_token, layout.k_bits, layout.group_size)
    by_channel = v.unflatten(2, (-1, PAGE)).transpose(1, 2)  # [B, P, H, 128, D]
    v_code, v_scale, v_zero = reference.encode(by_channel, layout.v_bits, layout.group_size)
    if pad:
        k_code, k_scale, k_zero = (_pad(x, 0, pad) for x in (k_code, k_scale, k_zero))
        v_code = _pad(v_code, pad, 0)
    k_code, v_code = reference.pack(k_code, layout.k_bits), reference.pack(v_code, layout.v_bits)
    parts = (k_code, k_scale, k_zero, v_code, v_scale, v_zero)
    return torch.cat([x.flatten(3).contiguous().view(torch.int32) for x in parts], dim=-1)


def from_pages(pages: Tensor, layout: PageLayout) -> tuple[Packed, Packed]:
    """Pages [B, P, H, words] int32 to K and V in the plain layouts, T = P * 128."""
    raw = pages.split(list(layout.sizes), dim=-1)
    parts = [
        (x if part in (0, 3) else x.contiguous().view(layout.dtype)).unflatten(-1, shape)  # [B, P, H, rows, n]
        for part, (x, shape) in enumerate(zip(raw, layout.shapes, strict=True))
    ]
    D = layout.head_dim
    # keys: tokens are the last dimension, so pages join there: [B, H, D, P * n]
    k = [x[..., :D, :].permute(0, 2, 3, 1, 4).flatten(3) for x in parts[:3]]
    # values: [B, H, P * 128, n]
    v = [x.transpose(1, 2).flatten(2, 3) for x in parts[3:]]
    return (
        Packed(k[0], k[1], k[2], layout.k_bits, layout.group_size, "tokens"),
        Packed(v[0], v[1], v[2], layout.v_bits, layout.group_size, "channels"),
    )


def decode_pages(pages: Tensor, layout: PageLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pages [B, P, H, words] to dequantized K and V [B, H, P * 128, D]."""
    k, v = from_pages(pages, layout)
    return k.dequantize(dtype), v.dequantize(dtype)[..., : layout.head_dim]


def _pad(x: Tensor, columns: int, rows: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns, 0, rows))
