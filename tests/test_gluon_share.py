"""How the Gluon kernel shares tokens among programs: its formulas, run as numbers for batches of every kind."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kivi_kv.ops.kernels.gluon import share
from kivi_kv.ops.kernels.gluon.attend import _shares

COSTS = st.sampled_from([(3, 2), (13, 8), (5, 2), (1, 1), (40, 16)])  # of a page, of 16 full-precision tokens


@st.composite
def batches(draw):
    """(S, rows of (length, packed pages)): nothing stored, sinks alone, residuals of any length, cropped rows."""
    S, rows = draw(st.sampled_from([0, 1, 16, 37])), []
    for _ in range(draw(st.integers(1, 12))):
        packed = draw(st.integers(0, draw(st.sampled_from([0, 2, 60]))))
        behind = draw(st.integers(0, 260))
        rows.append((S + packed * 128 + behind if packed else draw(st.integers(0, S + behind)), packed))
    return S, rows


def attended(S, rows, H, programs, PAGE, DENSE, NEW):
    """{(program, row): units} as decode_kernel walks its share; rows are those of (b, h)."""
    costs = [share._row_cost(share._dense_tokens(n, packed, S), packed, PAGE, DENSE, NEW) for n, packed in rows]
    total = sum(costs) * H
    used = share._programs_used(total, programs, PAGE)
    parts = {}
    for program in range(used):
        low, high = (share._share_start(p, total, used) for p in (program, program + 1))
        start = 0
        for r, cost in enumerate(cost for cost in costs for _ in range(H)):
            packed = rows[r // H][1]
            if cost and start < high and low <= start + share._last_unit(cost, packed, PAGE, DENSE):
                first = share._units_before(max(low - start, 0), packed, PAGE, DENSE)
                last = share._units_before(min(high - start, cost), packed, PAGE, DENSE)
                parts[program, r] = range(first, last)
            start += cost
    return costs, total, used, parts


@settings(deadline=None, max_examples=300)
@given(batches(), st.integers(1, 5), st.integers(1, 1100), COSTS, st.integers(0, 1))
def test_every_unit_is_attended_once_and_combined(batch, H, programs, cost, NEW):
    (S, rows), (PAGE, DENSE) = batch, cost
    costs, total, used, parts = attended(S, rows, H, programs, PAGE, DENSE, NEW)
    assert len({program + r for program, r in parts}) == len(parts), "partial results have places of their own"
    start = 0
    for r in range(len(rows) * H):
        length, packed = rows[r // H]
        blocks = -(-share._dense_tokens(length, packed, S) // 16) + NEW
        units = [unit for (_, row), some in sorted(parts.items()) if row == r for unit in some]
        assert units == list(range(packed + blocks))
        mine = costs[r // H]
        assert mine == packed * PAGE + blocks * DENSE
        if mine:  # combine_kernel
            assert share._units_before(mine, packed, PAGE, DENSE) == packed + blocks
            last = start + share._last_unit(mine, packed, PAGE, DENSE)
            read = range(share._program_at(start, total, used), share._program_at(last, total, used) + 1)
            assert [p for p, row in sorted(parts) if row == r] == list(read)
            assert all(parts[p, r] for p in read), "no program comes by for nothing"
        start += mine


@given(st.integers(1, 2**31 - 1), st.integers(1, 1100), st.data())
def test_the_program_of_a_cost_is_the_one_whose_share_holds_it(total, programs, data):
    programs = min(programs, total)
    cost = data.draw(st.integers(0, total - 1))
    program = share._program_at(cost, total, programs)
    assert share._share_start(program, total, programs) <= cost < share._share_start(program + 1, total, programs)
    assert share._share_start(programs, total, programs) == total


@given(st.integers(1, 2000), st.integers(1, 100_000))
def test_equal_rows_stay_whole_where_that_idles_little(most, rows):
    shares = _shares(most, rows)
    assert 7 * most <= 8 * shares <= 8 * most
    if shares < most:
        assert shares % rows == 0 or rows % shares == 0
