"""Edits of a layer's storage: crop, select rows, reset. Pages move only when the batch size changes."""

import torch
from torch import Tensor

from ..config import PAGE
from ..format import decode_pages
from ..storage import KVStorage


def crop(storage: KVStorage, lengths: list[int]) -> None:
    """Keep the first lengths[b] tokens of each row b.

    A cut within the full-precision part changes the length only. A cut within a page dequantizes what is left
    of that page into the ring: the one case in which a token is quantized again later.
    """
    S = storage.config.sink_length
    old = storage.lengths.tolist()
    if len(lengths) != len(old):
        raise ValueError(f"lengths: expected one for each of {len(old)} rows, got {len(lengths)}")
    for row, (length, before) in enumerate(zip(lengths, old, strict=True)):
        if type(length) is not int or not 0 <= length <= before:
            raise ValueError(f"lengths: expected from 0 to {before} in row {row}, got {length}")
    for row, (length, packed) in enumerate(zip(lengths, storage.packed.tolist(), strict=True)):
        keep = max(0, length - S) // PAGE  # whole pages that stay
        if keep >= packed:
            continue
        start = S + keep * PAGE
        if length > start:
            page = storage.pool[storage.table[row : row + 1, keep : keep + 1]]
            index = storage.dense_index(start, length)
            for dense, x in zip(
                (storage.dense_k, storage.dense_v),
                decode_pages(page, storage.layout, storage.layout.dtype),
                strict=True,
            ):
                dense[row].index_copy_(1, index, x[0, :, : length - start])
        storage.packed[row] = keep
        storage.table[row, keep:] = -1
    storage.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))


def select(storage: KVStorage, indices: Tensor) -> None:
    """Make the rows at indices the new batch. With as many rows as before, only table entries move."""
    B, P = storage.table.shape
    if not isinstance(indices, Tensor):
        raise ValueError(f"indices: expected a tensor, got {type(indices).__name__}")
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise ValueError(f"indices: expected an integer dtype, got {indices.dtype}")
    indices = indices.to(storage.table.device).long()
    if indices.ndim != 1 or not len(indices) or indices.min() < 0 or indices.max() >= B:
        raise ValueError(f"indices: expected row numbers from 0 to {B - 1}, got {indices.tolist()}")
    table = storage.table[indices]
    if len(indices) == B:
        storage.table.copy_(table)
        for x in (storage.lengths, storage.packed, storage.dense_k, storage.dense_v):
            x.copy_(x[indices])
        return
    size = len(indices)
    page = torch.arange(P, device=table.device, dtype=torch.int32)
    slot = page * size + torch.arange(size, device=table.device, dtype=torch.int32)[:, None]
    held = table >= 0
    pool = storage.pool.new_zeros((P * size, *storage.pool.shape[1:]))
    pool[slot[held]] = storage.pool[table[held]]
    storage.pool = pool
    storage.table = torch.where(held, slot, -1)
    storage.lengths, storage.packed = storage.lengths[indices], storage.packed[indices]
    storage.dense_k, storage.dense_v = storage.dense_k[indices], storage.dense_v[indices]


def reset(storage: KVStorage) -> None:
    """Forget every token; the memory stays allocated."""
    storage.lengths.zero_()
    storage.packed.zero_()
    storage.table.fill_(-1)
