"""Launches of Triton and Gluon kernels, on CPU tensors, by running their PTX."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from triton.runtime.jit import KernelInterface

from .memory import GlobalMemory, SharedMemory
from .parse import Program, parse
from .steps import step_of as make_step
from .warp import Warp, run

step_of = lru_cache(maxsize=None)(make_step)


class Emulator:
    """Runs launches as they come, program by program.

    compiled: of (kernel, arguments, options), what Triton made of the kernel. stale: what memory holds until
    griddepcontrol.wait of the next launch, by tensor: what kernels before it may not have written yet.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.programs: dict[str, Program] = {}
        self.stale: list[tuple[torch.Tensor, torch.Tensor]] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        compiled = self.compiled(kernel, args, options)
        if compiled.hash not in self.programs:
            self.programs[compiled.hash] = parse(compiled.asm["ptx"])
        program, metadata = self.programs[compiled.hash], compiled.metadata
        named = {name: x for name, x in options.items() if name in kernel.arg_names}
        given = inspect.signature(kernel.fn).bind(*args, **named).arguments
        kinds = compiled.src.signature
        values = [(x, kinds[name]) for name, x in given.items() if kinds[name] != "constexpr"]
        memory = GlobalMemory([x for x, _ in values if isinstance(x, torch.Tensor)])
        numbers = [_bits(x, kind) for x, kind in values]
        arguments = dict(zip(program.parameters, numbers, strict=False))  # behind them: memory for its own use
        grid, stale, self.stale = (*grid, 1, 1)[:3], self.stale, []
        for at in product(*(range(n) for n in grid)):
            shared = SharedMemory(metadata.shared)
            self.one(program, metadata.num_warps, grid, at, arguments, memory, shared, stale)

    def one(
        self, program: Program, warps: int, grid: tuple[int, ...], at: tuple[int, ...],
        arguments: dict[str, np.ndarray], memory: GlobalMemory, shared: SharedMemory,
        stale: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:  # fmt: skip
        current = [x.clone() for x, _ in stale]
        for x, old in stale:
            x.copy_(old)
        waited = []

        def wait() -> None:
            if not waited:
                waited.append(True)
                for (x, _), new in zip(stale, current, strict=True):
                    x.copy_(new)

        running = []
        for index in range(warps):
            lane = np.arange(32, dtype=np.uint32)
            special = {"%tid.x": 32 * index + lane, "%laneid": lane}
            for name, counts in (("ctaid", at), ("nctaid", grid)):
                special |= {
                    f"%{name}.{axis}": np.full(32, n, dtype=np.uint32)
                    for axis, n in zip("xyz", counts, strict=True)
                }
            warp = Warp(index, special, arguments, memory, shared, wait)
            running.append(run(warp, program, step_of))
        with np.errstate(all="ignore"):
            while running:
                going = [x for x in running if next(x, True) is None]
                assert len(going) in (0, len(running)), "some warps end where others wait"
                running = going
                shared.phase += 1
        wait()


def _bits(x: Any, kind: str) -> np.ndarray:
    """An argument as registers hold it."""
    if isinstance(x, torch.Tensor):
        return np.full(32, x.data_ptr(), dtype=np.uint64)
    if kind == "fp32":
        return np.full(32, x, dtype=np.float32).view(np.uint32)
    return np.full(32, x % 2 ** int(kind[1:]), dtype=f"u{int(kind[1:]) // 8}")


@contextlib.contextmanager
def emulated(compiled: Callable[..., Any]) -> Iterator[Emulator]:
    """Launches within are emulated."""
    emulator, usual = Emulator(compiled), KernelInterface.__getitem__

    def bound(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: emulator.launch(kernel, grid, args, options)

    KernelInterface.__getitem__ = bound
    try:
        yield emulator
    finally:
        KernelInterface.__getitem__ = usual
