"""Triton's interpreter, which runs kernels on a CPU, one program after the other."""

import os

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

INTERPRETED = triton.knobs.runtime.interpret  # set by conftest.py where there is no GPU
ONE_ROUNDING = hasattr(interpreter._interpreter, "fma_fp32")  # of tl.fma

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="many variants: for Triton's interpreter, which compiles nothing"
)


def compiling_environment(cache) -> dict[str, str]:
    """For a process that compiles kernels instead, into the folder `cache`."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(cache)}


def _reduce(self, operands):
    """A reduction by a function of one's own, step by step along the axis, a whole slice in each step.

    The interpreter's own takes a step per element, 60 us each: 4 seconds for 128 tokens of 256 channels.
    """
    operands, axis = self.unravel(operands, self.axis)
    steps = [
        tuple(self.to_tensor(x.handle.data.take(i, axis), x.dtype) for x in operands)
        for i in range(operands[0].handle.data.shape[axis])
    ]
    total = steps[0]
    for step in steps[1:]:
        total = self.combine_fn.fn(*total, *step)
        total = total if isinstance(total, tuple) else (total,)
    data = [x.handle.data for x in total]
    if self.keep_dims:
        data = [x.reshape(*x.shape[:axis], 1, *x.shape[axis:]) for x in data]
    return [self.to_tensor(x, y.dtype) for x, y in zip(data, operands, strict=True)]


def _convert(x, source, target, rounding, others=interpreter._convert_float):
    """fp32 to bf16 and back as devices do it. The interpreter's own cuts, and reads subnormals as 0."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return np.asarray(x).view(np.uint16).astype(np.uint32) << 16
    if (source, target) == (tl.float32, tl.bfloat16):
        word = np.asarray(x).view(np.uint32)
        nearest = (word + 0x7FFF + (word >> 16 & 1)) >> 16  # ties to even
        return np.where(np.isnan(x), word >> 16 | 0x40, nearest).astype(np.uint16)
    return others(x, source, target, rounding)


def _call(self, *args, **options):
    """A function of a kernel. The interpreter's own replaces all of the language again at each call."""
    for module in (tl, tl.core):
        used = any(value is module for value in self.fn.__globals__.values())
        if used and tl.core.is_builtin(module.arange):
            interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)


if INTERPRETED:
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter._convert_float = _convert
