"""Where a program begins, and what it may fetch before it may begin."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import names
from .operands import LANES
from .share import dense_tokens, last_unit, programs_used, row_cost, share_start, units_before


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def first_row(
    length_ptr, packed_ptr, BATCH, H, S: gl.constexpr, ROWS: gl.constexpr, PAGE_COST: gl.constexpr,
    DENSE_COST: gl.constexpr, NEW: gl.constexpr, MAY_CHANGE: gl.constexpr,
):  # fmt: skip
    """This program's share [low, high) of the cost of all rows, counted on the device; its first row.

    -> low, high, b, h, where in the cost of all the row begins: at high or behind it if there is no work.
    """
    b_at = gl.arange(0, ROWS, layout=LANES)
    length = gl.load(length_ptr + b_at, mask=b_at < BATCH, other=0, volatile=MAY_CHANGE)
    packed = gl.load(packed_ptr + b_at, mask=b_at < BATCH, other=0, volatile=MAY_CHANGE)
    tokens = dense_tokens(length, packed, S)
    cost = gl.where(b_at < BATCH, row_cost(tokens, packed, PAGE_COST, DENSE_COST, NEW), 0) * H
    total = gl.sum(cost, 0)
    programs = programs_used(total, gl.num_programs(0), PAGE_COST)
    program = gl.program_id(0)
    low, high = share_start(program, total, programs), share_start(program + 1, total, programs)
    if program >= programs:
        high = 0
    ends = gl.associative_scan(cost, 0, _add)
    b = gl.sum(((ends <= low) & (b_at < BATCH)).to(gl.int32), 0)
    cost_b = gl.sum(gl.where(b_at == b, cost, 0), 0) // H
    packed_b = gl.sum(gl.where(b_at == b, packed, 0), 0)
    row = gl.sum(gl.where(b_at == b, ends - cost, 0), 0)
    h = (low - row) // gl.maximum(cost_b, 1)
    row += h * cost_b
    if low - row > last_unit(cost_b, packed_b, PAGE_COST, DENSE_COST):  # within the last unit, which is another's
        row += cost_b
        h += 1
        if h == H:
            b += 1
            h = 0
    return low, high, b, h, row


@gluon.jit
def prefetch(
    pool_ptr, table_ptr, stride_table, length_ptr, packed_ptr, BATCH, H, S: gl.constexpr, ROWS: gl.constexpr,
    PAGE_COST: gl.constexpr, DENSE_COST: gl.constexpr, NEW: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Bring this program's first page on its way to L2 while kernels before this one still run.

    Should they change lengths or the table, it is another page than the one to be attended, and nothing is lost.
    """
    low, high, b, h, row = first_row(length_ptr, packed_ptr, BATCH, H, S, ROWS, PAGE_COST, DENSE_COST, NEW, True)
    wanted = row < high
    packed = gl.load(packed_ptr + b, mask=wanted, other=0, volatile=True)
    first = units_before(gl.maximum(low - row, 0), packed, PAGE_COST, DENSE_COST)
    wanted = wanted & (first < gl.minimum(packed, stride_table))
    slot = gl.load(table_ptr + b.to(gl.int64) * stride_table + first, mask=wanted, other=-1, volatile=True)
    names.prefetch(pool_ptr + (gl.maximum(slot, 0).to(gl.int64) * H + h) * WORDS, WORDS, slot >= 0)
