"""Stored shapes, the page layout and byte counts: the one place that knows them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
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
    The parts hold what the plain layouts hold, in the order in which matrix units read it, see docs/format.md.
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
    def k_groups(self) -> int:
        """Groups of tokens, each with a scale and a zero for every channel."""
        return PAGE // self.group_size

    @property
    def v_groups(self) -> int:
        """Groups of channels, each with a scale and a zero for every token."""
        return -(-self.head_dim // self.group_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """int32 words of the six parts, in order."""
        D, width = self.padded_dim, self.dtype.itemsize
        k_param, v_param = self.k_groups * D * width // 4, self.v_groups * PAGE * width // 4
        return PAGE * D * self.k_bits // 32, k_param, k_param, PAGE * D * self.v_bits // 32, v_param, v_param

    @property
    def words(self) -> int:
        """int32 words of a page."""
        return _words(self)


@lru_cache(maxsize=256)
def _words(layout: PageLayout) -> int:
    return sum(layout.sizes)


def to_pages(k: Tensor, v: Tensor, layout: PageLayout) -> Tensor:
    """Quantize k and v [B, H, P * 128, D] into pages [B, P, H, words] int32."""
    by_channel = k.unflatten(2, (-1, PAGE)).permute(0, 2, 1, 4, 3)  # [B, P, H, D, 128]
    by_token = v.unflatten(2, (-1, PAGE)).transpose(1, 2)  # [B, P, H, 128, D]
    k_code, k_scale, k_zero = reference.encode(by_channel, layout.k_bits, layout.group_size)
    v_code, v_scale, v_zero = reference.encode(by_token, layout.v_bits, layout.group_size)
    pad = (0, layout.padded_dim - layout.head_dim)
    k_code, k_scale, k_zero, v_code = (F.pad(x, pad) for x in (k_code.mT, k_scale.mT, k_zero.mT, v_code))
    parts = (
        reference.pack(_order_k_code(k_code, layout.k_bits), layout.k_bits),
        _order_k_param(k_scale),
        _order_k_param(k_zero),
        reference.pack(_order_v_code(v_code, layout.v_bits), layout.v_bits),
        _order_v_scale(v_scale),
        v_zero.mT.flatten(3),
    )
    return torch.cat([x.contiguous().view(torch.int32) for x in parts], dim=-1)


Parts = tuple[Tensor, Tensor, Tensor]


def page_parts(pages: Tensor, layout: PageLayout) -> tuple[Parts, Parts]:
    """Codes (int32), scales and zeros of pages [B, P, H, words], T = P * 128.

    Of K: [B, H, D, T] and [B, H, D, T / G]; of V: [B, H, T, padded D] and [B, H, T, ceil(D / G)].
    """
    k_words, *k_params, v_words, v_scale, v_zero = pages.split(list(layout.sizes), dim=-1)
    k_scale, k_zero, v_scale, v_zero = (x.contiguous().view(layout.dtype) for x in (*k_params, v_scale, v_zero))
    D, padded = layout.head_dim, layout.padded_dim
    k_parts = (
        _natural_k_code(k_words, padded, layout.k_bits),
        _natural_k_param(k_scale, padded).mT,
        _natural_k_param(k_zero, padded).mT,
    )
    v_parts = (
        _natural_v_code(v_words, padded, layout.v_bits),
        _natural_v_scale(v_scale, layout.v_groups),
        v_zero.unflatten(-1, (layout.v_groups, PAGE)).mT,
    )
    # keys: tokens are the last dimension of their layout, so pages join there: [B, H, D, P * n]
    k_code, k_scale, k_zero = (x[..., :D, :].permute(0, 2, 3, 1, 4).flatten(3) for x in k_parts)
    # values: [B, H, P * 128, n]
    v_code, v_scale, v_zero = (x.transpose(1, 2).flatten(2, 3) for x in v_parts)
    return (k_code, k_scale, k_zero), (v_code, v_scale, v_zero)


def from_pages(pages: Tensor, layout: PageLayout) -> tuple[Packed, Packed]:
    """Pages [B, P, H, words] int32 to K and V in the plain layouts, T = P * 128."""
    k, v = page_parts(pages, layout)
    return (
        Packed(reference.pack(k[0], layout.k_bits), k[1], k[2], layout.k_bits, layout.group_size, "tokens"),
        Packed(reference.pack(v[0], layout.v_bits), v[1], v[2], layout.v_bits, layout.group_size, "channels"),
    )


def decode_pages(pages: Tensor, layout: PageLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pages [B, P, H, words] to dequantized K and V [B, H, P * 128, D]."""
    k, v = (reference.decode(*parts, layout.group_size, dtype) for parts in page_parts(pages, layout))
    return k.mT, v[..., : layout.head_dim]


# The physical order of a page. Lane (row 8, pair 4) of a warp holds of a 16 x 16 matrix operand the elements
# (row + 8 * r0, 8 * r1 + 2 * pair + half): registers (r1, r0) of two halves. Rows are a page's tokens for keys and
# its channels for values. A half is 16 bits: 16 / bits codes, 16 tokens apart, the `slot`s; `plane` counts halves.
# Codes are listed as [plane, block of 16 channels, row, pair, r1, r0, half, slot], the last two filling a word.


def _order_k_code(code: Tensor, bits: int) -> Tensor:
    """[..., 128, D] to [..., 128 * D] in a page's order."""
    code = code.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, 16 // bits, 2, 8))
    return code.movedim((-8, -4, -5, -2, -3, -6, -1, -7), (-8, -7, -6, -5, -4, -3, -2, -1)).flatten(-8)


def _natural_k_code(words: Tensor, D: int, bits: int) -> Tensor:
    """Undo _order_k_code and the packing: words [..., 4 * D * bits] to codes [..., D, 128]."""
    words = words.unflatten(-1, (-1, D // 16, 8, 4, 2, 2))  # plane, block, row, pair, r1, r0
    words = words.movedim((-5, -2, -3, -6, -1, -4), (-6, -5, -4, -3, -2, -1)).contiguous()
    shift = _shifts(bits, words).view(2, 1, -1, 1, 1)  # half, plane, slot, r0, row
    code = (words.unsqueeze(-4).unsqueeze(-3) >> shift).bitwise_and_(2**bits - 1)
    return code.flatten(-4).flatten(-5, -2)


def _order_v_code(code: Tensor, bits: int) -> Tensor:
    """[..., 128, D] to [..., 128 * D] in a page's order."""
    code = code.unflatten(-1, (-1, 2, 8)).unflatten(-4, (-1, 16 // bits, 2, 4, 2))
    return code.movedim((-8, -3, -1, -5, -6, -2, -4, -7), (-8, -7, -6, -5, -4, -3, -2, -1)).flatten(-8)


def _natural_v_code(words: Tensor, D: int, bits: int) -> Tensor:
    """Undo _order_v_code and the packing: words [..., 4 * D * bits] to codes [..., 128, D]."""
    words = words.unflatten(-1, (-1, D // 16, 8, 4, 2, 2))  # plane, block, row, pair, r1, r0
    words = words.movedim((-6, -2, -3, -5, -1, -4), (-6, -5, -4, -3, -2, -1)).contiguous()
    shift = _shifts(bits, words).view(2, -1).T.reshape(-1, 1, 1, 2, 1, 1, 1)  # slot, r1, pair, half, block, r0, row
    code = (words.unsqueeze(-6).unsqueeze(-4) >> shift).bitwise_and_(2**bits - 1)
    return code.flatten(-3).flatten(-6, -2)


def _shifts(bits: int, like: Tensor) -> Tensor:
    """Where a word's codes begin, lowest first: those of one half, then those of the other."""
    return torch.arange(0, 32, bits, dtype=torch.int32, device=like.device)


def _order_k_param(x: Tensor) -> Tensor:
    """[..., 128 / G, D] to [..., 128 / G * D]: for each pair of lanes, its channels of 32 in a row (of 16, if D has
    an odd number of them)."""
    blocks = 2 - x.shape[-1] // 16 % 2
    return x.unflatten(-1, (-1, blocks, 2, 4, 2)).movedim(-2, -4).flatten(-6)


def _natural_k_param(x: Tensor, D: int) -> Tensor:
    """Undo _order_k_param."""
    return x.unflatten(-1, (-1, D // 16 // (2 - D // 16 % 2), 4, 2 - D // 16 % 2, 2, 2)).movedim(-4, -2).flatten(-5)


def _order_v_scale(x: Tensor) -> Tensor:
    """[..., 128, n] to [..., 128 * n]: 32 tokens of a group at a time, those of a pair of lanes in a row."""
    return x.unflatten(-2, (4, 2, 2, 4, 2)).movedim((-1, -3), (-5, -4)).flatten(-6)


def _natural_v_scale(x: Tensor, groups: int) -> Tensor:
    """Undo _order_v_scale."""
    return x.unflatten(-1, (4, groups, 4, 2, 2, 2)).movedim((-5, -4), (-1, -3)).flatten(-6, -2)
