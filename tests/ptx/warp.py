"""A warp of 32 lanes that runs a program statement by statement."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .memory import POISON, GlobalMemory, SharedMemory
from .parse import Program, Statement

Array = np.ndarray


def every(x: Array) -> Array:
    """Of 32 lanes: a literal is one number for all of them."""
    return x if x.shape == (32,) else np.broadcast_to(x, 32)


@dataclass
class Warp:
    """Registers by name, each an unsigned number (a bool for predicates) of every lane."""

    index: int
    special: dict[str, Array]  # %tid.x and others
    arguments: dict[str, Array]
    memory: GlobalMemory
    shared: SharedMemory
    at_wait: Callable[[], None]  # called at griddepcontrol.wait
    registers: dict[str, Array] = field(default_factory=dict)
    copies: list[list[Any]] = field(
        default_factory=lambda: [[]]
    )  # groups of asynchronous copies, the last one open

    def put(self, name: str, value: Array, lanes: Array | None) -> None:
        value = every(value)
        value = value if value.dtype.kind == "b" else value.view(f"u{value.dtype.itemsize}")
        if lanes is not None:
            value = np.where(lanes, value, self.registers.get(name, np.zeros(32, value.dtype)))
        self.registers[name] = value

    def copy(self, target: Array, source: Array, nbytes: int, given: Array) -> None:
        """An asynchronous copy of nbytes a lane, of which `given` are read and the rest are 0."""
        self.shared.write(target, np.full((len(target), nbytes), POISON, dtype=np.uint8), self.index)
        self.copies[-1].append((target, source, nbytes, given))

    def wait(self, groups: int) -> None:
        """Until at most the `groups` newest committed groups of copies are on their way."""
        while len(self.copies) - 1 > groups:
            for target, source, nbytes, given in self.copies.pop(0):
                data, some = np.zeros((len(target), nbytes), dtype=np.uint8), given > 0
                assert np.isin(given, (0, nbytes)).all()
                if some.any():
                    data[some] = self.memory.read(source[some], nbytes)
                self.shared.write(target, data, self.index)


Step = Callable[[Warp, Array | None], str | None]


def run(warp: Warp, program: Program, step_of: Callable[[Statement], Step]) -> Iterator[None]:
    """Run to the end; stops at each barrier."""
    steps = [(statement, step_of(statement)) for statement in program.statements]
    at = 0
    while at < len(steps):
        statement, step = steps[at]
        lanes = None
        if statement.guard is not None:
            lanes = warp.registers[statement.guard] ^ statement.negated
            if statement.opcode.startswith(("bra", "ret", "bar")) and 0 < lanes.sum() < 32:
                raise NotImplementedError(f"lanes part at {statement.text}")
            if not lanes.any():
                at += 1
                continue
            lanes = None if lanes.all() else lanes
        try:
            outcome = step(warp, lanes)
        except Exception as error:
            raise RuntimeError(f"{program.name}, warp {warp.index}, {statement.text}: {error}") from error
        if outcome == "exit":
            return
        if outcome == "barrier":
            yield
        at = program.labels[outcome] if outcome is not None and outcome.startswith("$") else at + 1
