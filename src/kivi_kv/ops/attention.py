"""Attention over a layer's storage."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..format import PageLayout
from ..storage import KVStorage
from .checks import check_shape
from .dispatch import choose, forced, on_device
from .torch_attention import attend_torch


def _attend_triton(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from .kernels.decode import attend_kernel  # triton need not be installed

    with on_device(q.device):
        return attend_kernel(q, *args, **kwargs)


def _attend_gluon(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from .kernels.gluon.attend import attend_gluon

    with on_device(q.device):
        return attend_gluon(q, *args, **kwargs)


MAX_COLUMNS = 16  # of the Gluon kernel
_ATTEND: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "reference": attend_torch,
    "triton": _attend_triton,
    "gluon": _attend_gluon,
}


def gluon_or_triton(
    layout: PageLayout,
    strict: bool,
    columns: int = 1,
    softcap: float | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> str:
    """Which of the two kernels attends such pages: the Gluon kernel, unless this is beyond it.

    columns: query tokens x query heads of a kv head. Raises ValueError if strict and Gluon cannot.
    """
    why = None
    if layout.head_dim not in (64, 128):
        why = f"head_dim: expected 64 or 128, got {layout.head_dim}"
    elif layout.k_bits > 4 or layout.v_bits > 4:
        why = f"k_bits, v_bits: expected 2 or 4, got {layout.k_bits} and {layout.v_bits}"
    elif columns > MAX_COLUMNS:
        why = f"q: expected at most {MAX_COLUMNS} query tokens x query heads of a kv head, got {columns}"
    elif softcap is not None or window is not None:
        why = f"softcap, window: expected None, got {softcap} and {window}"
    elif scale is not None and scale <= 0:
        why = f"scale: expected a positive number, got {scale}"
    if why and strict:
        raise ValueError(f"backend: gluon cannot run here, {why}")
    return "triton" if why else "gluon"


@overload
def attend(
    q: Tensor,
    storage: KVStorage,
    new_k: Tensor | None = None,
    new_v: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    window: int | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def attend(
    q: Tensor,
    storage: KVStorage,
    new_k: Tensor | None = None,
    new_v: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    window: int | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def attend(
    q: Tensor,
    storage: KVStorage,
    new_k: Tensor | None = None,
    new_v: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    window: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of M query tokens over sinks, pages, residual and, if given, their own K and V.

    q: [B, HQ, M, D]. Every query sees every stored token of its row; query m sees new tokens 0 .. m.
    new_k, new_v: [B, H, M, D], tokens that are not stored yet. scale multiplies the logits (default D ** -0.5).
    softcap bounds them by softcap * tanh(logit / softcap). sink_logits [HQ] join the softmax without a value.
    window: a query sees its own position and window - 1 before it (without new tokens all queries are at the last
    stored position). return_lse adds the logits' log-sum-exp [B, HQ, M] in fp32, by which parts can be merged.
    backend: see ops.dispatch; unless one is asked for, what the Gluon kernel does not take goes to the Triton one.

    Returns [B, HQ, M, D] in q's dtype, zeros (and -inf) where a query sees nothing. Scratch is bounded, whatever
    the context. Raises ValueError on shapes and on an impossible backend.
    """
    B, HQ, M, D = q.shape
    H = storage.heads
    if HQ % H or not HQ:
        raise ValueError(f"q: expected heads a multiple of the cache's {H}, got {HQ}")
    check_shape("q", q, (storage.batch, HQ, M, storage.layout.head_dim))
    if (new_k is None) != (new_v is None):
        raise ValueError(f"new_k, new_v: expected both or none, got only new_{'v' if new_k is None else 'k'}")
    for name, x in (("new_k", new_k), ("new_v", new_v)):
        if x is not None:
            check_shape(name, x, (B, H, M, D))
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"window: expected a positive int or None, got {window!r}")
    if sink_logits is not None:
        check_shape("sink_logits", sink_logits, (HQ,))
    same = all(x is None or x.dtype == storage.layout.dtype for x in (q, new_k, new_v))
    dtype = storage.layout.dtype if same else torch.float32  # which no kernel takes
    name = choose("attend", q.device, dtype, backend) if q.numel() else "reference"
    if name == "gluon":
        name = gluon_or_triton(storage.layout, forced(backend) is not None, HQ // H * M, softcap, window, scale)
    out, lse = _ATTEND[name](
        q,
        storage,
        new_k,
        new_v,
        scale=D**-0.5 if scale is None else scale,
        softcap=softcap,
        sink_logits=sink_logits,
        window=window,
    )
    return (out, lse) if return_lse else out
