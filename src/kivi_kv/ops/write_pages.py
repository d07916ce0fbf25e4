"""Quantize K and V into pages of a pool."""

from collections.abc import Callable

from torch import Tensor

from ..format import PageLayout, to_pages
from .dispatch import choose, on_device


def _write_reference(k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, layout: PageLayout) -> None:
    pool[slots.flatten()] = to_pages(k, v, layout).flatten(0, 1)


def _write_triton(k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, layout: PageLayout) -> None:
    from .kernels.quantize import write_pages  # triton need not be installed

    with on_device(k.device):
        write_pages(k, v, pool, slots, layout)


_WRITE: dict[str, Callable[..., None]] = {"reference": _write_reference, "triton": _write_triton}


def write_pages(
    k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, layout: PageLayout, backend: str | None = None
) -> None:
    """Quantize k and v [B, H, P * 128, D], of any strides, into pages pool[slots], bit for bit as format.to_pages.

    pool: [slots, H, words] int32; slots: [B, P] int32, all different. backend: see ops.dispatch. On a GPU one
    launch each for K and V reads its input once. Shapes and values must have been checked.
    """
    _WRITE[choose("quantize", k.device, k.dtype, backend)](k, v, pool, slots, layout)
