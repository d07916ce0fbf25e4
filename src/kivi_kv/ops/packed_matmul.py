"""Matrix product with a packed right-hand side."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .checks import check_bits, check_float, check_group_size, check_shape
from .dispatch import choose, on_device

_ROWS = 1024  # rows of the packed matrix that are dequantized at a time


def packed_matmul(
    group_size: int,
    a: Tensor,
    code: Tensor,
    scale: Tensor,
    zero: Tensor,
    bits: int,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """a times a packed matrix: q @ K^T with quantize_k's fields, p @ V with quantize_v's.

    a: [B, HQ, M, K], fp16, bf16 or fp32. The packed matrix is logically [B, H, K, N]: code
    [B, H, K, N * bits / 32] int32, scale and zero [B, H, K, ceil(N / group_size)]. HQ is a multiple of H; query
    head h reads kv head h // (HQ // H). Accumulates in fp32. Returns [B, HQ, M, N] in out_dtype (default: a's);
    unscaled logits of real keys can exceed fp16, so take float32 for them. backend: see ops.dispatch; the kernel
    takes scales and zeros of a's dtype, and reads each packed word once for up to 16 rows of a kv head.
    Raises ValueError naming the argument at fault.
    """
    check_bits(bits)
    check_group_size(group_size)
    check_float("a", a)
    if a.ndim != 4 or code.ndim != 4:
        raise ValueError(f"a, code: expected 4 dims each, got {tuple(a.shape)} and {tuple(code.shape)}")
    if code.dtype != torch.int32:
        raise ValueError(f"code: expected int32, got {code.dtype}")
    B, HQ, _, K = a.shape
    H, N = code.shape[1], code.shape[-1] * 32 // bits
    if H == 0 or HQ % H:
        raise ValueError(f"a: expected heads a multiple of code's {H}, got {HQ}")
    if code.shape[2] != K:
        raise ValueError(f"a: expected its last dimension to be code's K = {code.shape[2]}, got {K}")
    check_shape("code", code, (B, H, K, code.shape[-1]))
    for name, x in (("scale", scale), ("zero", zero)):
        check_float(name, x)
        check_shape(name, x, (B, H, K, -(-N // group_size)))
        if x.device != a.device or code.device != a.device:
            raise ValueError(f"{name}: expected all arguments on {a.device}, got {x.device} and {code.device}")

    dtype = a.dtype if scale.dtype == zero.dtype == a.dtype else torch.float32
    run = _MATMUL[choose("packed_matmul", a.device, dtype, backend)]
    return run(group_size, a, code, scale, zero, bits, out_dtype or a.dtype)


def _matmul_torch(
    group_size: int, a: Tensor, code: Tensor, scale: Tensor, zero: Tensor, bits: int, out_dtype: torch.dtype
) -> Tensor:
    B, HQ, M, K = a.shape
    H, N = code.shape[1], code.shape[-1] * 32 // bits
    rows = a.float().reshape(B, H, HQ // H * M, K)  # the heads of a group share every dequantized row
    out = a.new_zeros((B, H, HQ // H * M, N), dtype=torch.float32)
    for start in range(0, K, _ROWS):
        part = slice(start, start + _ROWS)
        words = reference.unpack(code[:, :, part], bits)
        block = reference.decode(words, scale[:, :, part], zero[:, :, part], group_size, torch.float32)
        out += rows[..., part] @ block
    return out.view(B, HQ, M, N).to(out_dtype)


def _matmul_triton(group_size: int, a: Tensor, *args: Any) -> Tensor:
    from .kernels.matmul import packed_matmul_triton  # triton need not be installed

    with on_device(a.device):
        return packed_matmul_triton(group_size, a, *args)


_MATMUL: dict[str, Callable[..., Tensor]] = {"reference": _matmul_torch, "triton": _matmul_triton}
