"""ops.attend by the Gluon kernel."""

import os
from functools import lru_cache

import torch
import math
import triton
from torch import Tensor

from ....storage import KVStorage
from .combine import combine_kernel
from .decode import decode_kernel

_LOG2E = 1.4426950408889634
PER_SM = int(os.environ.get("PER_SM", "8"))
MAXNREG = int(os.environ.get("MAXNREG", "0"))


@lru_cache(maxsize=64)
def _device(device: torch.device) -> tuple[int, bool]:
    """Programs that run at once, and whether a kernel may start before the one before it has ended."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def _programs(most: int, rows: int) -> int:
    """About `most` programs: as many for each row, or rows for each of them, so that equal rows are not cut."""
    if rows <= most:
        return most // rows * rows if most % rows * 10 < most else most
    each = -(-rows // most)
    return rows // each if rows % each == 0 else most


def attend_gluon(
    q: Tensor, storage: KVStorage, *, scale: float, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """ops.attend without new tokens by the kernels above."""
    B, HQ, M, D = q.shape
    H, layout, config = storage.heads, storage.layout, storage.config
    GQ = HQ // H
    columns = M * GQ
    tiles = 1 if columns <= 4 else 2 if columns <= 8 else 4
    sms, pdl = _device(q.device)
    programs = min(_programs(sms * PER_SM, B * H), B * H * (storage.table.shape[1] + triton.cdiv(storage.dense_k.shape[2], 16)))
    q = q if q.stride(3) == 1 else q.contiguous()
    part = torch.empty((programs + B * H, 4 * tiles, D), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((programs + B * H, 4 * tiles), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((B, HQ, M), dtype=torch.float32, device=q.device)
    rows = max(32, triton.next_power_of_2(B))
    unit = math.gcd(layout.words, 16 * D)
    share = {"S": config.sink_length, "ROWS": rows, "PAGE": layout.words // unit, "DENSE": 16 * D // unit}
    decode_kernel[(programs,)](
        q, storage.pool, storage.table, storage.packed, storage.lengths, storage.dense_k, storage.dense_v, part, part_lse,
        scale * _LOG2E, *q.stride()[:3], storage.table.stride(0), *storage.dense_k.stride()[:2], B, H, M,
        GQ=GQ, TILES=tiles, D=D, G=layout.group_size, K_BITS=layout.k_bits, V_BITS=layout.v_bits,
        RING=config.ring_length, PDL=pdl, **share, num_warps=1, launch_pdl=pdl, **({"maxnreg": MAXNREG} if MAXNREG else {}),
    )  # fmt: skip
    each = triton.cdiv(programs, B * H)  # partial results of a row, about: few are read at once, many in turns
    DB, BLOCK = (D, 8) if each <= 8 else (32, 64)
    combine_kernel[(columns, B * H, D // DB)](
        part, part_lse, storage.lengths, storage.packed, part_lse if sink_logits is None else sink_logits, out, lse,
        *out.stride()[:3], B, H, M, programs, GQ=GQ, D=D, COLUMNS=4 * tiles, DB=DB, BLOCK=BLOCK,
        HAS_SINK=sink_logits is not None, PDL=pdl, **share, num_warps=1 if DB == D else 2, launch_pdl=pdl,
    )  # fmt: skip
    return out, lse
