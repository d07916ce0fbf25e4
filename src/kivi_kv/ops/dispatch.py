"""Which implementation runs: one table, chosen once per cache."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec

import torch

BACKENDS = ("reference", "triton", "gluon")
VARIABLE = "KIVI_BACKEND"

# What the Triton kernels take. The reference takes everything, on every device.
_TRITON_DTYPES = {
    "attend": (torch.float16, torch.bfloat16),
    "packed_matmul": (torch.float16, torch.bfloat16),
    "quantize": (torch.float16, torch.bfloat16, torch.float32),
}


def forced(backend: str | None = None) -> str | None:
    """The backend that was asked for, by argument or by KIVI_BACKEND. Raises ValueError for an unknown name."""
    source = "backend"
    if backend is None and os.environ.get(VARIABLE):
        backend, source = os.environ[VARIABLE], VARIABLE
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{source}: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


def choose(op: str, device: torch.device, dtype: torch.dtype, backend: str | None = None) -> str:
    """The backend of an operator: the one asked for, else that of KIVI_BACKEND, else the fastest that can.

    op: a key of the table above; dtype: that of the operator's floating-point input. "gluon" means the Triton
    kernel for operators that have no other.
    Raises ValueError when the one asked for does not exist or cannot run here.
    """
    wanted = forced(backend)
    if wanted == "reference" or (wanted is None and device.type != "cuda"):
        return "reference"
    why = _why_not_triton(op, device, dtype)
    if why is None and op == "attend" and wanted != "triton":
        why_not_gluon = "since Triton interprets" if _interpreted() else _why_not_gluon(device)
        if why_not_gluon is None:
            return "gluon"
        why = why_not_gluon if wanted else None
    if wanted and why:
        raise ValueError(f"{'backend' if backend else VARIABLE}: {wanted} cannot run here, {why}")
    return "reference" if why else "triton"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch on that device: a model may be split over several, and Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _why_not_triton(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if not _has_triton():
        return "since it is not installed"
    if device.type != "cuda" and not _interpreted():
        return f"expected a CUDA device (or TRITON_INTERPRET=1 for tests), got {device}"
    if dtype not in _TRITON_DTYPES[op]:
        names = ", ".join(str(d).removeprefix("torch.") for d in _TRITON_DTYPES[op])
        return f"expected a dtype of {names} for {op}, got {str(dtype).removeprefix('torch.')}"
    return None


@lru_cache(maxsize=64)
def _why_not_gluon(device: torch.device) -> str | None:
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    if not nvidia or torch.cuda.get_device_capability(device) < (8, 0):
        return "expected an NVIDIA GPU of compute capability 8.0 or later"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
