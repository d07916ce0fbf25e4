"""What a layer refuses, before anything is stored."""

import torch
from torch import Tensor

from ..ops.checks import check_finite, check_shape
from ..storage import KVStorage


def check_tokens(storage: KVStorage, k: Tensor, v: Tensor, valid: Tensor | None, checked: bool) -> None:
    """k, v [B, H, M, D] like the storage's, valid [B, M] bool or None; if checked, also no NaN or inf."""
    dense = storage.dense_k
    B, H, _, D = dense.shape
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected shape [{B}, {H}, M, {D}], got {tuple(x.shape)}")
    M = k.shape[2]
    for name, x in (("k", k), ("v", v)):
        check_shape(name, x, (B, H, M, D))
        if x.dtype != dense.dtype or x.device != dense.device:
            raise ValueError(f"{name}: expected {dense.dtype} on {dense.device}, got {x.dtype} on {x.device}")
    if valid is not None:
        check_shape("valid", valid, (B, M))
        if valid.dtype != torch.bool:
            raise ValueError(f"valid: expected bool, got {valid.dtype}")
    if checked:
        for name, x in (("k", k), ("v", v)):
            check_finite(name, x if valid is None else x.transpose(1, 2)[valid])


def check_query(storage: KVStorage, q: Tensor, M: int, sink_logits: Tensor | None) -> None:
    """q [B, HQ, M, D] of the storage's dtype, HQ a multiple of its heads; sink_logits [HQ] or None."""
    B, H, _, D = storage.dense_k.shape
    if q.ndim != 4 or q.shape[1] % H or not q.shape[1]:
        raise ValueError(f"q: expected [B, HQ, M, D], HQ a multiple of {H}, got {tuple(q.shape)}")
    check_shape("q", q, (B, q.shape[1], M, D))
    if q.dtype != storage.dense_k.dtype:
        raise ValueError(f"q: expected {storage.dense_k.dtype}, got {q.dtype}")
    if sink_logits is not None:
        check_shape("sink_logits", sink_logits, (q.shape[1],))
