"""Quantize and pack K and V into the plain layouts."""

from torch import Tensor

from ..format import Packed, quantize
from .checks import check_bits, check_finite, check_group_size, check_kv, check_multiple


def quantize_k(k: Tensor, bits: int, group_size: int, *, checked: bool = True) -> Packed:
    """Quantize keys per channel: groups of group_size consecutive tokens share a scale and a zero.

    k: [B, H, T, D], fp16, bf16 or fp32, T a multiple of group_size and of 32 // bits.
    Returns code [B, H, D, T * bits / 32], scale and zero [B, H, D, T / group_size] in k's dtype.
    checked refuses NaN and inf (on a GPU it waits for the device); unchecked, they spoil their own group only.
    Raises ValueError naming the argument at fault.
    """
    check_bits(bits)
    check_group_size(group_size)
    check_kv("k", k)
    check_multiple("k", k.shape[2], group_size, "tokens, group_size")
    check_multiple("k", k.shape[2], 32 // bits, "tokens, codes per word")
    if checked:
        check_finite("k", k)
    return quantize(k, bits, group_size, "tokens")


def quantize_v(v: Tensor, bits: int, group_size: int, *, checked: bool = True) -> Packed:
    """Quantize values per token: groups of group_size consecutive channels share a scale and a zero.

    v: [B, H, T, D], fp16, bf16 or fp32, D a multiple of 32 // bits. The last group holds the remaining channels.
    Returns code [B, H, T, D * bits / 32], scale and zero [B, H, T, ceil(D / group_size)] in v's dtype.
    checked refuses NaN and inf (on a GPU it waits for the device); unchecked, they spoil their own group only.
    Raises ValueError naming the argument at fault.
    """
    check_bits(bits)
    check_group_size(group_size)
    check_kv("v", v)
    check_multiple("v", v.shape[3], 32 // bits, "channels, codes per word")
    if checked:
        check_finite("v", v)
    return quantize(v, bits, group_size, "channels")
