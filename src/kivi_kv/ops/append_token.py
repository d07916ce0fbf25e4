"""Store one token in every row without the host's knowing any length."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import PAGE
from ..format import to_pages
from ..storage import KVStorage
from .dispatch import choose, on_device


def _append_reference(k: Tensor, v: Tensor, storage: KVStorage) -> None:
    s, S, ring = storage, storage.config.sink_length, storage.config.ring_length
    lengths, packed = s.lengths.long(), s.packed.long()
    full = lengths - S - packed * PAGE >= ring
    row = s.dense_row(lengths)
    room = (row < s.dense_k.shape[2]) & (~full | (packed < s.table.shape[1]))
    flush = (room & full).nonzero().flatten()
    if len(flush):  # a wait on a GPU, where the kernels run instead
        first = packed[flush]
        rows = s.dense_row(S + first[:, None] * PAGE + torch.arange(PAGE, device=k.device))
        old_k, old_v = (x[flush[:, None], :, rows].transpose(1, 2) for x in (s.dense_k, s.dense_v))
        s.pool[s.table[flush, first].long()] = to_pages(old_k, old_v, s.layout)[:, 0]
        s.packed[flush] += 1
    kept = room.nonzero().flatten()
    s.dense_k[kept, :, row[kept]] = k[kept, :, 0]
    s.dense_v[kept, :, row[kept]] = v[kept, :, 0]
    s.lengths += room


def _append_triton(k: Tensor, v: Tensor, storage: KVStorage) -> None:
    from .kernels.append import append_token as run  # triton need not be installed

    with on_device(k.device):
        run(k, v, storage)


_APPEND: dict[str, Callable[[Tensor, Tensor, KVStorage], None]] = {
    "reference": _append_reference,
    "triton": _append_triton,
}


def append_token(k: Tensor, v: Tensor, storage: KVStorage, backend: str | None = None) -> None:
    """Store k, v [B, H, 1, D] as the next token of each row; a row whose ring is full packs its oldest page first.

    Everything that depends on a length happens on the device, so a CUDA graph may hold the call: on a GPU it is two
    launches. The table must name a slot for each page to come. A row without room is left as it is. backend: see
    ops.dispatch. Shapes and values must have been checked.
    """
    _APPEND[choose("quantize", k.device, k.dtype, backend)](k, v, storage)
