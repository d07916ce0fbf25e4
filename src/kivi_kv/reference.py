"""The number format, as executable specification: pure torch, groups along the last dimension.

Everything else in this package, kernels included, must produce these codes, scales and zeros bit for bit.
docs/format.md says the same in words. Keys come in as [B, H, D, T] (groups of tokens), values as
[B, H, T, D] (groups of channels): the grouped and packed dimension is always the last one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(code: Tensor, bits: int) -> Tensor:
    """Integer codes [..., N] to int32 words [..., N * bits / 32], lowest bits first."""
    lanes = 32 // bits
    shift = torch.arange(lanes, dtype=torch.int32, device=code.device) * bits
    return (code.int().unflatten(-1, (-1, lanes)) << shift).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., N * bits / 32] to int32 codes [..., N]."""
    shift = torch.arange(32 // bits, dtype=torch.int32, device=words.device) * bits
    return (words.unsqueeze(-1) >> shift).bitwise_and_(2**bits - 1).flatten(-2)


def encode(x: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [..., N] in groups of group_size; the last group may be shorter.

    Returns code [..., N] int32, scale and zero [..., ceil(N / group_size)] in x's dtype.
    """
    top, size = 2**bits - 1, x.shape[-1]
    groups = grouped(x.float(), group_size)  # [..., N/G, G]
    low, high = (x + 0.0 for x in groups.aminmax(dim=-1, keepdim=True))  # -0.0 becomes 0.0
    # bf16 and fp32 ranges can overflow fp32: such a group is computed on halves (exact at that size)
    half = torch.where((high - low).isinf(), 0.5, 1.0)
    zero = low.to(x.dtype)
    limit = torch.finfo(x.dtype).max  # only one-bit groups over the whole range of x.dtype reach it
    scale = ((high * half - low * half) / (top * half)).clamp(max=limit).to(x.dtype)
    step = torch.where(scale == 0, 1.0, scale.float() * half)  # scale 0: a constant group, every code 0
    code = ((groups * half - zero.float() * half) / step).round().nan_to_num(nan=top).clamp(0, top)
    code = torch.where(scale == 0, 0.0, code)
    return code.flatten(-2)[..., :size].int(), scale.squeeze(-1), zero.squeeze(-1)


def decode(code: Tensor, scale: Tensor, zero: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """code * scale + zero in fp32 (two roundings), held within the finite range of dtype, [..., N]."""
    groups = grouped(code.float(), group_size)
    scale, zero = scale.float().unsqueeze(-1), zero.float().unsqueeze(-1)
    value = groups * scale + zero
    value = torch.where(value.isfinite(), value, 2 * (groups * (scale / 2) + zero / 2))
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return value.clamp(-limit, limit).to(dtype).flatten(-2)[..., : code.shape[-1]]


def roundtrip(x: Tensor, bits: int, group_size: int) -> Tensor:
    """x [..., N] quantized and dequantized, in its own dtype."""
    return decode(*encode(x, bits, group_size), group_size, x.dtype)


def grouped(x: Tensor, group_size: int) -> Tensor:
    """[..., N] to [..., ceil(N/G), G]; a short last group repeats its last element, which moves no range."""
    size = x.shape[-1]
    group_size = min(group_size, size)
    missing = -size % group_size
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1)
    return x.unflatten(-1, (-1, group_size))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int | None = None) -> Tensor:
    """Attention in fp64 over dense K and V, what every kernel is compared with.

    q [B, HQ, M, D], k and v [B, H, T, D], HQ a multiple of H. Query m sees keys 0 .. offset + m; offset
    defaults to T - M (the queries are the newest tokens). Returns [B, HQ, M, D] in fp64.
    """
    heads = q.shape[1] // k.shape[1]
    tokens, queries = k.shape[2], q.shape[2]
    offset = tokens - queries if offset is None else offset
    k, v = (x.double().repeat_interleave(heads, dim=1) for x in (k, v))
    seen = torch.arange(tokens, device=q.device) <= offset + torch.arange(queries, device=q.device)[:, None]
    logits = (q.double() @ k.transpose(-1, -2)) * scale
    return F.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1) @ v
