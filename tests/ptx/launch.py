"""Launches of Triton and Gluon kernels, on CPU tensors, by running their PTX."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import KernelInterface

from .memory import GlobalMemory, SharedMemory
from .parse import Program, parse
from .steps import step_of as make_step
from .warp import Warp, run

step_of = lru_cache(maxsize=None)(make_step)


class Emulator:
    """Runs launches as they come, program by program, in any order of programs.

    stale: what memory holds until griddepcontrol.wait, by tensor: what kernels before may not have written yet.
    """

    def __init__(self, arch: str, source: Callable[..., ASTSource]) -> None:
        self.target, self.source = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32), source
        self.programs: dict[str, tuple[Program, int]] = {}
        self.stale: list[tuple[torch.Tensor, torch.Tensor]] = []

    def compiled(self, source: ASTSource, options: dict[str, Any]) -> tuple[Program, int]:
        key = source.hash() + str(sorted(options.items()))
        if key not in self.programs:
            kernel = triton.compile(source, target=self.target, options=options)
            self.programs[key] = parse(kernel.asm["ptx"]), kernel.metadata.shared
        return self.programs[key]

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        how = {name: options[name] for name in ("num_warps", "num_stages", "launch_pdl", "maxnreg") if name in options}
        source = self.source(kernel, args, options)
        named = inspect.signature(kernel.fn).bind(
            *args, **{k: x for k, x in options.items() if k in kernel.arg_names}
        )
        given = [(x, source.signature[name]) for name, x in named.arguments.items()]
        values = [(x, kind) for x, kind in given if kind != "constexpr"]
        program, shared = self.compiled(source, how)
        tensors = [x for x, _ in values if isinstance(x, torch.Tensor)]
        numbers = [_bits(x, kind) for x, kind in values]
        arguments = dict(zip(program.parameters, numbers, strict=False))  # behind them: memory for its own use
        memory = GlobalMemory(tensors)
        grid, stale, self.stale = (*grid, 1, 1)[:3], self.stale, []
        for at in product(*(range(n) for n in grid)):
            self.one(program, how.get("num_warps", 4), grid, at, arguments, memory, SharedMemory(shared), stale)

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
def emulated(arch: str, source: Callable[..., Any]) -> Iterator[Emulator]:
    """Launches within are emulated. source: of (kernel, arguments, options), what Triton compiles."""
    emulator, usual = Emulator(arch, source), KernelInterface.__getitem__

    def bound(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: emulator.launch(kernel, grid, args, options)

    KernelInterface.__getitem__ = bound
    try:
        yield emulator
    finally:
        KernelInterface.__getitem__ = usual
