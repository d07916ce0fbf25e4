"""Instructions that compute within a lane."""

import numpy as np

from .numbers import (
    ARITHMETIC,
    COMPARISONS,
    NAN_TOO,
    SHIFTS,
    TYPES,
    approximate,
    as_numbers,
    as_words,
    convert,
    flushed,
)
from .operand import U32, names, source
from .parse import Statement
from .warp import Array, Step, Warp, every


def arithmetic(statement: Statement) -> Step:
    """d = operation(a, b, c), all of one type: numbers of a register each, or two halves of one."""
    parts = statement.opcode.split(".")
    name, kind = ".".join(parts[:2]) if parts[1] == "lo" else parts[0], parts[-1]
    if name not in ARITHMETIC or {"sat", "relu", "cc"} & {*parts}:
        raise NotImplementedError(statement.text)
    operation = NAN_TOO[name] if "NaN" in parts else ARITHMETIC[name]
    if "approx" in parts or "full" in parts:
        operation = approximate(operation, 1 if "approx" in parts else 2)
    if "ftz" in parts:
        operation = flushed(operation)
    target, operands = statement.operands[0], [source(x, TYPES[kind]) for x in statement.operands[1:]]

    def by_halves(warp: Warp, lanes: Array | None) -> None:
        values = [as_numbers(every(x(warp)), kind) for x in operands]
        warp.put(target, as_words(operation(*values), kind), lanes)

    def step(warp: Warp, lanes: Array | None) -> None:
        warp.put(target, operation(*(x(warp) for x in operands)), lanes)

    return by_halves if "f16" in kind else step


def shift(statement: Statement) -> Step:
    name, kind = statement.opcode.split(".")
    target, x, by = statement.operands
    x, by = source(x, TYPES[kind]), source(by, U32)
    return lambda warp, lanes: warp.put(target, SHIFTS[name](x(warp), by(warp)), lanes)


def funnel(statement: Statement) -> Step:
    """shf.wrap: the upper word of (high, low) shifted left, or the lower one of it shifted right."""
    left, target = ".l." in statement.opcode, statement.operands[0]
    low, high, by = (source(x, U32) for x in statement.operands[1:])

    def step(warp: Warp, lanes: Array | None) -> None:
        both = low(warp).astype(np.uint64) | high(warp).astype(np.uint64) << 32
        count = by(warp).astype(np.uint64) % 32
        warp.put(target, (both << count >> 32 if left else both >> count).astype(np.uint32), lanes)

    return step


def wide(statement: Statement) -> Step:
    """mul.wide, mad.wide, mul.hi: the double width of a product."""
    name, how, kind = statement.opcode.split(".")
    dtype, target = TYPES[kind], statement.operands[0]
    double = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
    a, b = (source(x, dtype) for x in statement.operands[1:3])
    more = source(statement.operands[3], double) if name == "mad" else None

    def step(warp: Warp, lanes: Array | None) -> None:
        x = a(warp).astype(double) * b(warp).astype(double)
        if how == "hi":
            x = (x >> (8 * dtype.itemsize)).astype(dtype)
        warp.put(target, x if more is None else x + more(warp), lanes)

    return step


def compare(statement: Statement) -> Step:
    """Of two halves of a register, each into a predicate of its own."""
    _, how, *more, kind = statement.opcode.split(".")
    if {*more} - {"ftz"}:
        raise NotImplementedError(statement.text)
    targets, (a, b) = statement.operands[0].split("|"), (source(x, TYPES[kind]) for x in statement.operands[1:])

    def by_halves(warp: Warp, lanes: Array | None) -> None:
        holds = COMPARISONS[how](*(as_numbers(every(x(warp)), kind) for x in (a, b)))
        for i, target in enumerate(targets):
            warp.put(target, holds[i :: len(targets)], lanes)

    def step(warp: Warp, lanes: Array | None) -> None:
        warp.put(targets[0], COMPARISONS[how](a(warp), b(warp)), lanes)

    return by_halves if "f16" in kind else step


def select(statement: Statement) -> Step:
    dtype = TYPES[statement.opcode.split(".")[1]]
    target, a, b = statement.operands[0], *(source(x, dtype) for x in statement.operands[1:3])
    which = source(statement.operands[3], TYPES["pred"])
    return lambda warp, lanes: warp.put(target, np.where(which(warp), a(warp), b(warp)), lanes)


def cvt(statement: Statement) -> Step:
    *rounding, to, kind = statement.opcode.split(".")[1:]
    if {*rounding} - {"rn", "rni", "rzi", "rmi"}:
        raise NotImplementedError(statement.text)
    single, pair = to.removesuffix("x2"), to.endswith("x2")
    dtype = TYPES["u16" if kind == "bf16" else kind]
    target, operands = statement.operands[0], [source(x, dtype) for x in statement.operands[1:]]

    def step(warp: Warp, lanes: Array | None) -> None:
        values = [convert(x(warp), kind, single, tuple(rounding)) for x in operands]
        if pair:  # the second operand is the low half
            high, low = (every(x.view(np.uint16)).astype(np.uint32) for x in values)
            values = [high << 16 | low]
        value = values[0]
        if value.dtype.itemsize == 1:
            value = value.astype(np.int16)  # registers have 16 bits at least
        warp.put(target, value, lanes)

    return step


def move(statement: Statement) -> Step:
    """Also between a word and its halves."""
    to, of = statement.operands
    kind = statement.opcode.split(".")[1]
    dtype = TYPES[kind]
    if of[0] == "{":
        half = TYPES[f"u{dtype.itemsize * 4}"]
        low, high = (source(x, half) for x in names(of))

        def join(warp: Warp, lanes: Array | None) -> None:
            words = [every(x(warp)).astype(f"u{dtype.itemsize}") for x in (low, high)]
            warp.put(to, words[0] | words[1] << (dtype.itemsize * 4), lanes)

        return join
    x = source(of, dtype)
    if to[0] == "{":
        half = TYPES[f"u{dtype.itemsize * 4}"]

        def split(warp: Warp, lanes: Array | None) -> None:
            word = every(x(warp))
            for name, part in zip(names(to), (word, word >> (dtype.itemsize * 4)), strict=True):
                warp.put(name, part.astype(half), lanes)

        return split
    return lambda warp, lanes: warp.put(to, x(warp), lanes)
