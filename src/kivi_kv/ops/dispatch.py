"""Which implementation runs: one table, chosen once per cache."""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

BACKENDS = ("reference", "triton")
VARIABLE = "KIVI_BACKEND"

# What the Triton kernels take. The reference takes everything, on every device.
_TRITON_DTYPES = {
    "attend": (torch.float16, torch.bfloat16),
    "packed_matmul": (torch.float16, torch.bfloat16),
    "quantize": (torch.float16, torch.bfloat16, torch.float32),
}


def choose(op: str, device: torch.device, dtype: torch.dtype, backend: str | None = None) -> str:
    """The backend of an operator: the one asked for, else that of KIVI_BACKEND, else the fastest that can.

    op: a key of the table above; dtype: that of the operator's floating-point input.
    Raises ValueError when the one asked for does not exist or cannot run here.
    """
    source = "backend"
    if backend is None and os.environ.get(VARIABLE):
        backend, source = os.environ[VARIABLE], VARIABLE
    if backend is None:
        return "triton" if device.type == "cuda" and _why_not_triton(op, device, dtype) is None else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"{source}: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    why = _why_not_triton(op, device, dtype) if backend == "triton" else None
    if why:
        raise ValueError(f"{source}: triton cannot run here, {why}")
    return backend


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch on that device: a model may be split over several, and Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _why_not_triton(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if find_spec("triton") is None:
        return "since it is not installed"
    if device.type != "cuda" and not _interpreted():
        return f"expected a CUDA device (or TRITON_INTERPRET=1 for tests), got {device}"
    if dtype not in _TRITON_DTYPES[op]:
        names = ", ".join(str(d).removeprefix("torch.") for d in _TRITON_DTYPES[op])
        return f"expected a dtype of {names} for {op}, got {str(dtype).removeprefix('torch.')}"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
