"""How the tokens of all rows are shared among programs: written once, for Gluon and for Triton.

Rows (b, h) lie end to end, and cost what their units cost: packed pages, then blocks of 16 full-precision tokens.
A program takes the units that start within its share of the whole; shares differ by 1 at most. A page costs at
least as much as a block: what `_programs_used` says of shares rests on it.
"""

from collections.abc import Callable
from typing import Any

import triton
from triton.experimental import gluon


def _both(body: Callable[..., Any]) -> tuple[Any, Any]:
    return triton.jit(body), gluon.jit(body)


def _dense_tokens(length, packed, S):
    """Tokens of a row in full precision: sinks and residual. length, packed: a number or a tensor of them."""
    sinks = length * (length < S) + S * (length >= S)
    behind = length - S - packed * 128
    return sinks + behind * (behind > 0)


def _row_cost(tokens, packed, PAGE_COST, DENSE_COST, NEW):
    """Of one row and kv head: `tokens` in full precision, pages, new tokens if NEW. Numbers or tensors."""
    return packed * PAGE_COST + (tokens + 15) // 16 * DENSE_COST + NEW * DENSE_COST


def _last_unit(cost, packed, PAGE_COST, DENSE_COST):
    """Where the last unit of a row of this cost begins."""
    pages = packed * PAGE_COST
    return cost - DENSE_COST * (cost > pages) - PAGE_COST * (cost <= pages)


def _programs_used(total, programs, PAGE_COST):
    """No share may be smaller than a unit: between a row's first and last program, each has a unit of it."""
    most = total // PAGE_COST
    used = programs * (programs <= most) + most * (most < programs)
    return used + (used == 0)


def _share_start(program, total, programs):
    """Where a program's share begins."""
    each, more = total // programs, total % programs
    return program * each + program * (program < more) + more * (program >= more)


def _program_at(cost, total, programs):
    """The program whose share holds a cost."""
    each, more = total // programs, total % programs
    behind = cost - more * (each + 1)
    each += each == 0
    return cost // (each + 1) * (behind < 0) + (more + behind // each) * (behind >= 0)


def _units_before(cost, packed, PAGE_COST, DENSE_COST):
    """Units of a row that start before a cost >= 0."""
    behind = cost - packed * PAGE_COST
    pages = (cost + PAGE_COST - 1) // PAGE_COST
    return pages * (behind <= 0) + (packed + (behind + DENSE_COST - 1) // DENSE_COST) * (behind > 0)


triton_row_cost, row_cost = _both(_row_cost)
triton_last_unit, last_unit = _both(_last_unit)
triton_programs_used, programs_used = _both(_programs_used)
triton_program_at, _ = _both(_program_at)
_, units_before = _both(_units_before)
triton_dense_tokens, dense_tokens = _both(_dense_tokens)
_, share_start = _both(_share_start)
