"""Matrix product with a packed right-hand side: codes become numbers in registers, on the way into the product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .occupancy import resident_warps

_ROWS, _BLOCK_WORDS = 16, 32  # of a step: rows of a, words of each row of the packed matrix


@triton.jit
def _pairs(parts, N: tl.constexpr):
    """Join part i of N with part i + N / 2, elementwise: [R, W, n] twice to [R, W, 2 n]."""
    R: tl.constexpr = parts[0].shape[0]
    W: tl.constexpr = parts[0].shape[1]
    n: tl.constexpr = parts[0].shape[2]
    joined = ()
    for i in tl.static_range(N // 2):
        joined = joined + (tl.join(parts[i], parts[i + N // 2]).reshape([R, W, 2 * n]),)
    return joined


@triton.jit
def _lane_codes(words, LANE: tl.constexpr, BITS: tl.constexpr, DOT: tl.constexpr):
    """Codes of one lane of words, less 2^(BITS - 1): mantissa bits where they stand, less the rest of the number.

    One shift serves all the lanes of a half word that a mantissa holds at once; the arithmetic on halves is paired.
    """
    if (BITS == 8 and DOT == tl.bfloat16) or DOT == tl.float32:
        number = (((words >> (LANE * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))).to(tl.float32).to(DOT)
    else:
        MANTISSA: tl.constexpr = 10 if DOT == tl.float16 else 7
        ORIGIN: tl.constexpr = 0x6400 if DOT == tl.float16 else 0x4300  # 2^MANTISSA
        FIT: tl.constexpr = MANTISSA // BITS  # codes of a half word that a mantissa holds at once
        SHIFT: tl.constexpr = LANE * BITS // 16 * 16 + LANE * BITS % 16 // (FIT * BITS) * (FIT * BITS)
        AT: tl.constexpr = LANE * BITS - SHIFT
        MASK: tl.constexpr = ((1 << BITS) - 1) << AT
        number = (((words >> SHIFT).to(tl.int16) & MASK) | ORIGIN).to(DOT, bitcast=True)
        number = number * (1.0 / (1 << AT)) - ((1 << MANTISSA) / (1 << AT) + (1 << (BITS - 1)))
    return number


@triton.jit
def _add(a, b, total, factor: tl.constexpr, FLUSH: tl.constexpr):
    """total + a . b, or, if FLUSH, total + (a . b) * factor, the sum in fp32 outside the matrix unit."""
    if FLUSH:
        total = tl.dot(a, b, input_precision="ieee") * factor + total
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


# strides that grow with the context are not specialized either: no compilation per length
_LENGTHS = ["M", "K", "W", "SPLIT_K", "SPLITS", "stride_ab", "stride_ah", "stride_am"]
_LENGTHS += [f"stride_{x}{dim}" for x in "csz" for dim in "bhk"]


@triton.jit(do_not_specialize=_LENGTHS)
def packed_matmul_kernel(
    a_ptr, code_ptr, scale_ptr, zero_ptr, out_ptr,
    stride_ab, stride_ah, stride_am, stride_ak, stride_cb, stride_ch, stride_ck, stride_cw,
    stride_sb, stride_sh, stride_sk, stride_sg, stride_zb, stride_zh, stride_zk, stride_zg,
    H, M, K, W, SPLIT_K, SPLITS,
    GQ: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    DOT: tl.constexpr, GUARD: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """out [SPLITS, B, HQ, M, N] fp32: R rows (query tokens of a kv head's heads) by BW words, over one split of K.

    a . (code * scale + zero) = a . ((code - c) * scale) + a . (zero + c * scale), c = 2^(BITS - 1): one product per
    lane of the words, and one for all. About a group's middle both stay small; from its zero, two long sums of one
    sign each would cancel. GUARD keeps code * scale within fp16. FLUSH adds each step's products to the sums in
    fp32: a matrix unit cuts what it adds to a long sum.
    """
    LANES: tl.constexpr = 32 // BITS
    tile, rows = tl.program_id(0) % tl.cdiv(W, BW), tl.program_id(0) // tl.cdiv(W, BW)
    bh, split = tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    row = rows * R + tl.arange(0, R)
    word = tile * BW + tl.arange(0, BW)
    inside = word < W
    # row = query head of the group * M + query token
    a_row = a_ptr + b * stride_ab + (h * GQ + row // M) * stride_ah + (row % M).to(tl.int64) * stride_am
    code_ptr += b * stride_cb + h * stride_ch + word.to(tl.int64) * stride_cw
    scale_ptr += b * stride_sb + h * stride_sh
    zero_ptr += b * stride_zb + h * stride_zh
    SHARED: tl.constexpr = G % LANES == 0  # all lanes of a word are of one group
    acc, zeros = (), ()
    for lane in tl.static_range(LANES):
        acc = acc + (tl.zeros([R, BW], tl.float32),)
        if lane == 0 or not SHARED:
            zeros = zeros + (tl.zeros([R, BW], tl.float32),)
    for start in range(split * SPLIT_K, tl.minimum((split + 1) * SPLIT_K, K), BK):
        k = start + tl.arange(0, BK)
        mask = (k < K)[:, None] & inside[None, :]
        k = k.to(tl.int64)
        a_mask = (row < GQ * M)[:, None] & (k < K)[None, :]
        a = tl.load(a_row[:, None] + k[None, :] * stride_ak, mask=a_mask, other=0.0).to(DOT)
        words = tl.load(code_ptr[None, :] + k[:, None] * stride_ck, mask=mask, other=0)
        sums, zero_sums = (), ()
        for lane in tl.static_range(LANES):
            if lane == 0 or not SHARED:
                group = ((word * LANES + lane) // G).to(tl.int64)
                scale = tl.load(
                    scale_ptr + k[:, None] * stride_sk + group[None, :] * stride_sg, mask=mask, other=0.0
                )
                scale = scale.to(tl.float32)
                zero = tl.load(zero_ptr + k[:, None] * stride_zk + group[None, :] * stride_zg, mask=mask, other=0.0)
                middle = ((zero.to(tl.float32) + scale * (1 << (BITS - 1))) * GUARD).to(DOT)
                zero_sums = zero_sums + (_add(a, middle, zeros[lane], 1.0 / GUARD, FLUSH),)
                scale = (scale * GUARD).to(DOT)
            value = _lane_codes(words, lane, BITS, DOT) * scale
            sums = sums + (_add(a, value, acc[lane], 1.0 / GUARD, FLUSH),)
        acc, zeros = sums, zero_sums
    parts = ()
    for lane in tl.static_range(LANES):
        total = acc[lane] + zeros[0 if SHARED else lane]
        if not FLUSH:
            total = total * (1.0 / GUARD)
        parts = parts + (total[:, :, None],)
    if LANES == 16:
        parts = _pairs(parts, 16)
    if LANES >= 8:
        parts = _pairs(parts, 8)
    parts = _pairs(_pairs(parts, 4), 2)
    n = tile * (BW * LANES) + tl.arange(0, BW * LANES)
    N = W.to(tl.int64) * LANES
    at = out_ptr + ((split * (tl.num_programs(1) // H) + b) * H + h) * (GQ * M) * N + row.to(tl.int64)[:, None] * N
    tl.store(at + n[None, :], parts[0].reshape([R, BW * LANES]), mask=(row < GQ * M)[:, None] & (n < N)[None, :])


def packed_matmul_triton(
    group_size: int, a: Tensor, code: Tensor, scale: Tensor, zero: Tensor, bits: int, out_dtype: torch.dtype
) -> Tensor:
    """ops.packed_matmul by the kernel above. Arguments must have been checked."""
    B, HQ, M, K = a.shape
    H, W = code.shape[1], code.shape[3]
    GQ, lanes = HQ // H, 32 // bits
    # a warp's product is 8 words wide; two warps of 16 words would each compute all of it
    BW, BK, warps = (_BLOCK_WORDS, 16, _BLOCK_WORDS // 8) if W >= _BLOCK_WORDS else (8, 32, 1)
    tiles = triton.cdiv(W, BW) * triton.cdiv(GQ * M, _ROWS)
    # a short N leaves programs free: they share K
    splits = max(1, min(triton.cdiv(K, 4 * BK), resident_warps(a.device) // (warps * tiles * B * H)))
    split_k = triton.cdiv(triton.cdiv(K, splits), BK) * BK
    splits = triton.cdiv(K, split_k)
    upcast = triton.knobs.runtime.interpret and a.dtype == torch.bfloat16  # the interpreter has no product of bf16
    dot = tl.float32 if upcast else tl.float16 if a.dtype == torch.float16 else tl.bfloat16
    out = torch.empty((splits, B, HQ, M, W * lanes), dtype=torch.float32, device=a.device)
    packed_matmul_kernel[(tiles, B * H, splits)](
        a, code, scale, zero, out, *a.stride(), *code.stride(), *scale.stride(), *zero.stride(),
        H, M, K, W, split_k, splits,
        GQ=GQ, BITS=bits, G=group_size, R=_ROWS, BK=BK, BW=BW, DOT=dot,
        GUARD=0.25, FLUSH=K > 1024,
        num_warps=warps,
        num_stages=1,  # more of them keep the unpacking from the operand's registers
    )  # fmt: skip
    return (out[0] if splits == 1 else out.sum(0)).to(out_dtype)
