"""ops.attend by the Gluon kernels."""

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ....config import PAGE
from ....format import PageLayout
from ....storage import KVStorage
from ..occupancy import resident_warps
from .carveout import prefer_shared_memory
from .combine import combine_kernel
from .decode import decode_kernel

_LOG2E = 1.4426950408889634


@lru_cache(maxsize=256)
def _device(device: torch.device, layout: PageLayout, tiles: int) -> tuple[int, bool]:
    """Programs that run at once, and whether a kernel may start before the one before it has ended."""
    properties = torch.cuda.get_device_properties(device)
    k_code, k_param, _, v_code, v_param, _ = layout.sizes
    rows = 8 * layout.head_dim // 2 + 16 * PAGE // 2  # of zeros, as operands have them
    queries = 2 * tiles * layout.head_dim if tiles > 2 else 0
    nbytes = 4 * (k_code + k_param + v_code + v_param + rows + queries) + 1024  # which every program costs
    fit = properties.multi_processor_count * (properties.shared_memory_per_multiprocessor // nbytes)
    return min(resident_warps(device), fit), properties.major >= 9  # a program is one warp


def _shares(most: int, rows: int) -> int:
    """Shares of the work: as many as run at once, fewer where that keeps equal rows whole.

    A program that goes from one row to the next waits for queries and pages anew. With few programs a row, most
    would; with many, few do.
    """
    if rows * 3 > most:
        each = -(-rows // most)  # rows of a program
        even = most // rows * rows if rows <= most else rows // each
        if even * 8 >= most * 7 and (rows <= most or rows % each == 0):  # else too much of the device would idle
            return even
    return most


def attend_gluon(
    q: Tensor,
    storage: KVStorage,
    new_k: Tensor | None,
    new_v: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """ops.attend by the kernels above: two launches, no wait for the device. Arguments must have been checked.

    softcap and window must be None. Returns the output [B, HQ, M, D] in q's dtype and the log-sum-exp of the logits
    [B, HQ, M] in fp32.
    """
    B, HQ, M, D = q.shape
    H, layout, config = storage.heads, storage.layout, storage.config
    GQ, rows = HQ // H, B * H
    columns = M * GQ
    TILES = 1 if columns <= 4 else 2 if columns <= 8 else 4
    most, pdl = _device(q.device, layout, TILES)
    units = storage.table.shape[1] + triton.cdiv(storage.dense_k.shape[2], 16) + 1
    programs = min(_shares(most, rows), rows * units)
    q = q if q.stride(3) == 1 else q.contiguous()
    sink_logits = None if sink_logits is None else sink_logits.contiguous()
    has_new = new_k is not None
    new_k, new_v = (storage.dense_k, storage.dense_v) if new_k is None or new_v is None else (new_k, new_v)
    new_k, new_v = (x if _aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in (new_k, new_v))
    part = torch.empty((programs + rows, 4 * TILES, D), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((B, HQ, M), dtype=torch.float32, device=q.device)
    unit = math.gcd(layout.words, 16 * D)
    share = {
        "GQ": GQ, "D": D, "S": config.sink_length, "ROWS": max(32, triton.next_power_of_2(B)),
        "PAGE_COST": layout.words // unit, "DENSE_COST": 16 * D // unit, "HAS_NEW": int(has_new), "PDL": pdl,
    }  # fmt: skip
    kernel = decode_kernel[(programs,)](
        q, storage.pool, storage.table, storage.packed, storage.lengths, storage.dense_k, storage.dense_v,
        new_k, new_v, part, part_lse, scale * _LOG2E, *q.stride()[:3], storage.table.stride(0),
        *storage.dense_k.stride()[:2], *new_k.stride()[:3], *new_v.stride()[:3], B, H, M,
        TILES=TILES, G=layout.group_size, K_BITS=layout.k_bits, V_BITS=layout.v_bits, RING=config.ring_length,
        **share, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    prefer_shared_memory(kernel)
    # partial results of a row, about: few are read at once, many in turns by more programs
    DB, BLOCK, warps = (D, 8, 1) if programs <= 8 * rows else (32, 64, 2) if programs <= 64 * rows else (32, 256, 8)
    combine_kernel[(columns, rows, D // DB)](
        part, part_lse, storage.lengths, storage.packed, part_lse if sink_logits is None else sink_logits, out, lse,
        *out.stride()[:3], B, H, M, programs, COLUMNS=4 * TILES, DB=DB, BLOCK=BLOCK,
        HAS_SINK=sink_logits is not None, **share, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out, lse


def _aligned(x: Tensor) -> bool:
    """Whether Triton will know that rows of x can be copied 16 bytes at a time."""
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in x.stride()[:3])
