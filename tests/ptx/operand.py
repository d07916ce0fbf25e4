"""Operands of instructions: registers, literals, vectors, addresses."""

from collections.abc import Callable

import numpy as np

from .memory import POISON
from .numbers import TYPES, constant
from .warp import Array, Warp, every

U32 = TYPES["u32"]


def source(text: str, dtype: np.dtype) -> Callable[[Warp], Array]:
    """An operand, as numbers of that type: a register, a special one or a literal."""
    if text.startswith(("%tid", "%ctaid", "%nctaid", "%laneid")):
        return lambda warp: warp.special[text]
    if text == "global_smem":
        return lambda warp: np.zeros(32, dtype=np.uint32)
    if text[0].isdigit() or text[0] == "-":
        value = constant(text, dtype)
        return lambda warp: value
    if dtype.kind == "b":
        return lambda warp: warp.registers[text]
    nothing = np.full(32 * dtype.itemsize, POISON, dtype=np.uint8).view(dtype)  # undefined: to be read, not used

    def read(warp: Warp) -> Array:
        x = warp.registers.get(text, nothing)
        if x.dtype.itemsize != dtype.itemsize:  # the lower part of a wider register
            x = x.astype(f"u{dtype.itemsize}")
        return x.view(dtype)

    return read


def names(text: str) -> list[str]:
    """Those of a vector, or the one."""
    return [x.strip() for x in text.strip("{}").split(",")]


def widened(x: Array, register: str) -> Array:
    """As wide as a register of that name, with the sign that its type has."""
    nbytes = 8 if register.startswith("%rd") else 2 if register.startswith("%rs") else 4
    return x if x.dtype.itemsize >= nbytes or x.dtype.kind == "b" else x.astype(f"{x.dtype.kind}{nbytes}")


def address(text: str, dtype: np.dtype) -> Callable[[Warp], Array]:
    base, _, offset = text.strip("[] ").partition("+")
    at, more = source(base.strip(), dtype), constant(offset.strip() or "0", dtype)
    return lambda warp: every(at(warp) + more)
