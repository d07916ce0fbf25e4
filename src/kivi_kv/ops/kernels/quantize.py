"""Quantize and pack K and V: one launch each, one read of the input."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import PAGE
from ...format import PageLayout
from .numbers import inverse_power

_K_WARPS = 2
_CHANNELS = 64  # of a program's tile of 128 tokens, or one V group where that is more


_ORIGIN = tl.constexpr(0x4B400000)  # the bits of 1.5 * 2^23


@triton.constexpr_function
def _word_origin(bits):
    """What a word of codes above _ORIGIN holds too much, as a signed 32-bit number."""
    total = sum(0x4B400000 << shift for shift in range(0, 32, bits)) % 2**32
    return total - 2**32 if total >= 2**31 else total


@triton.jit
def _nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _comparable(x):
    """fp16 as it is, two at a time; Triton has no minimum of bf16."""
    if x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def _divide(x, divisor, estimate, FUSED: tl.constexpr):
    """x / divisor, correctly rounded, for a divisor of at most 11 significant bits and an estimate of 1 / divisor.

    One correction of the quotient (Markstein) leaves a relative error of 2^-43, if the estimate is within 2^-22,
    and no quotient of such a divisor comes nearer than 2^-36 to a midpoint of two fp32 numbers: the last rounding
    is the right one. An estimate of 0 gives 0. FUSED: tl.fma rounds once; the interpreter's rounds twice.
    """
    if FUSED:
        quotient = x * estimate
        return tl.fma(tl.fma(-quotient, divisor, x), estimate, quotient)
    return tl.where(estimate == 0.0, 0.0, tl.div_rn(x, tl.where(estimate == 0.0, 1.0, divisor)))


@triton.jit
def _encode(x, low, high, LIMIT: tl.constexpr, BITS: tl.constexpr, FUSED: tl.constexpr, dtype: tl.constexpr):
    """reference.encode for values x and the minimum and maximum of their groups, which broadcast to x.

    Codes come as integers above _ORIGIN, the bits of 1.5 * 2^23, which _word_origin takes off a whole word.
    """
    TOP: tl.constexpr = (1 << BITS) - 1.0
    x = x.to(tl.float32)
    low, high = low.to(tl.float32) + 0.0, high.to(tl.float32) + 0.0  # -0.0 becomes 0.0
    if dtype == tl.float16:
        scale = high - low
    else:  # a range of bf16 or fp32 can overflow fp32
        half = tl.where(high - low == float("inf"), 0.5, 1.0)
        scale = high * half - low * half
    scale = _divide(scale, scale * 0.0 + TOP, scale * 0.0 + 1.0 / TOP, FUSED)
    if dtype != tl.float16:
        scale = scale * (3.0 - 2.0 * half)  # 1 / half, which a device's division need not give exactly
    scale = _nan_min(scale, LIMIT)
    if dtype == tl.bfloat16:  # nearest, ties to even: the interpreter would cut
        word = scale.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
        scale = tl.where(scale == scale, word.to(tl.float32, bitcast=True), scale)
    scale = scale.to(dtype)
    step = scale.to(tl.float32)
    constant = step == 0.0
    estimate = tl.where(constant, 0.0, 1.0 / tl.where(constant, 1.0, step))
    if dtype == tl.float16:
        code = _divide(x - low, step, estimate, FUSED)
    elif dtype == tl.bfloat16:
        # bring the step to [1, 2), so that nothing can underflow. Powers of two are exact, and so is x * unit
        unit = tl.where(constant, 0.0, half * inverse_power(step * half))
        step, shift = step * unit, low * unit
        estimate = tl.where(constant, 0.0, 1.0 / tl.where(constant, 1.0, step))
        code = _divide(tl.fma(x, unit, -shift), step, estimate, FUSED)
    else:
        code = tl.div_rn(x * half - low * half, tl.where(constant, 1.0, step * half))
        code = tl.where(constant, 0.0, code)
    code = tl.minimum(code, TOP) + 12582912.0  # 1.5 * 2^23: rounds half to even
    return code.to(tl.int32, bitcast=True), scale, low.to(dtype)


@triton.jit
def _tile(x_ptr, t, stride_b, stride_h, stride_t, stride_d, P, H, D, ND: tl.constexpr, DB: tl.constexpr,
          VECTOR: tl.constexpr = 0):  # fmt: skip
    """Which page, and its tile of values [128, DB] at the page's tokens t; VECTOR: channels a lane loads."""
    pid = tl.program_id(0)
    block = pid % ND
    h = (pid // ND) % H
    bp = (pid // ND) // H
    b, p = (bp // P).to(tl.int64), bp % P
    t = p.to(tl.int64) * 128 + t
    d = block * DB + tl.arange(0, DB)
    if VECTOR:
        d = tl.max_contiguous(d, VECTOR)
    at = x_ptr + b * stride_b + h.to(tl.int64) * stride_h + t[:, None] * stride_t + d[None, :] * stride_d
    return bp, h, block, d, tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def _store_words(at, words, block, BITS: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr):
    """Words of a block of channels, in a page's order, [planes, channels / 16, 8, 4, 2, 2]."""
    within = block * (DB * 8) + tl.arange(0, DB * 8)
    plane = tl.arange(0, BITS // 2)[:, None] * (DP * 8)
    tl.store(at + plane + within, words.reshape([BITS // 2, DB * 8]), mask=(within < DP * 8)[None, :])


@triton.jit(do_not_specialize=["P"])
def _k_pages_kernel(
    x_ptr, pool_ptr, param_ptr, slot_ptr, stride_b, stride_h, stride_t, stride_d, P, H, PAGE_WORDS,
    D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, ND: tl.constexpr, G: tl.constexpr,
    BITS: tl.constexpr, LIMIT: tl.constexpr, FUSED: tl.constexpr, PARAMS_PER_WORD: tl.constexpr,
):  # fmt: skip
    # Two channels a lane: a warp then covers whole rows, and the slots of a word are 16 rows apart, so that a
    # thread holds all codes of its words and most of its groups.
    t = tl.arange(0, 128)
    bp, h, block, d, x = _tile(x_ptr, t, stride_b, stride_h, stride_t, stride_d, P, H, D, ND, DB, VECTOR=2)
    page = (tl.load(slot_ptr + bp).to(tl.int64) * H + h) * PAGE_WORDS
    store_k_page(x, d, block, pool_ptr, param_ptr, page, DP, DB, G, BITS, LIMIT, FUSED, PARAMS_PER_WORD)


@triton.jit
def store_k_page(
    x, d, block, pool_ptr, param_ptr, page,
    DP: tl.constexpr, DB: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr,
    FUSED: tl.constexpr, PARAMS_PER_WORD: tl.constexpr,
):  # fmt: skip
    """Quantize keys x [128, DB], channels d, of one page, which begins at word `page` of the pool."""
    KG: tl.constexpr = 128 // G
    x = _comparable(x.reshape([KG, G, DB]))
    low, high = tl.reduce(x, 1, _nan_min, keep_dims=True), tl.reduce(x, 1, _nan_max, keep_dims=True)
    code, scale, zero = _encode(x, low, high, LIMIT, BITS, FUSED, param_ptr.dtype.element_ty)

    # token = 16 * slot + 8 * r0 + row, channel = 16 * v + 8 * r1 + 2 * pair + half
    SLOTS: tl.constexpr = 16 // BITS
    shift = BITS * tl.arange(0, SLOTS)[:, None, None, None] + 16 * tl.arange(0, 2)
    words = code.reshape([BITS // 2, SLOTS, 16, DB // 2, 2]) << shift
    words = (
        (tl.sum(tl.sum(words, 4), 1) - _word_origin(BITS))
        .reshape([BITS // 2, 2, 8, DB // 16, 2, 4])
        .permute([0, 3, 2, 5, 4, 1])
    )
    _store_words(pool_ptr + page, words, block, BITS, DP, DB)

    PAIR: tl.constexpr = 2 - DP // 16 % 2  # blocks of 16 channels that lie together
    at = page * PARAMS_PER_WORD + DP * 4 * BITS * PARAMS_PER_WORD + tl.arange(0, KG)[:, None] * DP + d[None, :]
    scale = scale.reshape([KG, DB // 16 // PAIR, PAIR, 2, 4, 2]).permute([0, 1, 4, 2, 3, 5]).reshape([KG, DB])
    zero = zero.reshape([KG, DB // 16 // PAIR, PAIR, 2, 4, 2]).permute([0, 1, 4, 2, 3, 5]).reshape([KG, DB])
    tl.store(param_ptr + at, scale, mask=(d < DP)[None, :])
    tl.store(param_ptr + at + KG * DP, zero, mask=(d < DP)[None, :])


@triton.jit(do_not_specialize=["P"])
def _v_pages_kernel(
    x_ptr, pool_ptr, param_ptr, slot_ptr, stride_b, stride_h, stride_t, stride_d, P, H, PAGE_WORDS,
    CODE_AT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, ND: tl.constexpr,
    G: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, FUSED: tl.constexpr,
    PARAMS_PER_WORD: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, 128)
    bp, h, block, d, x = _tile(x_ptr, t, stride_b, stride_h, stride_t, stride_d, P, H, D, ND, DB)
    page = (tl.load(slot_ptr + bp).to(tl.int64) * H + h) * PAGE_WORDS + CODE_AT
    store_v_page(x, d, block, pool_ptr, param_ptr, page, D, DP, DB, G, GROUPS, BITS, LIMIT, FUSED, PARAMS_PER_WORD)


@triton.jit
def store_v_page(
    x, d, block, pool_ptr, param_ptr, page,
    D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    LIMIT: tl.constexpr, FUSED: tl.constexpr, PARAMS_PER_WORD: tl.constexpr,
):  # fmt: skip
    """Quantize values x [128, DB] of one page, whose part for values begins at word `page` of the pool."""
    t = tl.arange(0, 128)
    VG: tl.constexpr = DB // G
    x = _comparable(x.reshape([128, VG, G]))
    low, high = x, x
    if D % DB != 0:
        real = (d < D).reshape([1, VG, G])
        low, high = tl.where(real, x, float("inf")), tl.where(real, x, float("-inf"))
    low, high = tl.reduce(low, 2, _nan_min, keep_dims=True), tl.reduce(high, 2, _nan_max, keep_dims=True)
    code, scale, zero = _encode(x, low, high, LIMIT, BITS, FUSED, param_ptr.dtype.element_ty)
    if D % DB != 0:
        code = tl.where(real, code, _ORIGIN)

    # token = 16 * slot + 8 * r1 + 2 * pair + half, channel = 16 * v + 8 * r0 + row
    SLOTS: tl.constexpr = 16 // BITS
    shift = BITS * tl.arange(0, SLOTS)[:, None, None, None] + 16 * tl.arange(0, 2)[:, None]
    words = code.reshape([BITS // 2, SLOTS, 8, 2, DB]) << shift
    words = (
        (tl.sum(tl.sum(words, 3), 1) - _word_origin(BITS))
        .reshape([BITS // 2, 2, 4, DB // 16, 2, 8])
        .permute([0, 3, 5, 2, 1, 4])
    )
    _store_words(pool_ptr + page, words, block, BITS, DP, DB)

    params = param_ptr + (page + DP * 4 * BITS) * PARAMS_PER_WORD
    g, n = block * VG + tl.arange(0, VG * 32) // 32, tl.arange(0, VG * 32)
    scale = scale.reshape([4, 2, 2, 4, 2, VG]).permute([0, 5, 3, 1, 2, 4]).reshape([4, VG * 32])
    at = tl.arange(0, 4)[:, None] * (32 * GROUPS) + block * (VG * 32) + n[None, :]
    tl.store(params + at, scale, mask=(g < GROUPS)[None, :])
    g = block * VG + tl.arange(0, VG)[:, None]
    tl.store(params + 128 * GROUPS + g * 128 + t[None, :], zero.reshape([128, VG]).permute([1, 0]), mask=g < GROUPS)


def k_blocks(layout: PageLayout) -> int:
    """Channels of a program for keys."""
    return min(triton.next_power_of_2(layout.padded_dim), _CHANNELS)


def v_blocks(layout: PageLayout) -> tuple[int, int]:
    """Channels of a program for values, and of a group, as far as there are channels."""
    widest = triton.next_power_of_2(layout.padded_dim)
    group = min(layout.group_size, widest)
    return min(widest, max(_CHANNELS, group)), group


def write_pages(k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, layout: PageLayout) -> None:
    """Quantize k and v [B, H, P * 128, D] into pages pool[slots]: one launch each."""
    write_k_pages(k, pool, slots, layout)
    write_v_pages(v, pool, slots, layout)


def write_k_pages(k: Tensor, pool: Tensor, slots: Tensor, layout: PageLayout) -> None:
    """Quantize keys [B, H, P * 128, D], any strides, into their part of pages pool[slots].

    pool: [slots, H, words] int32, contiguous; slots: [B, P] int32. Shapes must have been checked.
    """
    _launch(
        _k_pages_kernel, k, pool, slots, layout, layout.k_bits, k_blocks(layout), _K_WARPS, {"G": layout.group_size}
    )


def write_v_pages(v: Tensor, pool: Tensor, slots: Tensor, layout: PageLayout) -> None:
    """Quantize values [B, H, P * 128, D] into their part of pages, as write_k_pages does keys."""
    block, group = v_blocks(layout)
    constants = {"G": group, "GROUPS": layout.v_groups, "CODE_AT": sum(layout.sizes[:3])}
    warps = 4 if block <= 64 else 8  # 64 values a lane
    _launch(_v_pages_kernel, v, pool, slots, layout, layout.v_bits, block, warps, constants)


def _launch(
    kernel: Any,
    x: Tensor,
    pool: Tensor,
    slots: Tensor,
    layout: PageLayout,
    bits: int,
    block: int,
    warps: int,
    constants: dict,
) -> None:
    B, H, T, D = x.shape
    P, blocks = T // PAGE, triton.cdiv(layout.padded_dim, block)
    kernel[(B * P * H * blocks,)](
        x,
        pool,
        pool.view(layout.dtype),
        slots.contiguous(),
        *x.stride(),
        P,
        H,
        layout.words,
        D=D,
        DP=layout.padded_dim,
        DB=block,
        ND=blocks,
        BITS=bits,
        LIMIT=torch.finfo(layout.dtype).max,
        FUSED=not triton.knobs.runtime.interpret,  # the interpreter's fma rounds twice
        PARAMS_PER_WORD=4 // layout.dtype.itemsize,
        num_warps=warps,
        **constants,
    )
