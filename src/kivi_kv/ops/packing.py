"""Bit packing along any dimension."""

import torch
from torch import Tensor

from .. import reference
from .checks import check_bits, check_multiple


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack integer codes into int32 words along dim, lowest bits first.

    codes: any shape, integers in [0, 2**bits - 1]; the length of dim a multiple of 32 // bits.
    Returns int32 words, dim being 32 // bits times shorter.
    Raises ValueError for another bit width, length, dtype or dim, and for codes out of range.
    """
    check_bits(bits)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes: expected an integer dtype, got {codes.dtype}")
    dim = _check_dim("codes", codes, dim)
    check_multiple("codes", codes.shape[dim], 32 // bits, f"length of dim {dim}, codes per word")
    if codes.numel():
        low, high = codes.min().item(), codes.max().item()
        if low < 0 or high >= 2**bits:
            raise ValueError(f"codes: expected values from 0 to {2**bits - 1}, got {low} to {high}")
    return reference.pack(codes.movedim(dim, -1), bits).movedim(-1, dim)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Undo pack: int32 words to int32 codes, dim being 32 // bits times longer.

    Raises ValueError for another bit width, dtype or dim.
    """
    check_bits(bits)
    if words.dtype != torch.int32:
        raise ValueError(f"words: expected int32, got {words.dtype}")
    dim = _check_dim("words", words, dim)
    return reference.unpack(words.movedim(dim, -1), bits).movedim(-1, dim)


def _check_dim(name: str, x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim: expected from {-x.ndim} to {x.ndim - 1} for {name} of {x.ndim} dims, got {dim}")
    return dim % x.ndim
