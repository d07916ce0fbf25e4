"""Fused attention over sinks, packed pages, residual and new tokens: one pass, split over tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...storage import KVStorage
from .combine import combine_kernel
from .numbers import inverse_power, power, softcapped
from .occupancy import resident_warps
from .pages import page_logits, page_values


@triton.jit
def _queries(
    q_ptr, column, stride_m, stride_hq, COLUMNS, GQ: tl.constexpr, START: tl.constexpr, D: tl.constexpr,
    CB: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """CB channels of q^T, [CB, columns], from START; column = query token * GQ + query head of the kv head."""
    d = START + tl.arange(0, CB)
    at = q_ptr + ((column // GQ) * stride_m + (column % GQ) * stride_hq)[None, :] + d[:, None]
    mask = (column < COLUMNS)[None, :] & (d < D)[:, None]
    return tl.load(at, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _shrink(m, top):
    """The running maximum with a block's maximum, and the factor of what was summed before.

    2^-13 of it is kept, so that weights reach 2^13 and small ones stay clear of the lower end of fp16.
    """
    m_new = tl.maximum(m, top - 13.0)
    return m_new, tl.exp2(m - m_new)


@triton.jit
def _dense_block(
    k_ptr, v_ptr, t, stride_kt, stride_vt, stored, seen, q, factor, cap, m, sums, acc,
    D: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend 32 full-precision tokens: rows t of K and V where stored [32], by columns where seen [32, columns]."""
    VG: tl.constexpr = DB // VB
    d = tl.arange(0, DB)
    k = tl.load(k_ptr + t[:, None] * stride_kt + d[None, :], mask=stored[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:  # the interpreter has no product of bf16
        k, q = k.to(tl.float32), q.to(tl.float32)
    x = tl.dot(k, q, input_precision="ieee") * factor  # [32, columns]
    if SOFTCAP:
        x = softcapped(x, cap)
    x = tl.where(seen & stored[:, None], x, float("-inf"))
    m, alpha = _shrink(m, tl.max(x, 0))
    p = tl.exp2(x - m[None, :])
    dv = tl.arange(0, VG)[:, None, None] * VB + tl.arange(0, VB)[None, :, None]
    at = v_ptr + t[None, None, :] * stride_vt + dv
    v = tl.load(at, mask=stored[None, None, :] & (dv < D), other=0.0)  # [VG, VB, 32]
    if UPCAST:
        v = v.to(tl.float32)
    high = p.to(v.dtype)
    out = tl.dot(v, tl.broadcast_to(high[None], [VG, 32, high.shape[1]]), input_precision="ieee")
    if v.dtype == tl.bfloat16:  # whose rounding of weights would show
        low = (p - high.to(tl.float32)).to(v.dtype)
        out = tl.dot(v, tl.broadcast_to(low[None], [VG, 32, low.shape[1]]), out)
    return m, sums * alpha + tl.sum(p, 0), acc * alpha[None, None, :] + out, alpha


@triton.jit(do_not_specialize=["stride_table", "M", "SPLITS", "WINDOW"])
def decode_kernel(
    q_ptr, pool_ptr, param_ptr, table_ptr, packed_ptr, length_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr,
    out_ptr, lse_ptr, factor, cap,
    stride_qb, stride_qh, stride_qm, stride_table, stride_kb, stride_kh,
    stride_nkb, stride_nkh, stride_nkm, stride_nvb, stride_nvh, stride_nvm,
    H, M, SPLITS, WINDOW,
    GQ: tl.constexpr, NC: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr,
    GROUPS: tl.constexpr, G: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, WORDS: tl.constexpr,
    V_AT: tl.constexpr, PARAMS_PER_WORD: tl.constexpr, S: tl.constexpr, RING: tl.constexpr, HAS_NEW: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One split of the tokens of one row and kv head, for NC columns of queries.

    Tokens come in units: a page, or 32 full-precision tokens. Each split takes an equal share of the units, counted
    on the device, so one launch serves every length. out [B, H, SPLITS, columns, D] and lse [B, H, SPLITS, columns]
    are fp32: a normalized partial result and log2 of its sum of weights, -inf where nothing was seen.
    """
    split, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    COLUMNS = M * GQ
    CB: tl.constexpr = 64 if NC == 8 and DB > 64 else min(DB, 32)  # channels of a block of page_logits
    column = tile * NC + tl.arange(0, NC)
    WIDE: tl.constexpr = q_ptr.dtype.element_ty != tl.float16
    q_ptr += b * stride_qb + h * GQ * stride_qh
    page_q, top = (), tl.zeros([NC], tl.float32)
    for kb in tl.static_range(DB // CB):
        part = _queries(q_ptr, column, stride_qm, stride_qh, COLUMNS, GQ, kb * CB, D, CB, "evict_first")
        top = tl.maximum(top, tl.max(tl.abs(part.to(tl.float32)), 0))
        page_q = page_q + (part.to(tl.float32) if UPCAST else part,)
    q_unit = factor + tl.zeros([NC], tl.float32)
    if not WIDE:  # bring each query below 1/2: no product with a scale leaves fp16
        small = ()
        for kb in tl.static_range(DB // CB):
            part = page_q[kb].to(tl.float32) * (inverse_power(top) * 0.25)[None, :]
            small = small + (part.to(tl.float16),)
        page_q = small
        q_unit *= power(top) * 4.0

    length, packed = tl.load(length_ptr + b), tl.load(packed_ptr + b)
    position = length - 1  # of each column's query
    if HAS_NEW:
        position += 1 + column // GQ
    else:
        position += column * 0
    first_page = 0
    if WINDOWED:
        first_page = tl.minimum(tl.maximum(tl.min(position, 0) - WINDOW + 1 - S, 0) // 128, packed)
    new_end = 0
    if HAS_NEW:
        new_end = tl.minimum((tile * NC + NC - 1) // GQ + 1, M)
    behind = length - S - packed * 128  # tokens of the ring
    dense_tokens = tl.minimum(length, S) + tl.maximum(behind, 0)
    pages, dense, new = packed - first_page, tl.cdiv(dense_tokens, 32), tl.cdiv(new_end, 32)
    units = (pages + dense + new).to(tl.int64)
    start, stop = (split * units // SPLITS).to(tl.int32), ((split + 1) * units // SPLITS).to(tl.int32)

    m = tl.full([NC], -1e30, tl.float32)
    sums = tl.zeros([NC], tl.float32)
    acc = tl.zeros([DB // VB, VB, NC], tl.float32)
    acc_zero = tl.zeros([DB // VB, NC], tl.float32)
    i = tl.arange(0, 16)
    for unit in range(start, tl.minimum(stop, pages)):
        index = first_page + unit
        page = (tl.load(table_ptr + b * stride_table + index).to(tl.int64) * H + h) * WORDS
        x = page_logits(
            pool_ptr, param_ptr, page, page_q, q_unit, cap, DP, G, K_BITS, PARAMS_PER_WORD, SOFTCAP,
            K_KIND,
        )  # fmt: skip
        if WINDOWED:
            seen = ()
            for j in tl.static_range(8):
                token = S + index * 128 + j * 16 + i
                seen = seen + (tl.where(token[:, None] > (position - WINDOW)[None, :], x[j], float("-inf")),)
            x = seen
        block = x[0]
        for j in tl.static_range(1, 8):
            block = tl.maximum(block, x[j])
        m, alpha = _shrink(m, tl.max(block, 0))
        weights = ()
        total = tl.zeros([16, NC], tl.float32)
        for j in tl.static_range(8):
            p = tl.exp2(x[j] - m[None, :])
            total += p
            if not WIDE:
                p = p.to(tl.float16)
            weights = weights + (p,)
        sums = sums * alpha + tl.sum(total, 0)
        acc, acc_zero = page_values(
            pool_ptr, param_ptr, page + V_AT, weights, acc, acc_zero, alpha,
            DP, DB, VB, GROUPS, V_BITS, PARAMS_PER_WORD, WIDE, UPCAST, V_KIND,
        )  # fmt: skip

    # loaded again rather than kept in registers all the while: a policy of its own keeps it a load of its own
    q = _queries(q_ptr, column, stride_qm, stride_qh, COLUMNS, GQ, 0, D, DB, "evict_last")
    for unit in range(tl.maximum(start, pages), tl.minimum(stop, pages + dense)):
        n = (unit - pages) * 32 + tl.arange(0, 32)  # sinks, then the ring, oldest first
        token = tl.where(n < S, n, n + packed * 128)
        row = tl.where(n < S, n, S + (token - S) % RING)
        stored = n < dense_tokens
        seen = token[:, None] >= 0 * column[None, :]
        if WINDOWED:
            seen = token[:, None] > (position - WINDOW)[None, :]
        at = b * stride_kb + h * stride_kh
        m, sums, acc, alpha = _dense_block(
            k_ptr + at, v_ptr + at, row, D, D, stored, seen, q, factor, cap, m, sums, acc,
            D, DB, VB, SOFTCAP, UPCAST,
        )  # fmt: skip
        acc_zero *= alpha[None, :]

    if HAS_NEW:
        for unit in range(tl.maximum(start, pages + dense), stop):
            t = (unit - pages - dense) * 32 + tl.arange(0, 32)
            seen = t[:, None] <= (column // GQ)[None, :]
            if WINDOWED:
                seen = seen & ((length + t)[:, None] > (position - WINDOW)[None, :])
            m, sums, acc, alpha = _dense_block(
                new_k_ptr + b * stride_nkb + h * stride_nkh, new_v_ptr + b * stride_nvb + h * stride_nvh,
                t, stride_nkm, stride_nvm, t < M, seen, q, factor, cap, m, sums, acc, D, DB, VB, SOFTCAP, UPCAST,
            )  # fmt: skip
            acc_zero *= alpha[None, :]

    acc = (acc + acc_zero[:, None, :]) / tl.where(sums == 0.0, 1.0, sums)[None, None, :]
    lse = tl.where(sums == 0.0, float("-inf"), m + tl.log2(sums))
    at = (bh.to(tl.int64) * SPLITS + split) * COLUMNS + column
    dv = tl.arange(0, DB // VB)[:, None, None] * VB + tl.arange(0, VB)[None, :, None]
    tl.store(out_ptr + at[None, None, :] * D + dv, acc, mask=(column < COLUMNS)[None, None, :] & (dv < D))
    tl.store(lse_ptr + at, lse, mask=column < COLUMNS)


_LOG2E = 1.4426950408889634
_TILES = {8: (1, 2), 16: (4, 3), 32: (4, 2)}  # columns of a program: its warps, stages of its pipeline; none spills


def attend_kernel(
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

    Returns the output [B, HQ, M, D] in q's dtype and the log-sum-exp of the logits [B, HQ, M] in fp32.
    """
    B, HQ, M, D = q.shape
    H, layout, config = storage.heads, storage.layout, storage.config
    GQ, rows = HQ // H, storage.dense_k.shape[2]
    COLUMNS = M * GQ
    NC = next((n for n in _TILES if n >= COLUMNS), max(_TILES))
    if torch.version.hip:
        NC = max(NC, 16)  # the smallest matrix unit there
    warps, stages = _TILES[NC]
    tiles = triton.cdiv(COLUMNS, NC)
    units = storage.table.shape[1] + triton.cdiv(rows, 32) + (triton.cdiv(M, 32) if new_k is not None else 0)
    splits = max(1, min(units, resident_warps(q.device) // (warps * B * H * tiles)))
    DB = triton.next_power_of_2(layout.padded_dim)
    q = q if q.stride(3) == 1 else q.contiguous()
    new_k, new_v = (storage.dense_k, storage.dense_v) if new_k is None or new_v is None else (new_k, new_v)
    new_k, new_v = (x if x.stride(3) == 1 else x.contiguous() for x in (new_k, new_v))
    fp16_kind = "fp16" if torch.version.hip else "subnormal"
    upcast = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16
    k_kind = fp16_kind if q.dtype == torch.float16 else "fp32" if upcast else "bf16"
    sink_logits = None if sink_logits is None else sink_logits.contiguous()
    part = torch.empty((B, H, splits, COLUMNS, D), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((B, H, splits, COLUMNS), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((B, HQ, M), dtype=torch.float32, device=q.device)
    decode_kernel[(splits * tiles, B * H)](
        q, storage.pool, storage.pool.view(layout.dtype), storage.table, storage.packed, storage.lengths,
        storage.dense_k, storage.dense_v, new_k, new_v, part, part_lse, scale * _LOG2E, (softcap or 0.0) * _LOG2E,
        q.stride(0), q.stride(1), q.stride(2), storage.table.stride(0), *storage.dense_k.stride()[:2],
        *new_k.stride()[:3], *new_v.stride()[:3],
        H, M, splits, window or 0,
        GQ=GQ, NC=NC, D=D, DP=layout.padded_dim, DB=DB, VB=min(layout.group_size, DB), GROUPS=layout.v_groups,
        G=layout.group_size, K_BITS=layout.k_bits, V_BITS=layout.v_bits, WORDS=layout.words,
        V_AT=sum(layout.sizes[:3]), PARAMS_PER_WORD=4 // layout.dtype.itemsize, S=config.sink_length,
        RING=config.ring_length, HAS_NEW=new_k is not storage.dense_k, SOFTCAP=softcap is not None,
        WINDOWED=window is not None, K_KIND=k_kind, V_KIND=fp16_kind,
        UPCAST=upcast, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    block = min(DB, 32)  # channels: many programs, since each reads all splits
    combine_kernel[(COLUMNS, B * H, triton.cdiv(D, block))](
        part, part_lse, part_lse if sink_logits is None else sink_logits, out, lse, *out.stride()[:3], H, M, splits,
        GQ=GQ, D=D, DB=block, BLOCK=64, HAS_SINK=sink_logits is not None,
        num_warps=2,
    )  # fmt: skip
    return out, lse
