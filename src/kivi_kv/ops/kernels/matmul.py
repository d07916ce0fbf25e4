"""Matrix product with a packed right-hand side: codes become numbers in registers, on the way into the product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .occupancy import resident_warps

# Of a program, one warp: words BW of a row of the packed matrix (8 or 16), rows BK of a product (a multiple of 16),
# products STEPS whose operands are loaded at once. FILL: programs when K is split, in units of resident_warps.
_TUNING = {
    "wide": {"BW": 8, "BK": 32, "STEPS": 2, "FILL": 2.0},  # K^T: few rows of many words
    "narrow": {"BW": 8, "BK": 32, "STEPS": 1, "FILL": 2.0},  # V: many rows of few words
}


@triton.jit
def _pairs(parts, N: tl.constexpr):
    """Join part i of N with part i + N / 2, elementwise: [W, R, n] twice to [W, R, 2 n]."""
    W: tl.constexpr = parts[0].shape[0]
    R: tl.constexpr = parts[0].shape[1]
    n: tl.constexpr = parts[0].shape[2]
    joined = ()
    for i in tl.static_range(N // 2):
        joined = joined + (tl.join(parts[i], parts[i + N // 2]).reshape([W, R, 2 * n]),)
    return joined


@triton.jit
def _slot_codes(halves, SLOT: tl.constexpr, BITS: tl.constexpr, DOT: tl.constexpr):
    """Codes of one slot of halves [rows, n], two of successive k in an int32, less 2^(BITS - 1): [rows, 2 n].

    Mantissa bits where they stand, less the rest of the number: one shift serves all the slots that a mantissa
    holds at once, and all the arithmetic is paired.
    """
    DIRECT: tl.constexpr = (BITS == 8 and DOT == tl.bfloat16) or DOT == tl.float32
    MANTISSA: tl.constexpr = 10 if DOT == tl.float16 else 7
    FIT: tl.constexpr = 1 if DIRECT else MANTISSA // BITS  # codes of a half that a mantissa holds at once
    SHIFT: tl.constexpr = SLOT // FIT * FIT * BITS
    AT: tl.constexpr = SLOT * BITS - SHIFT
    codes = (halves >> SHIFT) & (((1 << BITS) - 1) * 0x10001 << AT)
    if not DIRECT:
        codes = codes | (0x64006400 if DOT == tl.float16 else 0x43004300)  # 2^MANTISSA
    low, high = codes & 0xFFFF, (codes >> 16) & 0xFFFF
    if DIRECT:
        number = tl.join(low.to(tl.float32), high.to(tl.float32)) - (1 << (BITS - 1))
        number = number.to(DOT)
    else:
        number = tl.join(low.to(tl.int16).to(DOT, bitcast=True), high.to(tl.int16).to(DOT, bitcast=True))
        number = number * (1.0 / (1 << AT)) - ((1 << MANTISSA) / (1 << AT) + (1 << (BITS - 1)))
    return number.reshape([halves.shape[0], 2 * halves.shape[1]])


@triton.jit
def _load_rows(ptr, k, stride, K, inside):
    """Rows k and k + 1 of a field of the packed matrix."""
    at, inside = ptr + k.to(tl.int64) * stride, inside & (k < K)
    return tl.load(at, mask=inside, other=0), tl.load(at + stride, mask=inside & (k + 1 < K), other=0)


@triton.jit
def _spread(x, y):
    """Join [4, 8, U, J] with another: [J, 8, U / 2, 4, 2, 2], where a matrix unit has rows of the packed matrix.

    Triton gives a dot operand that went through a join threads of 4 successive k: then no layout changes here.
    """
    x = tl.join(x, y).reshape([4, 8, x.shape[2] // 2, 2, x.shape[3], 2])
    return x.permute(4, 1, 2, 0, 3, 5)


@triton.jit
def _factors(scale, zero, BITS: tl.constexpr, GUARD: tl.constexpr, DOT: tl.constexpr):
    """Loaded scales and zeros of words [J, 8, BK]: scales and middles of their groups, times GUARD."""
    J: tl.constexpr = scale[0].shape[3]
    BK: tl.constexpr = 8 * scale[0].shape[2]
    scales = _spread(scale[0].to(DOT), scale[1].to(DOT)).reshape([J, 8, BK]) * GUARD
    zeros = _spread(zero[0].to(DOT), zero[1].to(DOT)).reshape([J, 8, BK]) * GUARD
    return scales, zeros + scales * (1 << (BITS - 1))


@triton.jit
def _both_halves(x, J: tl.constexpr):
    """[1 or J, 8, BK] that both halves of J words share: an operand [16 J, BK]."""
    return tl.broadcast_to(x[:, None], [J, 2, 8, x.shape[2]]).reshape([16 * J, x.shape[2]])


@triton.jit
def _halves(low, high):
    """[J, 8, BK] of the low halves of words, and of the high ones: an operand [16 J, BK]."""
    return tl.join(low, high).permute(0, 3, 1, 2).reshape([16 * low.shape[0], low.shape[2]])


@triton.jit
def _add(a, b, total, factor: tl.constexpr, FLUSH: tl.constexpr):
    """total + a . b, or, if FLUSH, total + (a . b) * factor, the sum in fp32 outside the matrix unit."""
    if FLUSH:
        total = tl.dot(a, b, input_precision="ieee") * factor + total
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


# strides that grow with the context are not specialized either: no compilation per length
_LENGTHS = ["M", "K", "W", "stride_cw", "SPLIT_K", "stride_ab", "stride_ah", "stride_am"]
_LENGTHS += [f"stride_{x}{dim}" for x in "csz" for dim in "bhk"]


@triton.jit(do_not_specialize=_LENGTHS)
def packed_matmul_kernel(
    a_ptr, code_ptr, scale_ptr, zero_ptr, out_ptr,
    stride_ab, stride_ah, stride_am, stride_ak, stride_cb, stride_ch, stride_ck, stride_cw,
    stride_sb, stride_sh, stride_sk, stride_sg, stride_zb, stride_zh, stride_zk, stride_zg,
    H, M, K, W, SPLIT_K,
    GQ: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    STEPS: tl.constexpr, DOT: tl.constexpr, GUARD: tl.constexpr, FLUSH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out [SPLITS, B, HQ, M, N]: BW words by R rows (query tokens of a kv head's heads), over one split of K.

    a . (code * scale + zero) = a . ((code - c) * scale) + a . (zero + c * scale), c = 2^(BITS - 1): one product per
    lane of the words, and one for all. About a group's middle both stay small; from its zero, two long sums of one
    sign each would cancel. GUARD keeps code * scale within fp16. FLUSH adds each step's products to the sums in
    fp32: a matrix unit cuts what it adds to a long sum.

    The packed matrix stands on the left, both halves of 8 words along the 16 rows of a matrix unit. ALIGNED: W, K
    and strides are even, which makes one load of two.
    """
    LANES: tl.constexpr = 32 // BITS
    SLOTS: tl.constexpr = LANES // 2  # lanes of a half
    J: tl.constexpr = BW // 8
    SHARED: tl.constexpr = G % LANES == 0  # all lanes of a word are of one group
    GJ: tl.constexpr = 1 if SHARED and G // LANES % J == 0 else J  # groups of J successive words
    if ALIGNED:
        W, K, stride_ck = W // 2 * 2, K // 2 * 2, stride_ck // 2 * 2
        stride_cb, stride_ch = stride_cb // 2 * 2, stride_ch // 2 * 2
        stride_ab, stride_ah, stride_am = stride_ab // 2 * 2, stride_ah // 2 * 2, stride_am // 2 * 2
    tile, row0 = tl.program_id(0) % tl.cdiv(W, BW), tl.program_id(0) // tl.cdiv(W, BW) * R
    bh, split = tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    # [4, 8, U, J]: as a matrix unit spreads rows k (4, U) and words (8, J) over threads (4, 8) and registers (U, J)
    t = tl.arange(0, 4)[:, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None]
    u = tl.arange(0, BK // 8)[None, None, :, None]
    word = tile * BW + g * J + tl.arange(0, J)[None, None, None, :]
    first = tile * BW + g * J + tl.arange(0, GJ)[None, None, None, :]  # word of a group
    row = row0 + tl.arange(0, R)[None, :, None, None]
    # row = query head of the group * M + query token
    a_ptr += b * stride_ab + (h * GQ + row // M) * stride_ah + (row % M).to(tl.int64) * stride_am
    code_ptr += b * stride_cb + h * stride_ch
    code_ptr += word.to(tl.int64) if ALIGNED and J > 1 else word.to(tl.int64) * stride_cw
    scale_ptr += b * stride_sb + h * stride_sh
    zero_ptr += b * stride_zb + h * stride_zh
    acc, zeros = (), tl.zeros([2 * BW, R], tl.float32)
    for _slot in tl.static_range(SLOTS):
        acc = acc + (zeros,)
    for i in range(split * SPLIT_K, tl.minimum((split + 1) * SPLIT_K, tl.cdiv(K, BK * STEPS))):
        # i ^ 0, but what this is LLVM cannot know: else it would keep a pointer in registers for every load
        start = (i ^ (M >> 31)) * (BK * STEPS)
        queries, words, scales, offsets = (), (), (), ()
        for step in tl.static_range(STEPS):
            k = start + step * BK + (u * 4 + t) * 2
            ak = k + tl.arange(0, 2)[None, None, None, :]
            a = tl.load(a_ptr + ak.to(tl.int64) * stride_ak, mask=(ak < K) & (row < GQ * M), other=0.0)
            queries = queries + (a.to(DOT),)
            words = words + (_load_rows(code_ptr, k, stride_ck, K, word < W),)
            if SHARED:
                group = (first * LANES // G).to(tl.int64)
                scales = scales + (_load_rows(scale_ptr + group * stride_sg, k, stride_sk, K, first < W),)
                offsets = offsets + (_load_rows(zero_ptr + group * stride_zg, k, stride_zk, K, first < W),)
        for step in tl.static_range(STEPS):
            a = queries[step].reshape([4, R, BK // 16, 2, 2]).permute(2, 0, 3, 4, 1).reshape([BK, R])
            even, odd = words[step]
            low, high = (even & 0xFFFF) | (odd << 16), ((even >> 16) & 0xFFFF) | (odd & -65536)
            halves = _spread(low, high).permute(0, 5, 1, 2, 3, 4).reshape([2 * BW, BK // 2])
            if SHARED:
                scale, middle = _factors(scales[step], offsets[step], BITS, GUARD, DOT)
                scale = _both_halves(scale, J)
                zeros = _add(_both_halves(middle, J), a, zeros, 1.0 / GUARD, FLUSH)
            sums = ()
            for slot in tl.static_range(SLOTS):
                total = acc[slot]
                if not SHARED:
                    k = start + step * BK + (u * 4 + t) * 2
                    scale, middle = (), ()
                    for half in tl.static_range(2):
                        group = ((word * LANES + half * SLOTS + slot) // G).to(tl.int64)
                        scales = _load_rows(scale_ptr + group * stride_sg, k, stride_sk, K, word < W)
                        offsets = _load_rows(zero_ptr + group * stride_zg, k, stride_zk, K, word < W)
                        factors = _factors(scales, offsets, BITS, GUARD, DOT)
                        scale, middle = scale + (factors[0],), middle + (factors[1],)
                    scale = _halves(scale[0], scale[1])
                    total = _add(_halves(middle[0], middle[1]), a, total, 1.0 / GUARD, FLUSH)
                value = _slot_codes(halves, slot, BITS, DOT) * scale
                sums = sums + (_add(value, a, total, 1.0 / GUARD, FLUSH),)
            acc = sums
    parts = ()
    for slot in tl.static_range(SLOTS):
        total = acc[slot] + zeros
        if not FLUSH:
            total = total * (1.0 / GUARD)
        parts = parts + (total[:, :, None],)
    if SLOTS == 8:
        parts = _pairs(parts, 8)
    if SLOTS >= 4:
        parts = _pairs(parts, 4)
    parts = _pairs(parts, 2)
    out = parts[0].reshape([J, 2, 8, R, SLOTS]).permute(3, 2, 0, 1, 4).reshape([R, BW * LANES])
    n = tile * (BW * LANES) + tl.arange(0, BW * LANES)
    row = row0 + tl.arange(0, R)
    N = W.to(tl.int64) * LANES
    at = out_ptr + ((split * (tl.num_programs(1) // H) + b) * H + h) * (GQ * M) * N + row.to(tl.int64)[:, None] * N
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(at + n[None, :], out, mask=(row < GQ * M)[:, None] & (n < N)[None, :])


def packed_matmul_triton(
    group_size: int, a: Tensor, code: Tensor, scale: Tensor, zero: Tensor, bits: int, out_dtype: torch.dtype
) -> Tensor:
    """ops.packed_matmul by the kernel above. Arguments must have been checked."""
    B, HQ, M, K = a.shape
    H, W = code.shape[1], code.shape[3]
    GQ, lanes = HQ // H, 32 // bits
    tuning = _TUNING["wide" if W >= 32 else "narrow"]
    BW, BK, STEPS = tuning["BW"], tuning["BK"], tuning["STEPS"]
    R = 16 if GQ * M > 8 or torch.version.hip else 8  # 16: the smallest matrix unit there
    if R == 16 or bits > 2:
        BW, STEPS = 8, min(STEPS, 2)  # sums and operands of more would not fit the registers
    tiles = triton.cdiv(W, BW) * triton.cdiv(GQ * M, R)
    # a short N leaves programs free: they share K
    share = int(tuning["FILL"] * resident_warps(a.device)) // (tiles * B * H)
    splits = max(1, min(triton.cdiv(K, 128), share))
    split_k = triton.cdiv(triton.cdiv(K, splits), BK * STEPS)
    splits = triton.cdiv(K, split_k * BK * STEPS)
    upcast = triton.knobs.runtime.interpret and a.dtype == torch.bfloat16  # the interpreter has no product of bf16
    dot = tl.float32 if upcast else tl.float16 if a.dtype == torch.float16 else tl.bfloat16
    out = torch.empty(
        (splits, B, HQ, M, W * lanes), dtype=out_dtype if splits == 1 else torch.float32, device=a.device
    )
    even = all(x % 2 == 0 for x in (W, K, *a.stride()[:3], *code.stride()[:3]))
    packed_matmul_kernel[(tiles, B * H, splits)](
        a, code, scale, zero, out, *a.stride(), *code.stride(), *scale.stride(), *zero.stride(),
        H, M, K, W, split_k,
        GQ=GQ, BITS=bits, G=group_size, R=R, BK=BK, BW=BW, STEPS=STEPS, DOT=dot,
        GUARD=0.25, FLUSH=K > 1024, ALIGNED=even and code.stride(3) == 1,
        num_warps=1,
        num_stages=1,  # more of them keep the unpacking from the operand's registers
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0).to(out_dtype)
