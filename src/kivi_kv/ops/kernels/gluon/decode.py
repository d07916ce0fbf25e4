"""Decode attention over sinks, pages, residual and new tokens: one warp a program, each with an equal share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import names
from .dense import copy_new, copy_rows, dense_logits, dense_values
from .operands import (
    FLAT,
    FLAT3,
    MMA,
    B,
    apart,
    pairs,
    store_words,
    tiles,
    to_words,
    weight_operands,
    zeros,
)
from .page import k_to_half, page_logits, page_values, to_half, v_shift
from .share import dense_tokens, row_cost, units_before
from .start import first_row, prefetch

_LINE = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


@gluon.jit
def _queries(
    q_ptr, stride_qh, stride_qm, M, first, factor, memory, GQ: gl.constexpr, TILES: gl.constexpr, D: gl.constexpr
):
    """The queries of a row, each brought below 1/2 (4 where bf16 ends) by a power of two, for products within fp16.

    Column = query token * GQ + query head of the kv head. -> words [16, 8] by 8 columns and 32 channels (in shared
    memory if there are many), columns 2 c and 2 c + 1 of a single tile holding column c; and what a logit is worth
    in units of log2, by tile [1, 4] and by 8 columns [8].
    """
    NB: gl.constexpr = D // 32
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, B))
    d = gl.arange(0, 32, layout=gl.SliceLayout(1, B))
    q, units, wide_units = (), (), ()
    for t in gl.static_range((TILES + 1) // 2):
        column = first + (n // 2 if TILES == 1 else 8 * t + n)
        at = q_ptr + (column // GQ) * stride_qm + (column % GQ) * stride_qh
        raw = ()
        top = gl.full([8], 0.0, gl.float32, layout=gl.SliceLayout(0, B))
        for kb in gl.static_range(NB):
            offset = gl.expand_dims(at, 0) + gl.expand_dims(kb * 32 + d, 1)
            mask = gl.expand_dims(column < M * GQ, 0) & gl.expand_dims(d >= 0, 1)
            part = gl.load(offset, mask=mask, other=0.0).to(gl.float32)
            raw = raw + (part,)
            top = gl.maximum(top, gl.max(gl.abs(part), 0))
        exponent = gl.minimum(top.to(gl.int32, bitcast=True) & 0x7F800000, 0x7D800000)
        down = (0x7E000000 - gl.maximum(exponent, 0x01000000)).to(gl.float32, bitcast=True)
        for kb in gl.static_range(NB):
            words = to_words((raw[kb] * gl.expand_dims(down, 0)).to(gl.float16))
            if TILES <= 2:
                q = q + (words,)
            else:
                store_words(memory.index(t * NB + kb), words)
        unit = gl.convert_layout(factor / down, gl.SliceLayout(0, MMA))
        wide_units = wide_units + (unit,)
        even, odd = apart(gl.expand_dims(unit, 0))
        units = units + (even,)
        if TILES > 1:
            units = units + (odd,)
    return q, units, wide_units


@gluon.jit
def _softmax(x, units, wide_units, reference, sums, before, shift):
    """Weights of x, by slot and tile. -> what weights refer to, the change of that, sums, weights.

    Weights reach 2^13 (times 2^shift, where before they reached 2^before times that), so that small ones stay clear
    of the lower end of fp16.
    """
    TILES: gl.constexpr = len(units)
    SLOTS: gl.constexpr = len(x) // TILES
    tops = ()
    for t in gl.static_range(TILES):
        top = x[t]
        for j in gl.static_range(1, SLOTS):
            top = gl.maximum(top, x[j * TILES + t])
        tops = tops + (top,)
    wide_tops = pairs(tops)
    new_reference, alpha = (), ()
    for t in gl.static_range(len(reference)):
        top = gl.maximum(reference[t] + before, gl.max(wide_tops[t], 0) * wide_units[t] - 13.0)
        new_reference = new_reference + (top - shift,)
        alpha = alpha + (gl.exp2(reference[t] - (top - shift)),)
    references, alphas = tiles(new_reference, TILES), tiles(alpha, TILES)
    p, new_sums = (), ()
    for j in gl.static_range(SLOTS):
        for t in gl.static_range(TILES):
            p = p + (gl.exp2(x[j * TILES + t] * units[t] - references[t]),)
    for t in gl.static_range(TILES):
        total = p[t]
        for j in gl.static_range(1, SLOTS):
            total += p[j * TILES + t]
        new_sums = new_sums + (sums[t] * alphas[t] + total,)
    return new_reference, alpha, new_sums, p


@gluon.jit
def _scaled(x, factor):
    y = ()
    for t in gl.static_range(len(x)):
        y = y + (x[t] * factor,)
    return y


@gluon.jit
def _copy_part(codes, scales, zeros, source, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """K or V of a page: codes, scales and COUNT rows of zeros, WIDTH words each."""
    CODES: gl.constexpr = codes.shape[0]
    SCALES: gl.constexpr = scales.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [1, 1], [1, 0])
    names.copy_to_shared(codes, source + gl.arange(0, CODES, layout=_LINE))
    names.copy_to_shared(scales, source + CODES + gl.arange(0, SCALES, layout=_LINE))
    row = gl.expand_dims(gl.arange(0, COUNT, layout=gl.SliceLayout(1, L)), 1)
    at = row * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L)), 0)
    # HALVES, of fewer rows
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, COUNT, [1, 0])
    rows = names.view(zeros.slice(0, COUNT * WIDTH), gl.int32, [COUNT, WIDTH], layout)
    names.copy_to_shared(rows, source + CODES + SCALES + at)
    names.commit_group()


@gluon.jit
def _store(part_ptr, part_lse_ptr, reference, sums, acc, acc_zero, D: gl.constexpr, VG: gl.constexpr,
           COLUMNS: gl.constexpr, UNIT: gl.constexpr):  # fmt: skip
    """A normalized partial result [columns, D] and log2 of its sum of weights [columns]."""
    VT: gl.constexpr = len(acc_zero)
    NB: gl.constexpr = D // 32
    wide_sums = pairs(sums)
    group = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, MMA)), 1)
    for t in gl.static_range(VT):
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))
        # a single tile has its columns twice: the odd ones go behind those that are stored
        column = column // 2 + column % 2 * 4 if COLUMNS == 4 else 8 * t + column
        total = gl.sum(wide_sums[t], 0)
        gl.store(part_lse_ptr + column, reference[t] + gl.log2(total), mask=column < COLUMNS)
        inverse = gl.expand_dims(1.0 / (UNIT * gl.where(total == 0.0, 1.0, total)), 0)
        column = gl.expand_dims(column, 0)
        for nb in gl.static_range(NB):
            zero = gl.expand_dims(gl.sum(gl.where(group == nb * VG // NB, acc_zero[t], 0.0), 0), 0)
            channel = gl.expand_dims(nb * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, MMA)), 1)
            mean = (acc[nb * VT + t] + zero) * inverse
            gl.store(part_ptr + column * D + channel, mean, mask=(column < COLUMNS) & (channel >= 0))


@gluon.jit(do_not_specialize=["stride_table", "BATCH", "M"])
def decode_kernel(
    q_ptr, pool_ptr, table_ptr, packed_ptr, length_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr, part_ptr, part_lse_ptr,
    factor, stride_qb, stride_qh, stride_qm, stride_table, stride_kb, stride_kh, stride_nkb, stride_nkh, stride_nkm,
    stride_nvb, stride_nvh, stride_nvm, BATCH, H, M,
    GQ: gl.constexpr, TILES: gl.constexpr, D: gl.constexpr, G: gl.constexpr, K_BITS: gl.constexpr,
    V_BITS: gl.constexpr, S: gl.constexpr, RING: gl.constexpr, ROWS: gl.constexpr, PAGE_COST: gl.constexpr,
    DENSE_COST: gl.constexpr, HAS_NEW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Partial results of every program and row that meet, at program + row: part [.., 4 * TILES, D], part_lse."""
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    WIDE: gl.constexpr = DTYPE == gl.bfloat16
    KG: gl.constexpr = 128 // G
    VG: gl.constexpr = (D + G - 1) // G
    NB: gl.constexpr = D // 32
    VT: gl.constexpr = (TILES + 1) // 2
    COLUMNS: gl.constexpr = 4 * TILES
    K_CODES: gl.constexpr = 4 * D * K_BITS
    V_CODES: gl.constexpr = 4 * D * V_BITS
    K_WORDS: gl.constexpr = K_CODES + KG * D
    WORDS: gl.constexpr = K_WORDS + V_CODES + VG * 128
    # of acc: that of codes as they are multiplied, or, if WIDE, one for values from 1e-35 to 1e33
    UNIT: gl.constexpr = 2.0**-12 if WIDE else 2.0**-24
    k_codes = gl.allocate_shared_memory(gl.int32, [K_CODES], FLAT)
    k_scales = gl.allocate_shared_memory(gl.int32, [KG * D // 2], FLAT)
    k_zeros = gl.allocate_shared_memory(gl.int32, [4 * D], FLAT)  # 8 rows, as lanes have: KG of them in use
    v_codes = gl.allocate_shared_memory(gl.int32, [V_CODES], FLAT)
    v_scales = gl.allocate_shared_memory(gl.int32, [VG * 64], FLAT)
    v_zeros = gl.allocate_shared_memory(gl.int32, [1024], FLAT)  # 16 rows, as an operand has: VG in use
    queries = k_scales
    if TILES > 2:
        queries = gl.allocate_shared_memory(gl.int32, [VT * NB, 8, 4, 4], FLAT3)
    L: gl.constexpr = to_words(gl.zeros([32, 8], gl.float16, layout=B)).type.layout
    F: gl.constexpr = apart(gl.zeros([16, 8], gl.float32, layout=MMA))[0].type.layout

    if PDL:
        prefetch(
            pool_ptr, table_ptr, stride_table, length_ptr, packed_ptr, BATCH, H, S, ROWS, PAGE_COST, DENSE_COST,
            HAS_NEW, WORDS,
        )  # fmt: skip
        names.wait_for_others()  # this kernel was launched before the one before it had ended
        names.launch_dependents()  # and so is the next
    low, high, b, h, row = first_row(
        length_ptr, packed_ptr, BATCH, H, S, ROWS, PAGE_COST, DENSE_COST, HAS_NEW, False
    )
    while row < high:
        length_b, packed_b = gl.load(length_ptr + b), gl.load(packed_ptr + b)
        tokens_b = dense_tokens(length_b, packed_b, S)
        cost_b = row_cost(tokens_b, packed_b, PAGE_COST, DENSE_COST, HAS_NEW)
        while cost_b == 0:
            b += 1
            length_b, packed_b = gl.load(length_ptr + b), gl.load(packed_ptr + b)
            tokens_b = dense_tokens(length_b, packed_b, S)
            cost_b = row_cost(tokens_b, packed_b, PAGE_COST, DENSE_COST, HAS_NEW)
        first = units_before(gl.maximum(low - row, 0), packed_b, PAGE_COST, DENSE_COST)
        last = units_before(gl.minimum(high - row, cost_b), packed_b, PAGE_COST, DENSE_COST)
        stop = gl.minimum(last, packed_b)
        dense = (gl.maximum(first, packed_b) - packed_b) * 16
        dense_stop = gl.minimum((last - packed_b) * 16, tokens_b)
        b64, h64 = b.to(gl.int64), h.to(gl.int64)
        k_rows, v_rows = k_ptr + b64 * stride_kb + h64 * stride_kh, v_ptr + b64 * stride_kb + h64 * stride_kh

        entries = table_ptr + b64 * stride_table
        slot = gl.load(entries + first, mask=first < stop, other=0).to(gl.int64)
        after = gl.load(entries + first + 1, mask=first + 1 < stop, other=0).to(gl.int64)
        page = pool_ptr + (slot * H + h64) * WORDS
        if first < stop:
            _copy_part(k_codes, k_scales, k_zeros, page, KG, D // 2)
            _copy_part(v_codes, v_scales, v_zeros, page + K_WORDS, VG, 64)
        q_row = q_ptr + b64 * stride_qb + h64 * (GQ * stride_qh)
        # 0, but not to LLVM, which would keep addresses that rest on it in registers through all rows
        nothing = tokens_b >> 31
        first_column = nothing if TILES > 1 else 0
        q, units, wide_units = _queries(q_row, stride_qh, stride_qm, M, first_column, factor, queries, GQ, TILES, D)
        if TILES > 2:
            names.barrier()
            q = queries
        reference, sums, shift = (), (), nothing.to(gl.float32)
        for _ in gl.static_range(VT):
            reference = reference + (gl.full([8], -1e30, gl.float32, layout=gl.SliceLayout(0, MMA)),)
        for t in gl.static_range(TILES):
            sums = sums + (units[t] * 0.0,)
        acc, acc_zero = zeros(VT * NB, 32), zeros(VT, 16)

        # K of the next unit is on its way while V of this one is attended, and the other way round
        for i in range(first, stop):
            page = pool_ptr + (after * H + h64) * WORDS
            after = gl.load(entries + i + 2, mask=i + 2 < stop, other=0).to(gl.int64)
            names.wait_group(1)
            names.barrier()
            k_unit = 1.0
            if WIDE:
                k_unit = k_to_half(k_scales, k_zeros.slice(0, KG * D // 2))
                names.barrier()
            x = page_logits(k_codes, k_scales, k_zeros, q, D, G, K_BITS, TILES, L)
            names.barrier()
            if i + 1 < stop:
                _copy_part(k_codes, k_scales, k_zeros, page, KG, D // 2)
            else:
                names.commit_group()
            names.wait_group(1)
            names.barrier()
            if WIDE:
                v_unit = to_half(v_scales, 0) * (2.0**24 * UNIT)
                zero_unit = to_half(v_zeros.slice(0, VG * 64), 13) * UNIT
                names.barrier()
                reference, alpha, sums, p = _softmax(
                    x, _scaled(units, k_unit), _scaled(wide_units, k_unit), reference, sums, 0.0, 0.0
                )
            else:
                v_unit, zero_unit = 1.0, UNIT
                before, shift = shift, v_shift(v_scales)
                reference, alpha, sums, p = _softmax(x, units, wide_units, reference, sums, before, shift)
            acc, acc_zero = page_values(
                v_codes, v_scales, v_zeros, weight_operands(p, TILES, gl.float16), acc, acc_zero, alpha,
                v_unit, zero_unit, D, G, V_BITS, WIDE,
            )  # fmt: skip
            names.barrier()
            if i + 1 < stop:
                _copy_part(v_codes, v_scales, v_zeros, page + K_WORDS, VG, 64)
            else:
                names.commit_group()

        copy_rows(k_codes, k_rows, packed_b, dense, dense_stop, S, RING, D)
        copy_rows(v_codes, v_rows, packed_b, dense, dense_stop, S, RING, D)
        for i in range(dense, dense_stop, 16):
            names.wait_group(1)
            names.barrier()
            token = i + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, F)), 1)
            limits = ()
            for _ in gl.static_range(TILES):
                limits = limits + (tokens_b,)
            x = dense_logits(k_codes, q, token, limits, D, TILES, L, DTYPE)
            names.barrier()
            copy_rows(k_codes, k_rows, packed_b, i + 16, dense_stop, S, RING, D)
            reference, alpha, sums, p = _softmax(x, units, wide_units, reference, sums, shift, 0.0)
            shift = 0.0
            names.wait_group(1)
            names.barrier()
            acc, acc_zero = dense_values(v_codes, p, acc, acc_zero, alpha, D, TILES, DTYPE, UNIT)
            names.barrier()
            copy_rows(v_codes, v_rows, packed_b, i + 16, dense_stop, S, RING, D)
        names.wait_group(0)
        names.barrier()

        if HAS_NEW:  # noqa: SIM102 (a constant, then what the device decides)
            if last > packed_b + (tokens_b + 15) // 16:  # the new tokens are the row's last unit
                copy_new(k_codes, new_k_ptr + b64 * stride_nkb + h64 * stride_nkh, stride_nkm, nothing, M, D)
                copy_new(v_codes, new_v_ptr + b64 * stride_nvb + h64 * stride_nvh, stride_nvm, nothing, M, D)
                names.wait_group(0)
                names.barrier()
                token = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, F)), 1)
                limits = ()
                for t in gl.static_range(TILES):  # query m sees new tokens 0 .. m
                    column = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, F)), 0)
                    column = column if TILES == 1 else t // 2 * 8 + 2 * column + t % 2
                    limits = limits + (gl.minimum(column // GQ, M - 1) + 1,)
                x = dense_logits(k_codes, q, token, limits, D, TILES, L, DTYPE)
                reference, alpha, sums, p = _softmax(x, units, wide_units, reference, sums, shift, 0.0)
                acc, acc_zero = dense_values(v_codes, p, acc, acc_zero, alpha, D, TILES, DTYPE, UNIT)
                names.barrier()

        at = (gl.program_id(0) + b * H + h).to(gl.int64) * COLUMNS
        _store(part_ptr + at * D, part_lse_ptr + at, reference, sums, acc, acc_zero, D, VG, COLUMNS, UNIT)
        row += cost_b
        h += 1
        if h == H:
            b += 1
            h = 0
