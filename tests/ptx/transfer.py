"""Instructions that move data between lanes, and to and from memory."""

import numpy as np

from .numbers import REDUCTIONS, TYPES, product
from .operand import U32, address, names, source, widened
from .parse import Statement
from .warp import Array, Step, Warp, every

LANE = np.arange(32)


def _space(statement: Statement) -> str:
    """Of a load or store: plain or volatile ones, cached in any way."""
    parts = statement.opcode.split(".")
    space = parts[2] if parts[1] == "volatile" else parts[1]
    if space not in ("param", "global", "shared"):
        raise NotImplementedError(statement.text)
    return space


def load(statement: Statement) -> Step:
    space, dtype, targets = _space(statement), TYPES[statement.opcode.split(".")[-1]], names(statement.operands[0])
    if space == "param":
        name = statement.operands[1].strip("[] ")
        return lambda warp, lanes: warp.put(
            targets[0], widened(warp.arguments[name].view(dtype), targets[0]), lanes
        )
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
            warp.put(name, widened(data.view(dtype)[:, i].copy(), name), lanes)

    return step


def store(statement: Statement) -> Step:
    space, dtype = _space(statement), TYPES[statement.opcode.split(".")[-1]]
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
    target, (x, by) = statement.operands[0], (source(x, U32) for x in statement.operands[1:3])
    if int(statement.operands[3], 0) != (0 if how == "up" else 31):
        raise NotImplementedError(f"among parts of a warp: {statement.text}")

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
    if ".m16n8k16.row.col.f32." not in statement.opcode:
        raise NotImplementedError(statement.text)
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


def store_matrices(statement: Statement) -> Step:
    """stmatrix: the other way round."""
    at, values = address(statement.operands[0], U32), [source(x, U32) for x in names(statement.operands[1])]
    transposing = ".trans" in statement.opcode

    def step(warp: Warp, lanes: Array | None) -> None:
        for i, x in enumerate(values):
            rows = np.ascontiguousarray(every(x(warp))).view(np.uint16).reshape(8, 8)
            rows = np.ascontiguousarray(rows.T) if transposing else rows
            warp.shared.write(at(warp)[8 * i : 8 * i + 8], rows.view(np.uint8).reshape(8, 16), warp.index)

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
