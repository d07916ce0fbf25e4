"""A page's logits and weighted values, straight from its codes."""

import triton
import triton.language as tl

from .numbers import inverse_power, slot_codes, slot_unit, softcapped


@triton.jit
def _k_words(at, PLANE: tl.constexpr, BLOCK: tl.constexpr, CB: tl.constexpr, DP: tl.constexpr):
    """Key words [16 tokens, CB / 2] of a plane and a block of CB channels."""
    i = BLOCK * CB * 8 + tl.arange(0, CB * 8)
    words = tl.load(at + PLANE * (DP * 8) + i, mask=i < DP * 8, other=0)
    return words.reshape([CB // 16, 8, 4, 2, 2]).permute([4, 1, 0, 3, 2]).reshape([16, CB // 2])


@triton.jit
def _k_param(at, BLOCK: tl.constexpr, CB: tl.constexpr, DP: tl.constexpr):
    """Scales or zeros of a group of tokens and a block of channels, [CB]."""
    PAIR: tl.constexpr = 2 - DP // 16 % 2
    i = BLOCK * CB + tl.arange(0, CB)
    x = tl.load(at + i, mask=i < DP, other=0.0)
    return x.reshape([CB // 16 // PAIR, 4, PAIR, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([CB])


@triton.jit
def page_logits(
    pool_ptr, param_ptr, page, q, unit, cap,
    DP: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, PARAMS_PER_WORD: tl.constexpr,
    SOFTCAP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Logits of a page's 128 tokens as a tuple of 8 slots [16, columns], times unit [columns].

    q: a tuple of [channels, columns] by block of channels; all slots are summed block by block, so that few words
    and few of the products below are in registers at once. The scale is on the small side: q * scale, once per
    group of tokens. One rounding of it would cost up to 6% of the output where keys have a large bias, so it is
    kept in two terms, high + low, exactly: the product of two fp16 numbers fits in two fp16 numbers, that of two
    bf16 numbers in two bf16 numbers.
    """
    SLOTS: tl.constexpr = 16 // BITS  # of a plane
    KG: tl.constexpr = 128 // G
    GS: tl.constexpr = G // 16  # slots of a group
    CB: tl.constexpr = q[0].shape[0]
    NC: tl.constexpr = q[0].shape[1]
    params = param_ptr + (page + DP * 4 * BITS) * PARAMS_PER_WORD
    sums, biases = (), ()
    for _ in tl.static_range(8):
        sums = sums + (tl.zeros([16, NC], tl.float32),)
    for _ in tl.static_range(KG):
        biases = biases + (tl.zeros([16, NC], tl.float32),)
    for block in tl.static_range(len(q)):
        new_sums, new_biases, words = (), (), ()
        for plane in tl.static_range(BITS // 2):
            words = words + (_k_words(pool_ptr + page, plane, block, CB, DP),)
        for g in tl.static_range(KG):
            zero = _k_param(params + (KG + g) * DP, block, CB, DP).to(q[0].dtype)  # differs in the interpreter only
            wide = tl.broadcast_to(zero[None, :], [16, CB])
            new_biases = new_biases + (tl.dot(wide, q[block], biases[g], input_precision="ieee"),)
            scale = _k_param(params + g * DP, block, CB, DP).to(q[0].dtype)
            high = q[block] * scale[:, None]
            low = tl.fma(q[block], tl.broadcast_to(scale[:, None], q[block].shape), high * -1.0)
            for s in tl.static_range(GS):
                code = slot_codes(words[(g * GS + s) // SLOTS], (g * GS + s) % SLOTS, BITS, KIND).reshape([16, CB])
                x = tl.dot(code, high, sums[g * GS + s], input_precision="ieee")
                new_sums = new_sums + (tl.dot(code, low, x, input_precision="ieee"),)
        sums, biases = new_sums, new_biases
    logits = ()
    for s in tl.static_range(8):
        x = (sums[s] * (1.0 / slot_unit(s % SLOTS, BITS, KIND)) + biases[s // GS]) * unit[None, :]
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
