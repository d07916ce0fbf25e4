"""Merge the partial results of the programs that share a row."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .share import triton_dense_tokens as dense_tokens
from .share import triton_last_unit as last_unit
from .share import triton_program_at as program_at
from .share import triton_programs_used as programs_used
from .share import triton_row_cost as row_cost


@triton.jit(do_not_specialize=["BATCH", "M", "PROGRAMS"])
def combine_kernel(
    part_ptr, part_lse_ptr, length_ptr, packed_ptr, sink_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om,
    BATCH, H, M, PROGRAMS,
    GQ: tl.constexpr, D: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, PAGE_COST: tl.constexpr,
    DENSE_COST: tl.constexpr, HAS_NEW: tl.constexpr, PDL: tl.constexpr, COLUMNS: tl.constexpr, DB: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """DB channels of one query by weights exp2(part_lse). out [B, HQ, M, D], lse [B, HQ, M]."""
    column, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    gq, query = column % GQ, column // GQ
    # read before the wait below: decode_kernel has waited for whatever wrote them before it let this kernel start
    rows = tl.arange(0, ROWS)
    length = tl.load(length_ptr + rows, mask=rows < BATCH, other=0)
    packed = tl.load(packed_ptr + rows, mask=rows < BATCH, other=0)
    cost = tl.where(
        rows < BATCH, row_cost(dense_tokens(length, packed, S), packed, PAGE_COST, DENSE_COST, HAS_NEW), 0
    )
    total = tl.sum(cost, 0) * H
    programs = programs_used(total, PROGRAMS, PAGE_COST)
    mine = tl.sum(tl.where(rows == b, cost, 0), 0)
    packed_b = tl.sum(tl.where(rows == b, packed, 0), 0)
    start = tl.sum(tl.where(rows < b, cost, 0), 0) * H + h * mine
    last = start + last_unit(mine, packed_b, PAGE_COST, DENSE_COST)
    first = program_at(start, total, programs)
    count = tl.where(mine > 0, program_at(last, total, programs) - first + 1, 0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    d, s = tl.program_id(2) * DB + tl.arange(0, DB), tl.arange(0, BLOCK)
    at = (first + bh).to(tl.int64) * COLUMNS + column
    m, weights = -1e30, 0.0
    if HAS_SINK:  # a logit without a value
        m = tl.load(sink_ptr + h * GQ + gq).to(tl.float32) * 1.4426950408889634
        weights += 1.0
    out = tl.zeros([DB], tl.float32)
    for i in range(0, count, BLOCK):
        inside = i + s < count
        lse = tl.load(part_lse_ptr + at + (i + s) * COLUMNS, mask=inside, other=float("-inf"))
        part = tl.load(
            part_ptr + (at + (i + s) * COLUMNS)[:, None] * D + d[None, :], mask=inside[:, None], other=0.0
        )
        top = tl.maximum(m, tl.max(lse, 0))
        alpha, weight = tl.exp2(m - top), tl.exp2(lse - top)
        weights = weights * alpha + tl.sum(weight, 0)
        out = out * alpha + tl.sum(part * weight[:, None], 0)
        m = top
    out = out / tl.where(weights == 0.0, 1.0, weights)
    hq = h * GQ + gq
    at = out_ptr + b.to(tl.int64) * stride_ob + hq.to(tl.int64) * stride_oh + query * stride_om
    tl.store(at + d, out.to(out_ptr.dtype.element_ty))
    lse = tl.where(weights == 0.0, float("-inf"), (m + tl.log2(weights)) * 0.6931471805599453)
    tl.store(lse_ptr + (b.to(tl.int64) * H * GQ + hq) * M + query, lse)
