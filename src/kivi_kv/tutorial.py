"""The functions of a tutorial on KIVI kernels, under its names and layouts, and right where its listings are not.

docs/tutorial.md walks through them and says, line by line, what was mended. Each is a thin call of this package's
own operators; use those in new code.
"""

import torch
from torch import Tensor

from .ops import pack, packed_matmul, quantize_k, quantize_v, unpack


def quant_kcache(k: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize keys [B, nh, T, D] in groups of group_size tokens of a channel.

    Returns code [B, nh, T / feat, D] int32, packed along the tokens (feat = 32 // bits codes a word), scale and mn
    [B, nh, T / group_size, 1, D] in k's dtype. The matmul wants channels first, tokens last:

    >>> code, scale, mn = quant_kcache(k, group_size, bits)
    >>> qB = code.transpose(2, 3)  # [B, nh, D, T / feat]
    >>> scales, zeros = (x.squeeze(3).transpose(2, 3) for x in (scale, mn))  # [B, nh, D, T / group_size]
    >>> scores = triton_bmm_fA_qB_outer(group_size, q, qB, scales, zeros, bits)  # [B, nh, M, T]

    The views cost nothing: the kernel takes any strides. Raises ValueError naming the argument at fault.
    """
    packed = quantize_k(k, bits, group_size)
    scale, mn = (x.transpose(2, 3).unsqueeze(3) for x in (packed.scale, packed.zero))
    return packed.code.transpose(2, 3), scale, mn


def quant_vcache(v: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize values [B, nh, T, D] in groups of group_size channels of a token.

    Returns code [B, nh, T, D / feat] int32, packed along the channels, scale and mn [B, nh, T, D / group_size, 1]
    in v's dtype. The matmul takes code as it is, and scale.squeeze(-1) and mn.squeeze(-1).
    Raises ValueError naming the argument at fault.
    """
    packed = quantize_v(v, bits, group_size)
    return packed.code, packed.scale.unsqueeze(-1), packed.zero.unsqueeze(-1)


def pack_tensor(data: Tensor, bits: int, pack_dim: int) -> Tensor:
    """Pack integer codes along pack_dim, 32 // bits to an int32 word, lowest bits first."""
    return pack(data, bits, pack_dim)


def unpack_tensor(code: Tensor, bits: int, pack_dim: int) -> Tensor:
    """Undo pack_tensor: int32 words to int32 codes."""
    return unpack(code, bits, pack_dim)


def triton_bmm_fA_qB_outer(
    group_size: int, fA: Tensor, qB: Tensor, scales: Tensor, zeros: Tensor, bits: int
) -> Tensor:
    """fA [B, nh, M, K] times a packed matrix [B, nh_kv, K, N]; groups and words run along N. Returns [B, nh, M, N].

    qB: [B, nh_kv, K, N / feat] int32; scales, zeros: [B, nh_kv, K, N / group_size]. nh is a multiple of nh_kv.
    Results beyond the range of fA's dtype are held at its ends (packed_matmul's out_dtype gives them in fp32).
    """
    out = packed_matmul(group_size, fA, qB, scales, zeros, bits, out_dtype=torch.float32)
    limit = torch.finfo(fA.dtype).max
    return out.clamp_(-limit, limit).to(fA.dtype)
