"""Numbers inside kernels: powers of two, codes as halves."""

import triton
import triton.language as tl


@triton.jit
def inverse_power(x):
    """2^-floor(log2 x) for fp32 x > 0, exact; 2^127 for 0. Multiplying by it brings a normal x to [1, 2)."""
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return (0x7F000000 - tl.minimum(exponent, 0x7E800000)).to(tl.float32, bitcast=True)


@triton.jit
def power(x):
    """2^floor(log2 x), the inverse of inverse_power: exact for x below 2^126."""
    return 1.0 / inverse_power(x)


@triton.jit
def softcapped(x, cap):
    """cap * tanh(x / cap), for x in units of log2."""
    return cap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * 1.4426950408889634 / cap)) + 1.0))


@triton.constexpr_function
def slots_in_place(bits, kind):
    """Slots whose bits lie within the mantissa of a half."""
    return max(1, (7 if kind == "bf16" else 10) // bits)


@triton.constexpr_function
def slot_unit(slot, bits, kind):
    """What slot_codes multiplies a code by: a power of two."""
    bit = slot % slots_in_place(bits, kind) * bits
    return 2.0 ** (bit - 24 if kind == "subnormal" else bit)


@triton.jit
def slot_codes(words, SLOT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """Codes of one slot of int32 words [..., n] as floats [..., n, 2], times slot_unit(SLOT, BITS, KIND).

    Bits of a code stay where they lie in a half, and become the low bits of a float's mantissa:
    "subnormal": fp16 with nothing else set, which is bits * 2^-24; "fp16": 1024 + bits, less 1024; "bf16": 128 +
    bits, less 128; "fp32" for the interpreter, which does not know bf16. All are exact. Slots beyond the mantissa
    are shifted down first, by an amount that they share.
    """
    HERE: tl.constexpr = slots_in_place(BITS, KIND)
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    x = (words >> (SLOT // HERE * HERE * BITS)) & (MASK << (SLOT % HERE * BITS))
    if KIND == "fp16":
        x = x | 0x64006400
    elif KIND == "bf16" and BITS < 8:
        x = x | 0x43004300
    low, high = x & 0xFFFF, (x >> 16) & 0xFFFF
    if KIND == "fp32":
        code = tl.join(low.to(tl.float32), high.to(tl.float32))
    elif KIND == "bf16" and BITS == 8:
        code = tl.join(low.to(tl.float32).to(tl.bfloat16), high.to(tl.float32).to(tl.bfloat16))
    else:
        dtype: tl.constexpr = tl.bfloat16 if KIND == "bf16" else tl.float16
        code = tl.join(low.to(tl.int16).to(dtype, bitcast=True), high.to(tl.int16).to(dtype, bitcast=True))
        if KIND == "fp16":
            code = code - 1024.0
        elif KIND == "bf16":
            code = code - 128.0
    return code
