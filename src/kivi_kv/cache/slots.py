"""Where pages lie in the pool.

Page index p of all B rows shares the B slots p * B .. p * B + B - 1. Pages are immutable and a row uses at most
one slot of an index, so however rows were reordered, there is always a free slot for a row that packs its next
page: no free list, no reference counts, no copies.
"""

import torch
from torch import Tensor

from ..storage import KVStorage


def reserve(storage: KVStorage, pages: int) -> None:
    """Make room for `pages` pages a row, at least an eighth more than before, so that growth is rare."""
    B, P = storage.table.shape
    if pages <= P:
        return
    more = max(pages, P + P // 8) - P
    # slots are ordered by page index first, so a larger pool keeps every slot number
    pool = storage.pool.new_zeros(((P + more) * B, *storage.pool.shape[1:]))
    pool[: P * B] = storage.pool
    storage.pool = pool
    storage.table = torch.cat([storage.table, storage.table.new_full((B, more), -1)], dim=1)


def assign(storage: KVStorage, rows: slice, first: int, last: int) -> Tensor:
    """Slots for pages first .. last - 1 of `rows`, none of which another row refers to; [rows, pages] int32."""
    B = storage.batch
    page = torch.arange(first, last, device=storage.table.device, dtype=torch.int32)
    row = torch.arange(rows.start, rows.stop, device=page.device, dtype=torch.int32)
    own = page * B + row[:, None]  # the usual case: each row has its own slot
    table = storage.table[:, first:last]
    others = torch.arange(B, device=page.device)
    others = others[(others < rows.start) | (others >= rows.stop)]
    held = table[others]  # [others, pages], of pages to come too: a slot may be given before it is filled
    if not (held[:, None] == own).any():
        return own
    for column, p in enumerate(range(first, last)):
        free = sorted(set(range(p * B, p * B + B)) - set(held[:, column].tolist()))
        own[:, column] = torch.tensor(free[: len(row)], dtype=torch.int32)
    return own
