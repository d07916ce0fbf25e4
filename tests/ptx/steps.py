"""What each instruction does to a warp."""

from collections.abc import Callable

from .compute import arithmetic, compare, cvt, funnel, move, select, shift, wide
from .parse import Statement
from .transfer import (
    copy,
    load,
    load_matrices,
    matrix_product,
    move_matrix,
    prefetch,
    reduce,
    shuffle,
    store,
    store_matrices,
)
from .warp import Array, Step, Warp


def commit(warp: Warp, lanes: Array | None) -> None:
    warp.copies.append([])


def step_of(statement: Statement) -> Step:
    opcode, operands = statement.opcode, statement.operands
    name = opcode.split(".")[0]
    if name == "ret":
        return lambda warp, lanes: "exit"
    if name == "bra":
        return lambda warp, lanes: operands[0]
    if opcode in ("bar.sync", "bar.warp.sync"):
        return lambda warp, lanes: None if ".warp" in opcode else "barrier"
    if opcode.startswith(("griddepcontrol.launch_dependents", "createpolicy")):
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
    "shf": funnel, "shl": shift, "shr": shift, "setp": compare, "selp": select, "cvt": cvt, "mov": move, "ld": load,
    "st": store, "cp": copy, "shfl": shuffle, "redux": reduce, "mma": matrix_product, "ldmatrix": load_matrices,
    "stmatrix": store_matrices, "movmatrix": move_matrix,
}  # fmt: skip
