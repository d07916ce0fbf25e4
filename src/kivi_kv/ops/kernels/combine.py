"""Merge the partial results of splits."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "SPLITS"])
def combine_kernel(
    part_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, H, M, SPLITS,
    GQ: tl.constexpr, D: tl.constexpr, DB: tl.constexpr, BLOCK: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Merge the splits of DB channels of one query by weights exp2(lse). out [B, HQ, M, D], lse [B, HQ, M]."""
    column, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    gq, query = column % GQ, column // GQ
    COLUMNS = M * GQ
    d, s = tl.program_id(2) * DB + tl.arange(0, DB), tl.arange(0, BLOCK)
    at = bh.to(tl.int64) * SPLITS * COLUMNS + column
    m = -1e30
    for first in range(0, SPLITS, BLOCK):
        lse = tl.load(part_lse_ptr + at + (first + s) * COLUMNS, mask=first + s < SPLITS, other=float("-inf"))
        m = tl.maximum(m, tl.max(lse, 0))
    total = 0.0
    if HAS_SINK:  # a logit without a value
        sink = tl.load(sink_ptr + h * GQ + gq).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
        total += tl.exp2(sink - m)
    out = tl.zeros([DB], tl.float32)
    for first in range(0, SPLITS, BLOCK):
        inside = first + s < SPLITS
        lse = tl.load(part_lse_ptr + at + (first + s) * COLUMNS, mask=inside, other=float("-inf"))
        weight = tl.exp2(lse - m)
        total += tl.sum(weight, 0)
        rows = part_ptr + (at + (first + s) * COLUMNS)[:, None] * D + d[None, :]
        part = tl.load(rows, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        out += tl.sum(part * weight[:, None], 0)
    out = out / tl.where(total == 0.0, 1.0, total)
    hq = h * GQ + gq
    at = out_ptr + b.to(tl.int64) * stride_ob + hq.to(tl.int64) * stride_oh + query * stride_om
    tl.store(at + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
    lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + (b.to(tl.int64) * H * GQ + hq) * M + query, lse)
