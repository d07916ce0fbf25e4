"""What each instruction does to a warp."""

from collections.abc import Callable

import numpy as np

from .memory import POISON
from .numbers import ARITHMETIC, COMPARISONS, REDUCTIONS, SHIFTS, TYPES, constant, convert, product
from .parse import Statement
from .warp import Array, Step, Warp, every

LANE = np.arange(32)
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
    nothing = np.full(32 * dtype.itemsize, POISON, dtype=np.uint8).view(
        dtype
    )  # what is undefined may be read, not used
    return lambda warp: warp.registers[text].view(dtype) if text in warp.registers else nothing


def names(text: str) -> list[str]:
    """Those of a vector, or the one."""
    return [x.strip() for x in text.strip("{}").split(",")]


def address(text: str, dtype: np.dtype) -> Callable[[Warp], Array]:
    base, _, offset = text.strip("[] ").partition("+")
    at, more = source(base.strip(), dtype), constant(offset.strip() or "0", dtype)
    return lambda warp: every(at(warp) + more)


def arithmetic(statement: Statement) -> Step:
    """d = operation(a, b, c), all of one type, f16x2 as two halves each."""
    parts = statement.opcode.split(".")
    name = ".".join(parts[:2]) if parts[1] in ("lo",) else parts[0]
    operation, target, halves = ARITHMETIC[name], statement.operands[0], parts[-1] == "f16x2"
    dtype = TYPES["u32" if halves else parts[-1]]
    operands = [source(x, dtype) for x in statement.operands[1:]]

    def by_halves(warp: Warp, lanes: Array | None) -> None:
        values = [np.ascontiguousarray(every(x(warp))).view(np.float16) for x in operands]
        warp.put(target, operation(*values).view(np.uint32), lanes)

    def step(warp: Warp, lanes: Array | None) -> None:
        warp.put(target, operation(*(x(warp) for x in operands)), lanes)

    return by_halves if halves else step


def shift(statement: Statement) -> Step:
    name, kind = statement.opcode.split(".")
    target, x, by = statement.operands
    x, by = source(x, TYPES[kind]), source(by, U32)
    return lambda warp, lanes: warp.put(target, SHIFTS[name](x(warp), by(warp)), lanes)


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
    _, how, kind = statement.opcode.split(".")
    target, a, b = statement.operands[0], *(source(x, TYPES[kind]) for x in statement.operands[1:])
    return lambda warp, lanes: warp.put(target, COMPARISONS[how](a(warp), b(warp)), lanes)


def select(statement: Statement) -> Step:
    dtype = TYPES[statement.opcode.split(".")[1]]
    target, a, b = statement.operands[0], *(source(x, dtype) for x in statement.operands[1:3])
    which = source(statement.operands[3], TYPES["pred"])
    return lambda warp, lanes: warp.put(target, np.where(which(warp), a(warp), b(warp)), lanes)


def cvt(statement: Statement) -> Step:
    *rounding, to, kind = statement.opcode.split(".")[1:]
    single, pair = to.removesuffix("x2"), to.endswith("x2")
    dtype = TYPES["u16" if kind == "bf16" else kind]
    target, operands = statement.operands[0], [source(x, dtype) for x in statement.operands[1:]]
    if dtype.itemsize == 1:  # in a wider register
        operands = [
            lambda warp, x=x: warp.registers[x].astype(np.uint8).view(dtype) for x in statement.operands[1:]
        ]

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


def load(statement: Statement) -> Step:
    parts = statement.opcode.split(".")
    space, dtype, targets = (
        parts[1] if parts[1] != "volatile" else parts[2],
        TYPES[parts[-1]],
        names(statement.operands[0]),
    )
    if space == "param":
        name = statement.operands[1].strip("[] ")
        return lambda warp, lanes: warp.put(targets[0], warp.arguments[name], lanes)
    at = address(statement.operands[1], TYPES["u64" if space == "global" else "u32"])
    nbytes = dtype.itemsize * len(targets)

    def read(warp: Warp, at: Array, nbytes: int) -> Array:
        return warp.memory.read(at, nbytes) if space == "global" else warp.shared.read(at, nbytes, warp.index)

    def step(warp: Warp, lanes: Array | None) -> None:
        where = at(warp)
        some = where if lanes is None else where[lanes]
        found = read(warp, some, nbytes)
        data = np.zeros((32, nbytes), dtype=np.uint8)
        data[slice(None) if lanes is None else lanes] = found
        for i, name in enumerate(targets):
            warp.put(name, data.view(dtype)[:, i].copy(), lanes)

    return step


def store(statement: Statement) -> Step:
    parts = statement.opcode.split(".")
    space, dtype = parts[1], TYPES[parts[-1]]
    at = address(statement.operands[0], TYPES["u64" if space == "global" else "u32"])
    values = [source(x, dtype) for x in names(statement.operands[1])]

    def step(warp: Warp, lanes: Array | None) -> None:
        data = np.stack([every(x(warp)) for x in values], axis=1)
        data, where = np.ascontiguousarray(data).view(np.uint8), at(warp)
        if lanes is not None:
            data, where = data[lanes], where[lanes]
        if space == "global":
            warp.memory.write(where, data)
        else:
            warp.shared.write(where, data, warp.index)

    return step


def copy(statement: Statement) -> Step:
    """cp.async: [target], [source], bytes, of which given (all, if not said)."""
    to, of = (address(x, TYPES[t]) for x, t in zip(statement.operands[:2], ("u32", "u64"), strict=True))
    nbytes = int(statement.operands[2], 0)
    count = source(statement.operands[3], U32) if len(statement.operands) > 3 else lambda warp: np.array(nbytes)

    def step(warp: Warp, lanes: Array | None) -> None:
        some = slice(None) if lanes is None else lanes
        given = every(count(warp))[some]
        warp.copy(to(warp)[some], of(warp)[some], nbytes, given)

    return step


def shuffle(statement: Statement) -> Step:
    how = statement.opcode.split(".")[2]
    target, x, by, _ = statement.operands[0], *(source(x, U32) for x in statement.operands[1:4])

    def step(warp: Warp, lanes: Array | None) -> None:
        n = every(by(warp)).astype(np.int64)
        lane = {"bfly": LANE ^ n, "idx": n % 32, "up": LANE - n, "down": LANE + n}[how]
        lane = np.where((lane < 0) | (lane > 31), LANE, lane)
        warp.put(target, every(x(warp))[lane], lanes)

    return step


def reduce(statement: Statement) -> Step:
    _, _, how, kind = statement.opcode.split(".")
    target, x = statement.operands[0], source(statement.operands[1], TYPES[kind])

    def step(warp: Warp, lanes: Array | None) -> None:
        values = every(x(warp))
        warp.put(target, np.full(32, REDUCTIONS[how](values), dtype=values.dtype), lanes)

    return step


def matrix_product(statement: Statement) -> Step:
    bf16, (out, *given) = ".bf16." in statement.opcode, [names(x) for x in statement.operands]
    operands = [[source(x, U32) for x in group] for group in given]

    def step(warp: Warp, lanes: Array | None) -> None:
        a, b, c = ([every(x(warp)) for x in group] for group in operands)
        for name, value in zip(out, product(a, b, c, bf16), strict=True):
            warp.put(name, value, lanes)

    return step


def _transposed(rows: Array) -> Array:
    """Halves [8, 8] of rows, to words [32] of their columns."""
    return np.ascontiguousarray(rows.T).view(np.uint32).ravel()


def load_matrices(statement: Statement) -> Step:
    """ldmatrix.x4: lane 8 i + row has the address of a row of the i-th 8 x 8 matrix."""
    targets, at = names(statement.operands[0]), address(statement.operands[1], U32)
    transposing = ".trans" in statement.opcode

    def step(warp: Warp, lanes: Array | None) -> None:
        count = len(targets)
        data = warp.shared.read(at(warp)[: 8 * count], 16, warp.index).view(np.uint16).reshape(count, 8, 8)
        for name, rows in zip(targets, data, strict=True):
            word = _transposed(rows) if transposing else rows.copy().view(np.uint32).ravel()
            warp.put(name, word, lanes)

    return step


def move_matrix(statement: Statement) -> Step:
    target, x = statement.operands[0], source(statement.operands[1], U32)

    def step(warp: Warp, lanes: Array | None) -> None:
        rows = np.ascontiguousarray(every(x(warp))).view(np.uint16).reshape(8, 8)
        warp.put(target, _transposed(rows), lanes)

    return step


def prefetch(statement: Statement) -> Step:
    """Reads nothing, but its addresses must be some that can be read."""
    at, count = address(statement.operands[0], TYPES["u64"]), source(statement.operands[1], U32)

    def step(warp: Warp, lanes: Array | None) -> None:
        some = slice(None) if lanes is None else lanes
        for start, n in zip(at(warp)[some], every(count(warp))[some], strict=True):
            assert start % 16 == 0
            assert n % 16 == 0
            for end in (start, start + np.uint64(int(n) - 16)):
                warp.memory.read(np.array([end]), 16)

    return step


def commit(warp: Warp, lanes: Array | None) -> None:
    warp.copies.append([])


def step_of(statement: Statement) -> Step:
    opcode, operands = statement.opcode, statement.operands
    name = opcode.split(".")[0]
    if name == "ret":
        return lambda warp, lanes: "exit"
    if name == "bra":
        return lambda warp, lanes: operands[0]
    if name == "bar":
        return lambda warp, lanes: None if ".warp" in opcode else "barrier"
    if opcode == "griddepcontrol.launch_dependents":
        return lambda warp, lanes: None
    if opcode == "griddepcontrol.wait":
        return lambda warp, lanes: warp.at_wait()
    if opcode == "cp.async.commit_group":
        return commit
    if opcode.startswith("cp.async.wait_group"):
        return lambda warp, lanes: warp.wait(int(operands[0], 0))
    if opcode.startswith("cp.async.bulk.prefetch"):
        return prefetch(statement)
    if opcode.startswith(("mul.wide", "mad.wide", "mul.hi")):
        return wide(statement)
    return BY_NAME.get(name, arithmetic)(statement)


BY_NAME: dict[str, Callable[[Statement], Step]] = {
    "shl": shift, "shr": shift, "setp": compare, "selp": select, "cvt": cvt, "mov": move, "ld": load, "st": store,
    "cp": copy, "shfl": shuffle, "redux": reduce, "mma": matrix_product, "ldmatrix": load_matrices,
    "movmatrix": move_matrix,
}  # fmt: skip
