"""Decode attention over sinks, pages and residual: persistent warps, each with an equal share of all rows' tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from . import names
from .page import FLAT, MMA, A, B, apart, from_words, page_logits, page_values, to_operand, to_words, together
from .share import dense_tokens, programs_used, row_cost, share_start, units_before

_LINE = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


@gluon.jit
def _copy_part(codes, params, source, CODES: gl.constexpr, PARAMS: gl.constexpr):
    """K or V of a page: codes, scales and zeros."""
    names.copy_to_shared(codes, source + gl.arange(0, CODES, layout=_LINE))
    names.copy_to_shared(params, source + CODES + gl.arange(0, PARAMS, layout=_LINE))
    names.commit_group()


@gluon.jit
def _copy_rows(codes, source, packed, n, tokens, S: gl.constexpr, RING: gl.constexpr, D: gl.constexpr):
    """Full-precision tokens n .. n + 15: sinks, then the ring, oldest first."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    token = n + gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    row = gl.where(token < S, token, S + (token + packed * 128 - S) % RING)
    at = gl.expand_dims(row * D, 1) + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, L)), 0)
    mask = gl.expand_dims(token < tokens, 1) & (at >= 0)
    names.copy_to_shared(_rows(codes, D), source + at, mask=mask)
    names.commit_group()


@gluon.jit
def _rows(codes, D: gl.constexpr):
    """The buffer of a page's codes as [16 tokens, D] halves."""
    return codes.slice(0, 8 * D)._reinterpret(gl.float16, [16, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def _pairs(x):
    """Tiles of 4 columns [16, 4] as tiles of 8: two share one, a single one has all its columns twice."""
    wide = ()
    if len(x) == 1:
        wide = wide + (together(x[0], x[0]),)
    else:
        for t in gl.static_range(len(x) // 2):
            wide = wide + (together(x[2 * t], x[2 * t + 1]),)
    return wide


@gluon.jit
def _tiles(wide, TILES: gl.constexpr):
    """Columns [8] as tiles of 4, for every row: [16, 4]."""
    tiles = ()
    for t in gl.static_range(len(wide)):
        even, odd = apart(gl.expand_dims(wide[t], 0))
        tiles = tiles + (even,)
        if TILES > 1:
            tiles = tiles + (odd,)
    return tiles


@gluon.jit
def _softmax(x, units, wide_units, m, reference, sums, shift):
    """Weights of x, by slot and tile. -> the maxima, what weights refer to, its change alpha, sums, weights.

    Weights reach 2^13 (times 2^shift), so that small ones stay clear of the lower end of fp16.
    """
    TILES: gl.constexpr = len(units)
    SLOTS: gl.constexpr = len(x) // TILES
    tops = ()
    for t in gl.static_range(TILES):
        top = x[t]
        for j in gl.static_range(1, SLOTS):
            top = gl.maximum(top, x[j * TILES + t])
        tops = tops + (top,)
    wide_tops = _pairs(tops)
    new_m, new_reference, alpha = (), (), ()
    for t in gl.static_range(len(m)):
        top = gl.maximum(m[t], gl.max(wide_tops[t], 0) * wide_units[t] - 13.0)
        new_m, new_reference = new_m + (top,), new_reference + (top - shift,)
        alpha = alpha + (gl.exp2(reference[t] - (top - shift)),)
    references, alphas = _tiles(new_reference, TILES), _tiles(alpha, TILES)
    p, new_sums = (), ()
    for j in gl.static_range(SLOTS):
        for t in gl.static_range(TILES):
            p = p + (gl.exp2(x[j * TILES + t] * units[t] - references[t]),)
    for t in gl.static_range(TILES):
        total = p[t]
        for j in gl.static_range(1, SLOTS):
            total += p[j * TILES + t]
        new_sums = new_sums + (sums[t] * alphas[t] + total,)
    return new_m, new_reference, alpha, new_sums, p


@gluon.jit
def _operands(p, TILES: gl.constexpr):
    """Weights as operands of [16 tokens, 8 columns], by slot: one tile has all its columns twice, two share one."""
    weights = ()
    for i in gl.static_range(len(p) // TILES):
        if TILES == 1:
            weights = weights + (to_operand(p[i], p[i]),)
        else:
            for t in gl.static_range(TILES // 2):
                weights = weights + (to_operand(p[i * TILES + 2 * t], p[i * TILES + 2 * t + 1]),)
    return weights


@gluon.jit
def _v_shift(params, WORDS: gl.constexpr):
    """-log2 of the power of two in a page's largest V scale, at most 1: weights times scales stay within fp16."""
    word = params.slice(0, WORDS).load(gl.BlockedLayout([WORDS // 32], [32], [1], [0])).to(gl.uint32)
    top = gl.max(gl.maximum(word & 0xFFFF, word >> 16), 0)
    return gl.minimum(15 - (top >> 10).to(gl.int32), 1).to(gl.float32)


@gluon.jit(do_not_specialize=["stride_table", "BATCH", "M"])
def decode_kernel(
    q_ptr, pool_ptr, table_ptr, packed_ptr, length_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr, factor,
    stride_qb, stride_qh, stride_qm, stride_table, stride_kb, stride_kh, BATCH, H, M,
    GQ: gl.constexpr, TILES: gl.constexpr, D: gl.constexpr, G: gl.constexpr, K_BITS: gl.constexpr,
    V_BITS: gl.constexpr, S: gl.constexpr, RING: gl.constexpr, ROWS: gl.constexpr, DENSE: gl.constexpr,
    PAGE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Partial results of every (program, row) that meet, at program + row: part [.., columns, D], part_lse [.., columns]."""
    KG: gl.constexpr = 128 // G
    VG: gl.constexpr = (D + G - 1) // G
    NB: gl.constexpr = D // 32
    VT: gl.constexpr = (TILES + 1) // 2
    COLUMNS: gl.constexpr = 4 * TILES
    K_CODES: gl.constexpr = 4 * D * K_BITS
    V_CODES: gl.constexpr = 4 * D * V_BITS
    K_WORDS: gl.constexpr = K_CODES + KG * D
    WORDS: gl.constexpr = K_WORDS + V_CODES + VG * 128
    k_codes = gl.allocate_shared_memory(gl.int32, [K_CODES], FLAT)
    k_params = gl.allocate_shared_memory(gl.int32, [KG * D], FLAT)
    v_codes = gl.allocate_shared_memory(gl.int32, [V_CODES], FLAT)
    v_params = gl.allocate_shared_memory(gl.int32, [VG * 128], FLAT)

    if PDL:
        names.wait_for_others()  # this kernel was launched before the one before it had ended
        names.launch_dependents()  # and so is the next
    # this program's share [low, high) of the cost of all rows, counted on the device
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    b_at = gl.arange(0, ROWS, layout=L)
    length = gl.load(length_ptr + b_at, mask=b_at < BATCH, other=0)
    packed = gl.load(packed_ptr + b_at, mask=b_at < BATCH, other=0)
    cost = row_cost(length, packed, S, PAGE, DENSE) * H
    total = gl.sum(cost, 0)
    programs = programs_used(total, gl.num_programs(0), PAGE)
    program = gl.program_id(0)
    low, high = share_start(program, total, programs), share_start(program + 1, total, programs)
    if program >= programs:
        high = low
    ends = gl.associative_scan(cost, 0, _add)
    b = gl.sum(((ends <= low) & (b_at < BATCH)).to(gl.int32), 0)
    start = gl.sum(gl.where(b_at == b, ends - cost, 0), 0)  # of row b, head 0

    n = gl.arange(0, 8, layout=gl.SliceLayout(0, B))
    d = gl.arange(0, 32, layout=gl.SliceLayout(1, B))
    F: gl.constexpr = apart(gl.zeros([16, 8], gl.float32, layout=MMA))[0].type.layout
    h = program * 0
    position = low
    while position < high:
        length_b, packed_b = gl.load(length_ptr + b), gl.load(packed_ptr + b)
        cost_b = row_cost(length_b, packed_b, S, PAGE, DENSE)
        while cost_b == 0:
            b += 1
            length_b, packed_b = gl.load(length_ptr + b), gl.load(packed_ptr + b)
            cost_b = row_cost(length_b, packed_b, S, PAGE, DENSE)
        if position == low:
            h = (position - start) // cost_b
        row_start = start + h * cost_b
        tokens = dense_tokens(length_b, packed_b, S)
        first = units_before(position - row_start, packed_b, PAGE, DENSE)
        last = units_before(gl.minimum(high - row_start, cost_b), packed_b, PAGE, DENSE)
        b64, h64 = b.to(gl.int64), h.to(gl.int64)

        stop = gl.minimum(last, packed_b)
        entries = table_ptr + b64 * stride_table
        slot = gl.load(entries + first, mask=first < stop, other=0).to(gl.int64)
        after = gl.load(entries + first + 1, mask=first + 1 < stop, other=0).to(gl.int64)
        rows = b64 * stride_kb + h64 * stride_kh
        dense = (gl.maximum(first, packed_b) - packed_b) * 16
        dense_stop = gl.minimum((last - packed_b) * 16, tokens)
        page = pool_ptr + (slot * H + h64) * WORDS
        if first < stop:
            _copy_part(k_codes, k_params, page, K_CODES, KG * D)
            _copy_part(v_codes, v_params, page + K_WORDS, V_CODES, VG * 128)
        else:
            _copy_rows(k_codes, k_ptr + rows, packed_b, dense, dense_stop, S, RING, D)
            _copy_rows(v_codes, v_ptr + rows, packed_b, dense, dense_stop, S, RING, D)

        q, minus, units = (), (), ()
        for t in gl.static_range(TILES):
            column = 4 * t + n // 2
            at = q_ptr + b64 * stride_qb + h64 * (GQ * stride_qh) + (column // GQ) * stride_qm + (column % GQ) * stride_qh
            raw = ()
            q_top = gl.full([8], 0.0, gl.float32, layout=gl.SliceLayout(0, B))
            for kb in gl.static_range(NB):
                offset = gl.expand_dims(at, 0) + gl.expand_dims(kb * 32 + d, 1)
                some = gl.load(offset, mask=gl.expand_dims(column < M * GQ, 0) & gl.expand_dims(d >= 0, 1), other=0.0)
                raw = raw + (some,)
                q_top = gl.maximum(q_top, gl.max(gl.abs(some.to(gl.float32)), 0))
            # brought below 1/2 by a power of two: no product with a scale leaves fp16
            exponent = gl.minimum(q_top.to(gl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
            down = (0x7F000000 - exponent - 0x01000000).to(gl.float32, bitcast=True)
            for kb in gl.static_range(NB):
                small = (raw[kb].to(gl.float32) * gl.expand_dims(down, 0)).to(gl.float16)
                words = to_words(small)
                odd = gl.arange(0, 8, layout=gl.SliceLayout(0, words.type.layout)) % 2
                q, minus = q + (words,), minus + ((words ^ -2147450880) & -gl.expand_dims(odd, 0),)
            unit8 = gl.expand_dims(gl.convert_layout(factor / down, gl.SliceLayout(0, MMA)), 0)
            units = units + (apart(unit8)[0],)
        wide_units = ()
        pairs = _pairs(units)
        for t in gl.static_range(VT):
            wide_units = wide_units + (gl.max(pairs[t], 0),)

        m, reference, sums, acc, acc_zero = (), (), (), (), ()
        for t in gl.static_range(TILES):
            sums = sums + (gl.zeros([16, 4], gl.float32, layout=F),)
        for t in gl.static_range(VT):
            m = m + (gl.full([8], -1e30, gl.float32, layout=gl.SliceLayout(0, MMA)),)
            reference = reference + (gl.full([8], -1e30, gl.float32, layout=gl.SliceLayout(0, MMA)),)
            acc_zero = acc_zero + (gl.zeros([VG, 8], gl.float32, layout=MMA),)
        for t in gl.static_range(VT * NB):
            acc = acc + (gl.zeros([32, 8], gl.float32, layout=MMA),)

        for i in range(first, stop):
            page = pool_ptr + (after * H + h64) * WORDS
            after = gl.load(entries + i + 2, mask=i + 2 < stop, other=0).to(gl.int64)
            names.wait_group(1)
            names.barrier()
            x = page_logits(k_codes, k_params, q, minus, D, G, K_BITS)
            names.barrier()
            if i + 1 < stop:
                _copy_part(k_codes, k_params, page, K_CODES, KG * D)
            else:
                _copy_rows(k_codes, k_ptr + rows, packed_b, dense, dense_stop, S, RING, D)
            names.wait_group(1)
            names.barrier()
            shift = _v_shift(v_params, VG * 64)
            m, reference, alpha, sums, p = _softmax(x, units, wide_units, m, reference, sums, shift)
            weights = _operands(p, TILES)
            acc, acc_zero = page_values(v_codes, v_params, weights, acc, acc_zero, alpha, D, G, V_BITS)
            names.barrier()
            if i + 1 < stop:
                _copy_part(v_codes, v_params, page + K_WORDS, V_CODES, VG * 128)
            else:
                _copy_rows(v_codes, v_ptr + rows, packed_b, dense, dense_stop, S, RING, D)

        for i in range(dense, dense_stop, 16):
            names.wait_group(1)
            names.barrier()
            x = ()
            token = i + gl.arange(0, 16, layout=gl.SliceLayout(1, F))
            for t in gl.static_range(TILES):
                logits = gl.zeros([16, 8], gl.float32, layout=MMA)
                for kb in gl.static_range(NB):
                    logits = mma_v2(_rows(k_codes, D).slice(kb * 32, 32, 1).load(A), from_words(q[t * NB + kb]), logits)
                x = x + (gl.where(gl.expand_dims(token < dense_stop, 1), apart(logits)[0], float("-inf")),)
            names.barrier()
            _copy_rows(k_codes, k_ptr + rows, packed_b, i + 16, dense_stop, S, RING, D)
            m, reference, alpha, sums, p = _softmax(x, units, wide_units, m, reference, sums, 0.0)
            weights = _operands(p, TILES)
            names.wait_group(1)
            names.barrier()
            new_acc, new_zero = (), ()
            for nb in gl.static_range(NB):
                v = _rows(v_codes, D).slice(nb * 32, 32, 1).permute([1, 0]).load(A)
                for t in gl.static_range(VT):
                    part = mma_v2(v, weights[t], gl.zeros([32, 8], gl.float32, layout=MMA))
                    new_acc = new_acc + (acc[nb * VT + t] * gl.expand_dims(alpha[t], 0) + part * 2.0**-24,)
            for t in gl.static_range(VT):
                new_zero = new_zero + (acc_zero[t] * gl.expand_dims(alpha[t], 0),)
            acc, acc_zero = new_acc, new_zero
            names.barrier()
            _copy_rows(v_codes, v_ptr + rows, packed_b, i + 16, dense_stop, S, RING, D)
        names.wait_group(0)

        at = (program + b * H + h).to(gl.int64) * COLUMNS
        pairs = _pairs(sums)
        group = gl.expand_dims(gl.arange(0, VG, layout=gl.SliceLayout(1, MMA)), 1)
        for t in gl.static_range(VT):
            column = gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))
            column = 8 * t + column // 2 + column % 2 * 4  # even ones are of one tile of 4, odd ones of the next
            all_sums = gl.sum(pairs[t], 0)
            gl.store(part_lse_ptr + at + column, reference[t] + gl.log2(all_sums), mask=column < COLUMNS)
            column = gl.expand_dims(column, 0)
            for nb in gl.static_range(NB):
                zero = gl.expand_dims(gl.sum(gl.where(group == nb * VG // NB, acc_zero[t], 0.0), 0), 0)
                mean = (acc[nb * VT + t] * 2.0**24 + zero) / gl.expand_dims(all_sums, 0)
                ch = gl.expand_dims(nb * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, MMA)), 1)
                gl.store(part_ptr + (at + column) * D + ch, mean, mask=(column < COLUMNS) & (ch >= 0))
        position = row_start + cost_b
        h += 1
        if h == H:
            start = position
            b += 1
            h = 0


@gluon.jit
def _add(a, b):
    return a + b
