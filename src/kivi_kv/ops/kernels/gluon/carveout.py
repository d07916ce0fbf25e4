"""How much of a multiprocessor's memory is shared memory while a kernel runs."""

import ctypes
import os
import warnings
from functools import lru_cache
from typing import Any

from ....config import KiviWarning

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute


def prefer_shared_memory(kernel: Any) -> None:
    """Let a compiled kernel have all of it, from its next launch on.

    What the driver sets aside by itself may just fit the programs that run at once. A kernel launched beside them
    then finds no room, and programs of the next one wait for a second wave: 82 microseconds where 62 are enough.
    """
    _prefer(kernel.function)


@lru_cache(maxsize=256)
def _prefer(function: int) -> None:
    cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    code = cuda.cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY_CARVEOUT, ctypes.c_int(100))
    if code:
        warnings.warn(f"the driver refused a preference of shared memory: error {code}", KiviWarning, stacklevel=3)
