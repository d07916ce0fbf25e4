"""What a layer's storage represents."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..config import PAGE
from ..format import decode_pages
from ..storage import KVStorage


def dequantize(storage: KVStorage, tokens: int, parts: Iterable[tuple[slice, int, int]]) -> tuple[Tensor, Tensor]:
    """K and V [B, H, tokens, D], zeros behind the end of shorter rows; parts: (rows, length, packed), all rows."""
    s, S = storage, storage.config.sink_length
    k, v = (x.new_zeros((*x.shape[:2], tokens, x.shape[3])) for x in (s.dense_k, s.dense_v))
    for rows, length, packed in parts:
        start = S + packed * PAGE
        for x, dense in ((k, s.dense_k), (v, s.dense_v)):
            head = min(S, length)
            x[rows, :, :head] = dense[rows, :, :head]
            if length > start:
                x[rows, :, start:length] = dense[rows][:, :, s.dense_index(start, length)]
        if packed:
            pages = s.pool[s.table[rows, :packed]]
            k[rows, :, S:start], v[rows, :, S:start] = decode_pages(pages, s.layout, k.dtype)
    return k, v


def tokens(storage: KVStorage, dense: Tensor, start: int, stop: int, length: int, new: Tensor | None) -> Tensor:
    """Tokens start .. stop - 1 of rows that hold `length`: from their ring `dense`, behind it from `new`."""
    parts = []
    if start < length:
        parts.append(dense[:, :, storage.dense_index(start, min(stop, length))])
    if new is not None and stop > length:
        parts.append(new[:, :, max(start, length) - length : stop - length])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
