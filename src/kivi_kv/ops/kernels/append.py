"""Store one more token in every row, on the device alone: lengths are read and written there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...storage import KVStorage
from .quantize import k_blocks, store_k_page, store_v_page, v_blocks


@triton.jit(do_not_specialize=["BATCH", "PAGES", "DENSE"])
def advance_kernel(
    length_ptr, packed_ptr, moved_ptr, BATCH, PAGES, DENSE, S: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr
):
    """Count the token of every row that has room for it. moved [B]: 0 no room, 1 stored, 2 a page packed before."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    length = tl.load(length_ptr + b, mask=b < BATCH, other=0)
    packed = tl.load(packed_ptr + b, mask=b < BATCH, other=0)
    full = length - S - packed * 128 >= RING  # the ring: its oldest page makes room
    row = tl.where(length < S, length, S + (length - S) % RING)
    room = (row < DENSE) & ((full == 0) | (packed < PAGES))
    tl.store(length_ptr + b, length + room.to(tl.int32), mask=b < BATCH)
    tl.store(packed_ptr + b, packed + (room & full).to(tl.int32), mask=b < BATCH)
    tl.store(moved_ptr + b, room.to(tl.int32) + (room & full).to(tl.int32), mask=b < BATCH)


@triton.jit
def _ring_tile(dense_ptr, rows, count, block, D: tl.constexpr, DB: tl.constexpr):
    """A block's channels, and their values [128, DB] in the first `count` of the given rows."""
    d = block * DB + tl.arange(0, DB)
    mask = (d < D)[None, :] & (tl.arange(0, 128) < count)[:, None]
    return d, tl.load(dense_ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store_token(dense_ptr, new_ptr, row, d, D):
    new = tl.load(new_ptr + d, mask=d < D)
    tl.debug_barrier()  # the row may be one of those that every thread has just read
    tl.store(dense_ptr + row * D + d, new, mask=d < D)


@triton.jit(do_not_specialize=["stride_table"])
def append_kernel(
    k_ptr, v_ptr, dense_k_ptr, dense_v_ptr, pool_ptr, param_ptr, table_ptr, length_ptr, packed_ptr, moved_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_table, stride_db, stride_dh, H, K_PROGRAMS,
    S: tl.constexpr, RING: tl.constexpr, WORDS: tl.constexpr, V_AT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, G: tl.constexpr, VG: tl.constexpr,
    GROUPS: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, LIMIT: tl.constexpr, FUSED: tl.constexpr,
    PARAMS_PER_WORD: tl.constexpr,
):  # fmt: skip
    """K or V of some channels of one row and kv head: pack the ring's oldest page if told so, store the token."""
    values = tl.program_id(0) >= K_PROGRAMS
    KN: tl.constexpr = (DP + KB - 1) // KB
    VN: tl.constexpr = (DP + VB - 1) // VB
    program = tl.where(values, tl.program_id(0) - K_PROGRAMS, tl.program_id(0))
    blocks = tl.where(values, VN, KN)
    block, bh = program % blocks, program // blocks
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    moved = tl.load(moved_ptr + b)
    if moved > 0:
        token = tl.load(length_ptr + b) - 1  # advance_kernel has counted it
        row = tl.where(token < S, token, S + (token - S) % RING)
        at = b * stride_db + h * stride_dh
        first = tl.load(packed_ptr + b) - 1  # the page to pack
        rows = S + (first * 128 + tl.arange(0, 128)) % RING
        page, count = 0 * b, 0
        if moved == 2:
            count = 128
            page = (tl.load(table_ptr + b * stride_table + first).to(tl.int64) * H + h) * WORDS
        if values:
            v_at, new_v = dense_v_ptr + at, v_ptr + b * stride_vb + h * stride_vh
            dv, x = _ring_tile(v_at, rows, count, block, D, VB)
            if moved == 2:
                store_v_page(
                    x, dv, block, pool_ptr, param_ptr, page + V_AT, D, DP, VB, VG, GROUPS, V_BITS, LIMIT, FUSED,
                    PARAMS_PER_WORD,
                )  # fmt: skip
            _store_token(v_at, new_v, row, dv, D)
        else:
            k_at, new_k = dense_k_ptr + at, k_ptr + b * stride_kb + h * stride_kh
            dk, y = _ring_tile(k_at, rows, count, block, D, KB)
            if moved == 2:
                store_k_page(
                    y, dk, block, pool_ptr, param_ptr, page, DP, KB, G, K_BITS, LIMIT, FUSED, PARAMS_PER_WORD
                )
            _store_token(k_at, new_k, row, dk, D)


def append_token(k: Tensor, v: Tensor, storage: KVStorage) -> None:
    """ops.append_token by the kernels above: two launches. Arguments must have been checked."""
    B, H, _, D = k.shape
    layout, config = storage.layout, storage.config
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    moved = torch.empty(B, dtype=torch.int32, device=k.device)
    rows = min(1024, max(16, triton.next_power_of_2(B)))
    advance_kernel[(triton.cdiv(B, rows),)](
        storage.lengths, storage.packed, moved, B, storage.table.shape[1], storage.dense_k.shape[2],
        S=config.sink_length, RING=config.ring_length, ROWS=rows, num_warps=1,
    )  # fmt: skip
    KB, (VB, VG) = k_blocks(layout), v_blocks(layout)
    programs = [B * H * triton.cdiv(layout.padded_dim, block) for block in (KB, VB)]
    append_kernel[(sum(programs),)](
        k, v, storage.dense_k, storage.dense_v, storage.pool, storage.pool.view(layout.dtype), storage.table,
        storage.lengths, storage.packed, moved, *k.stride()[:2], *v.stride()[:2], storage.table.stride(0),
        *storage.dense_k.stride()[:2], H, programs[0],
        S=config.sink_length, RING=config.ring_length, WORDS=layout.words, V_AT=sum(layout.sizes[:3]), D=D,
        DP=layout.padded_dim, KB=KB, VB=VB, G=layout.group_size, VG=VG, GROUPS=layout.v_groups,
        K_BITS=layout.k_bits, V_BITS=layout.v_bits, LIMIT=torch.finfo(layout.dtype).max,
        FUSED=not triton.knobs.runtime.interpret, PARAMS_PER_WORD=4 // layout.dtype.itemsize, num_warps=4,
    )  # fmt: skip
