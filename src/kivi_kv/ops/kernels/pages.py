"""A page's logits and weighted values, straight from its codes."""

import triton
import triton.language as tl

from .numbers import inverse_power, slot_codes, slot_unit, softcapped


@triton.jit
def _k_slot(words, high, low, bias, unit, SLOT: tl.constexpr, BITS: tl.constexpr, DB: tl.constexpr,
            KIND: tl.constexpr):  # fmt: skip
    """Logits [16 tokens, columns] of one slot: (q * scale) . code + q . zero, the product in two terms."""
    code = slot_codes(words, SLOT, BITS, KIND).reshape([16, DB])
    factor = unit * (1.0 / slot_unit(SLOT, BITS, KIND))
    x = tl.dot(code, high, input_precision="ieee") * factor + bias
    return tl.dot(code, low, input_precision="ieee") * factor + x  # two short chains of products, not a long one


@triton.jit
def _k_words(at, base, PLANE: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr):
    """Key words [16 tokens, DB / 2] of one plane."""
    i = tl.arange(0, DB * 8)
    words = tl.load(at + base + PLANE * (DP * 8) + i, mask=i < DP * 8, other=0)
    return words.reshape([DB // 16, 8, 4, 2, 2]).permute([4, 1, 0, 3, 2]).reshape([16, DB // 2])


@triton.jit
def _k_param(at, DP: tl.constexpr, DB: tl.constexpr):
    """Scales or zeros of one group of tokens, [DB]."""
    PAIR: tl.constexpr = 2 - DP // 16 % 2
    i = tl.arange(0, DB)
    x = tl.load(at + i, mask=i < DP, other=0.0)
    return x.reshape([DB // 16 // PAIR, 4, PAIR, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([DB])


@triton.jit
def page_logits(
    pool_ptr, param_ptr, page, q, unit, cap,
    DP: tl.constexpr, DB: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, PARAMS_PER_WORD: tl.constexpr,
    SOFTCAP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Logits of a page's 128 tokens as a tuple of 8 slots [16, columns], times unit [columns].

    The scale is on the small side: q * scale, once per group of tokens. One rounding of it would cost up to 6% of
    the output where keys have a large bias, so it is kept in two terms, high + low, exactly: the product of two
    fp16 numbers fits in two fp16 numbers, that of two bf16 numbers in two bf16 numbers.
    """
    SLOTS: tl.constexpr = 16 // BITS  # of a plane
    GROUP_SLOTS: tl.constexpr = G // 16
    params = param_ptr + (page + DP * 4 * BITS) * PARAMS_PER_WORD
    logits = ()
    for g in tl.static_range(128 // G):
        scale, zero = _k_param(params + g * DP, DP, DB), _k_param(params + (128 // G + g) * DP, DP, DB)
        scale, zero = scale.to(q.dtype), zero.to(q.dtype)  # differs in the interpreter only
        high = q * scale[:, None]
        low = tl.fma(q, tl.broadcast_to(scale[:, None], q.shape), high * -1.0)
        bias = tl.dot(tl.broadcast_to(zero[None, :], [16, DB]), q, input_precision="ieee") * unit[None, :]
        for s in tl.static_range(GROUP_SLOTS):
            words = _k_words(pool_ptr, page, (g * GROUP_SLOTS + s) // SLOTS, DP, DB)
            x = _k_slot(words, high, low, bias, unit[None, :], (g * GROUP_SLOTS + s) % SLOTS, BITS, DB, KIND)
            if SOFTCAP:
                x = softcapped(x, cap)
            logits = logits + (x,)
    return logits


@triton.jit
def page_values(
    pool_ptr, param_ptr, page, weights, acc, acc_zero, alpha,
    DP: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    PARAMS_PER_WORD: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add a page's values, weighted, to acc [VG, VB, columns] and their zeros to acc_zero [VG, columns].

    The weights, at most 2^13, are rounded to fp16 as attention kernels do: an error of each token's own, which
    averages out. The scale is on the small side here too, once per token and group of channels. WIDE: a bf16 cache.
    """
    SLOTS: tl.constexpr = 16 // BITS
    VG: tl.constexpr = DB // VB
    params = param_ptr + (page + DP * 4 * BITS) * PARAMS_PER_WORD
    g, i, every = tl.arange(0, VG), tl.arange(0, 16), tl.arange(0, 128 * VG)
    # a page's sums start from zero: added to a long sum, a matrix unit would cut them short
    sums = tl.zeros(acc.shape, tl.float32)
    zeros = tl.zeros(acc_zero.shape, tl.float32)
    # weights times the page's largest scale stay within fp16, and of its upper end
    top = tl.max(tl.load(params + every, mask=every < 128 * GROUPS, other=0.0).to(tl.float32), 0)
    # ... and so do weights alone; a bf16 page's unit below must stay finite
    factor = tl.minimum(tl.maximum(inverse_power(top), 2.0**-100), 2.0**113 if WIDE else 2.0)
    for j in tl.static_range(8):
        at = j // 2 * (32 * GROUPS) + g[:, None] * 32 + (i // 2 % 4 * 8 + j % 2 * 4 + i // 8 * 2 + i % 2)[None, :]
        scale = tl.load(params + at, mask=(g < GROUPS)[:, None], other=0.0)
        at = 128 * GROUPS + g[:, None] * 128 + j * 16 + i[None, :]
        zero = tl.load(params + at, mask=(g < GROUPS)[:, None], other=0.0)
        n = tl.arange(0, DB * 8)
        words = tl.load(pool_ptr + page + j // SLOTS * (DP * 8) + n, mask=n < DP * 8, other=0)
        words = words.reshape([VG, VB // 16, 8, 4, 2, 2]).permute([0, 1, 5, 2, 4, 3]).reshape([VG, VB, 8])
        code = slot_codes(words, j % SLOTS, BITS, KIND).reshape([VG, VB, 16])
        if WIDE:
            weight = weights[j] * (factor * _v_unit(j % SLOTS, BITS, KIND))
            product = (weight[None, :, :] * scale.to(tl.float32)[:, :, None]).to(tl.float16)
            if UPCAST:
                zero = zero.to(tl.float32)
            high = weights[j].to(zero.dtype)
            zeros = tl.dot(zero, (weights[j] - high.to(tl.float32)).to(zero.dtype), zeros, input_precision="ieee")
        else:
            high = weights[j]
            product = (high * (factor * _v_unit(j % SLOTS, BITS, KIND)).to(tl.float16))[None, :, :] * scale[
                :, :, None
            ]
        sums = tl.dot(code, product, sums)
        zeros = tl.dot(zero, high, zeros, input_precision="ieee")
    acc = acc * alpha[None, None, :] + sums * ((16777216.0 if KIND == "subnormal" else 1.0) / factor)
    return acc, acc_zero * alpha[None, :] + zeros


@triton.constexpr_function
def _v_unit(slot, bits, kind):
    """What makes the codes of all slots come out in one unit: 2^-24 if subnormal, else 1."""
    return (2.0**-24 if kind == "subnormal" else 1.0) / slot_unit(slot, bits, kind)
