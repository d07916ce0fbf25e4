"""Types of PTX as numpy has them, and what is computed with them."""

import operator
import struct
from collections.abc import Callable

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TYPES = {f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}") for kind, letter in (("u", "u"), ("b", "u"), ("s", "i"))
         for bits in (8, 16, 32, 64)}  # fmt: skip
TYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype("?")}
TYPES |= {"bf16": TYPES["u16"], "f16x2": TYPES["u32"], "bf16x2": TYPES["u32"]}  # as registers hold them
Array = np.ndarray


def from_bf16(words: Array) -> Array:
    return (words.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: Array) -> Array:
    """The nearest, ties to even."""
    word = x.astype(np.float32).view(np.uint32)
    nearest = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16)


def as_numbers(words: Array, kind: str) -> Array:
    """Of f16, bf16 or two of them in each word."""
    halves = np.ascontiguousarray(words).view(np.uint16)
    return from_bf16(halves) if "bf16" in kind else halves.view(np.float16)


def as_words(x: Array, kind: str) -> Array:
    """Undo as_numbers."""
    halves = to_bf16(x) if "bf16" in kind else x.astype(np.float16).view(np.uint16)
    return halves.view(np.uint32) if kind.endswith("x2") else halves


def constant(text: str, dtype: np.dtype) -> Array:
    """A literal."""
    if text.startswith("0f"):
        return np.array(struct.unpack(">f", bytes.fromhex(text[2:]))[0], dtype=np.float32).view(dtype)
    if text.startswith("0d"):
        return np.array(struct.unpack(">d", bytes.fromhex(text[2:]))[0], dtype=np.float64).view(dtype)
    value = int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return np.array(bool(value))
    bits = dtype.itemsize * 8
    return np.array(value % 2**bits, dtype=UNSIGNED[bits]).view(dtype)


def _shift_left(x: Array, by: Array) -> Array:
    bits = x.dtype.itemsize * 8
    return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0))


def _shift_right(x: Array, by: Array) -> Array:
    bits = x.dtype.itemsize * 8
    most = np.minimum(by, bits - 1).astype(x.dtype)
    return np.where((by < bits) | (x.dtype.kind == "i"), x >> most, x.dtype.type(0))


def _divide(a: Array, b: Array) -> Array:
    """Towards zero. By zero: all ones, as devices do."""
    if a.dtype.kind == "f":
        return a / b
    if a.dtype.kind == "u":
        return np.where(b == 0, a.dtype.type(-1 % 2 ** (8 * a.dtype.itemsize)), a // np.where(b == 0, b + 1, b))
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a.astype(np.int64)) // np.abs(safe.astype(np.int64))
    return np.where(b == 0, -1, quotient * np.sign(a) * np.sign(safe)).astype(a.dtype)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """Rounded once: fp64 holds the product; its sum, if not exact, is made odd, so that no tie can come of it."""
    product, more = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + more
    back = total - product
    lost = (product - (total - back)) + (more - back)
    even = (np.asarray(total).view(np.uint64) & 1) == 0
    total = np.where((lost != 0) & even & np.isfinite(total), np.nextafter(total, np.copysign(np.inf, lost)), total)
    return total.astype(a.dtype)


def _field(x: Array, start: Array, count: Array) -> Array:
    """`count` bits from `start` on, sign-extended if signed."""
    start, count = int(start), int(count)
    left = 32 - count
    return (x >> start) if start + count >= 32 else (x << (left - start)) >> left


def _permute(a: Array, b: Array, how: Array) -> Array:
    """Of the eight bytes of a and b, those that the digits of `how` name; digits beyond 7 spread a byte's sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    out = np.zeros_like(both)
    for i in range(4):
        digit = (how.astype(np.uint64) >> (4 * i)) & 15
        byte = (both >> (8 * (digit & 7))) & 0xFF
        out |= np.where(digit & 8, (byte >> 7) * 0xFF, byte) << (8 * i)
    return out.astype(np.uint32)


def flushed(operation: Callable[..., Array]) -> Callable[..., Array]:
    """.ftz: subnormal operands and results are 0."""

    def normal(x: Array) -> Array:
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)

    return lambda *operands: normal(operation(*(normal(x) for x in operands)))


def approximate(operation: Callable[..., Array], ulps: int) -> Callable[..., Array]:
    """As wrong as the manual lets devices be: off by up to that many units in the last place, by chance."""

    def wrong(*operands: Array) -> Array:
        x = operation(*operands)
        word = np.asarray(x).view(np.int32)
        by = (word * np.int32(-1640531527) >> 8) % (2 * ulps + 1) - ulps  # the same for the same number
        normal = np.isfinite(x) & (np.abs(x) > 1e-30) & (np.abs(x) < 1e30)
        return np.where(normal, word + by, word).astype(np.int32).view(np.float32)

    return wrong


# of operands of one type, to a result of that type
ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mul.lo": operator.mul, "div": _divide,
    "mad.lo": lambda a, b, c: a * b + c, "fma": _fma, "min": np.fmin, "max": np.fmax, "neg": operator.neg,
    "abs": np.abs, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": np.invert,
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "bfe": _field,
    "prmt": _permute,
}  # fmt: skip
NAN_TOO = {"min": np.minimum, "max": np.maximum}  # of a NaN and a number, the NaN
SHIFTS = {"shl": _shift_left, "shr": _shift_right}
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge, "neu": operator.ne, "lo": operator.lt, "ls": operator.le, "hi": operator.gt,
    "hs": operator.ge, "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b), "equ": lambda a, b: ~((a < b) | (a > b)),
}  # fmt: skip
REDUCTIONS = {"add": np.sum, "max": np.max, "min": np.min, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce}


def convert(x: Array, source: str, target: str, rounding: tuple[str, ...]) -> Array:
    """cvt: x holds the bits of `source`. -> those of `target`, unsigned."""
    x = from_bf16(x) if source == "bf16" else x
    if target == "bf16":
        return to_bf16(x)
    dtype = TYPES[target]
    if x.dtype.kind == "f" and dtype.kind != "f":
        whole = np.rint(x) if "rni" in rounding else np.floor(x) if "rmi" in rounding else np.trunc(x)
        limits = np.iinfo(dtype)
        return np.clip(np.nan_to_num(whole), limits.min, limits.max).astype(dtype)
    return x.astype(dtype)


def product(a: list[Array], b: list[Array], c: list[Array], bf16: bool) -> list[Array]:
    """mma.m16n8k16: the registers of [16, 16] and [16, 8] halves, added to [16, 8] of fp32; its registers."""
    halves = [np.stack(x).view(np.uint16).reshape(len(x), 32, 2) for x in (a, b)]
    left, right = (
        from_bf16(x).astype(np.float64) if bf16 else x.view(np.float16).astype(np.float64) for x in halves
    )
    # registers (k8, row8), lane (row, pair), half; and (k8), lane (column, pair), half
    rows = left.reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, 16)
    columns = right.reshape(2, 8, 4, 2).transpose(0, 2, 3, 1).reshape(16, 8)
    sums = np.stack(c).view(np.float32).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)
    out = (rows @ columns + sums).astype(np.float32).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
    return list(np.ascontiguousarray(out).view(np.uint32))
