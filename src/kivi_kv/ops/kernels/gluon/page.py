"""A page's logits and weighted values, by one warp, from the page's words in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..numbers import slot_unit, slots_in_place
from . import names
from .operands import (
    FLAT2,
    FLAT3,
    HALVES,
    MMA,
    A,
    B,
    apart,
    as_halves,
    joined,
    load_words,
    multiply,
    zeros,
)

# [blocks, lane, 4]: four words a lane and block
_WORDS = gl.constexpr(gl.BlockedLayout([2, 1, 4], [1, 32, 1], [1, 1, 1], [2, 1, 0]))
# [pair of lanes, 8 halves or 4 words]: the same for all eight rows of lanes
_BY_PAIR = gl.constexpr([[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]])
_PAIRS = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], _BY_PAIR.value, [], [], [4, 8]))
# [rows of lanes, 32 halves]: 16 bytes a lane
_LANE_ROWS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [], [], [8, 32])
)
_PAIRS32 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2]], _BY_PAIR.value, [], [], [4, 4]))


@gluon.constexpr_function
def _masked(slot, bits):
    """The bits of a slot in both halves of a word: subnormal fp16 numbers, each slot_unit times its code."""
    mask = (((1 << bits) - 1) * 0x10001) << (slot % slots_in_place(bits, "fp16") * bits)
    return f"{{ .reg .b32 t; and.b32 t, $2, {mask}; mov.b32 {{$0, $1}}, t; }}"


@gluon.jit
def _codes(words, SLOT: gl.constexpr, BITS: gl.constexpr):
    """Codes of one slot as pairs of halves, times slot_unit."""
    HERE: gl.constexpr = slots_in_place(BITS, "fp16")
    if SLOT >= HERE:
        words = words >> (SLOT // HERE * HERE * BITS)
    low, high = gl.inline_asm_elementwise(
        _masked(SLOT, BITS), "=h,=h,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([2, 8, 4, 2, 2, 2])  # block, row, pair, r1, r0, half


@gluon.jit
def _words(codes, PLANE: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr):
    """Words [2, 32 lanes, 4] of 32 channels."""
    return names.view(codes.slice(PLANE * (D * 8) + BLOCK * 256, 256), gl.int32, [2, 32, 4], FLAT3).load(_WORDS)


@gluon.jit
def _two_terms(q, scale):
    """q * scale in even columns, what its rounding lost in odd ones, both exact: an operand.

    q [16, 8], scale [16, 1]: words of two halves.
    """
    odd = gl.arange(0, 8, layout=gl.SliceLayout(0, q.type.layout)) % 2
    minus = (q ^ -2147450880) & -gl.expand_dims(odd, 0)  # -q in odd columns, 0 in even ones
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b32 t; mul.rn.f16x2 t, $3, $4; fma.rn.f16x2 t, $2, $4, t; mov.b32 {$0, $1}, t; }",
        "=h,=h,r,r,r", [q, minus, scale], dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    return joined(low, high)


@gluon.jit
def _split_terms(q, scale):
    """q * scale, and what its rounding lost: two operands, of half the operations for twice the columns."""
    low0, high0, low1, high1 = gl.inline_asm_elementwise(
        """{ .reg .b32 t; mul.rn.f16x2 t, $4, $5; mov.b32 {$0, $1}, t;
        neg.f16x2 t, t; fma.rn.f16x2 t, $4, $5, t; mov.b32 {$2, $3}, t; }""",
        "=h,=h,=h,=h,r,r", [q, scale], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    return joined(low0, high0), joined(low1, high1)


@gluon.jit
def _add_biases(k_zeros, kb, words, sums, D: gl.constexpr):
    """Add zeros . q of 32 channels to sums: two [16, 8].

    The operand's registers are 16 bytes of memory as they are: rows of lanes are groups (what lies behind them goes
    to rows of the sums that nothing reads), rows 0 .. 7 and 8 .. 15 are channels 8 apart (r1), and blocks of 16
    channels are its columns 8 apart. So the first sum, with the queries of one half of the channels, counts in its
    upper rows, the second in its lower ones.
    """
    x = names.view(k_zeros, gl.float16, [8, D], HALVES).slice(kb * 32, 32, 1).load(_LANE_ROWS)
    x = x.reshape([8, 4, 2, 2, 2]).permute([3, 0, 2, 1, 4]).reshape([16, 16])  # (r1, row), (block, pair, half)
    x = gl.convert_layout(x, A, assert_trivial=True)
    halves = gl.split(words.reshape([2, 2, 4, 8]).permute([0, 2, 3, 1]))
    new = ()
    for r1 in gl.static_range(2):
        low, high = as_halves(halves[r1].reshape([8, 8]))
        q = gl.join(low, high).permute([0, 2, 1]).reshape([16, 8])
        new = new + (mma_v2(x, gl.convert_layout(q, B, assert_trivial=True), sums[r1]),)
    return new


@gluon.jit
def _biases(sums, KG: gl.constexpr, TWICE: gl.constexpr):
    """zero . q by group, for all rows of a slot, from the sums of _add_biases: KG of [16, 8].

    TWICE: odd columns equal the even ones, and half the shuffles will do: KG of [16, 4].
    """
    upper, _ = gl.split(sums[0].reshape([2, 8, 8]).permute([1, 2, 0]))
    _, lower = gl.split(sums[1].reshape([2, 8, 8]).permute([1, 2, 0]))
    x = upper + lower  # [8, 8], a row a group
    column = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, x.type.layout)), 0)
    biases = ()
    for g in gl.static_range(0, KG, 2 if TWICE else 1):
        # from the lane that holds a row to all rows of lanes; or even columns of one row, odd ones of the next
        row = g + column % 2 if TWICE else g + column * 0
        lane = gl.broadcast(row * 4 + column // 2, x)[0]
        y = gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, lane], dtype=gl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
        y = gl.convert_layout(gl.join(y, y).permute([2, 0, 1]).reshape([16, 8]), MMA, assert_trivial=True)
        if TWICE:  # noqa: SIM108 (a constant)
            biases = biases + apart(y)
        else:
            biases = biases + (y,)
    return biases


@gluon.jit
def query(q, i: gl.constexpr, L: gl.constexpr):
    """Words of the i-th part of q: a tuple of them, or shared memory."""
    return q[i] if isinstance(q, gl.tuple) else load_words(q.index(i), L)


@gluon.jit
def page_logits(
    codes, scales, k_zeros, q,
    D: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, TILES: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Logits of a page: a tuple, by slot and tile of 4 columns, of [16 tokens, 4].

    q: words [16, 8] by 8 columns, of which two tiles have the even and the odd ones, and 32 channels; L is their
    layout. A single tile has each of its columns twice, for the terms of q * scale to lie side by side.
    (q * scale) . code + q . zero: the scale is on the small side, once for each group of tokens.
    """
    SLOTS: gl.constexpr = 16 // BITS  # of a plane
    KG: gl.constexpr = 128 // G
    GS: gl.constexpr = G // 16  # slots of a group
    NB: gl.constexpr = D // 32
    VT: gl.constexpr = (TILES + 1) // 2
    TERMS: gl.constexpr = 1 if TILES == 1 else 2  # products of a code
    sums, biases = zeros(8 * VT, 16), zeros(2 * VT, 16)
    for kb in gl.static_range(NB):
        words, queries, new_sums, new_biases = (), (), (), ()
        for plane in gl.static_range(BITS // 2):
            words = words + (_words(codes, plane, kb, D),)
        for t in gl.static_range(VT):
            queries = queries + (query(q, t * NB + kb, L),)
            two = (biases[2 * t], biases[2 * t + 1])
            new_biases = new_biases + _add_biases(k_zeros, kb, queries[t], two, D)
        for g in gl.static_range(KG):
            scale = names.view(scales.slice(g * (D // 2) + kb * 16, 16), gl.int32, [4, 4], FLAT2).load(_PAIRS32)
            scale = scale.reshape([4, 2, 2]).permute([1, 2, 0]).reshape([16])
            scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, L), assert_trivial=True), 1)
            scaled = ()
            for t in gl.static_range(VT):
                if TILES == 1:
                    scaled = scaled + (_two_terms(queries[t], scale),)
                else:
                    scaled = scaled + _split_terms(queries[t], scale)
            for j in gl.static_range(g * GS, (g + 1) * GS):
                code = _codes(words[j // SLOTS], j % SLOTS, BITS).permute([4, 1, 0, 3, 2, 5]).reshape([16, 32])
                code = gl.convert_layout(code, A, assert_trivial=True)
                for t in gl.static_range(VT):
                    total = sums[j * VT + t]
                    for i in gl.static_range(TERMS):
                        total = mma_v2(code, scaled[t * TERMS + i], total)
                    new_sums = new_sums + (total,)
        sums, biases = new_sums, new_biases
    rows = ()
    for t in gl.static_range(VT):
        rows = rows + _biases((biases[2 * t], biases[2 * t + 1]), KG, TILES == 1)
    PER: gl.constexpr = len(rows) // VT
    logits = ()
    for j in gl.static_range(8):
        unit = 1.0 / slot_unit(j % SLOTS, BITS, "subnormal")
        for t in gl.static_range(VT):
            bias = rows[t * PER + j // GS]
            if TILES == 1:
                high, low = apart(sums[j])
                logits = logits + (low * unit + (high * unit + bias),)  # the large terms cancel first
            else:
                logits = logits + apart(sums[j * VT + t] * unit + bias)
    return logits


@gluon.jit
def _in_unit(x, UNIT: gl.constexpr):
    if UNIT != 1.0:
        x = multiply(x, gl.full([16, 8], UNIT, gl.float16, layout=B))
    return x


@gluon.jit
def page_values(
    codes, scales, v_zeros, weights, acc, acc_zero, alpha, unit, zero_unit,
    D: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """acc [32 channels, 8] by 32 channels and tile of 8, acc_zero [16, 8] by tile: alpha times it, and this.

    Rows of acc_zero are groups, of which an operand has 16; nothing reads what lies behind them.
    weights: fp16 operands [16 tokens, 8], by slot and tile. A page's sums start from zero, for a matrix unit cuts
    what it adds to a long sum; those of codes come out times 2^-24. unit (if WIDE), zero_unit: factors of both.
    """
    SLOTS: gl.constexpr = 16 // BITS
    NB: gl.constexpr = D // 32
    VG: gl.constexpr = (D + G - 1) // G
    PER: gl.constexpr = NB // VG  # blocks of 32 channels of a group
    TILES: gl.constexpr = len(acc_zero)
    added, scaled = zeros(TILES, 16), ()
    table = names.view(v_zeros, gl.float16, [16, 128], HALVES)
    for j in gl.static_range(8):
        zero = table.slice(j * 16, 16, 1).load(A)
        sums = ()
        for t in gl.static_range(TILES):
            sums = sums + (mma_v2(zero, weights[j * TILES + t], added[t]),)
            scaled = scaled + (
                _in_unit(weights[j * TILES + t], 2.0**-24 / slot_unit(j % SLOTS, BITS, "subnormal")),
            )
        added = sums
    new_zeros, new_acc = (), ()
    for t in gl.static_range(TILES):
        new_zeros = new_zeros + (acc_zero[t] * gl.expand_dims(alpha[t], 0) + added[t] * zero_unit,)
    for g in gl.static_range(VG):
        operands = ()
        for jp in gl.static_range(4):
            two = names.view(scales.slice((jp * VG + g) * 16, 16), gl.float16, [4, 8], FLAT2).load(_PAIRS)
            two = gl.split(two.reshape([4, 2, 2, 2]).permute([0, 2, 3, 1]))
            for i in gl.static_range(2):
                scale = two[i].permute([1, 0, 2]).reshape([16])
                scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, B), assert_trivial=True), 1)
                for t in gl.static_range(TILES):
                    operands = operands + (multiply(scaled[(2 * jp + i) * TILES + t], scale),)
        for block in gl.static_range(g * PER, (g + 1) * PER):
            sums = zeros(TILES, 32)
            for plane in gl.static_range(BITS // 2):
                words = _words(codes, plane, block, D)
                for i in gl.static_range(SLOTS):
                    code = _codes(words, i, BITS).permute([0, 4, 1, 3, 2, 5]).reshape([32, 16])
                    code = gl.convert_layout(code, A, assert_trivial=True)
                    added = ()
                    for t in gl.static_range(TILES):
                        added = added + (mma_v2(code, operands[(plane * SLOTS + i) * TILES + t], sums[t]),)
                    sums = added
            for t in gl.static_range(TILES):
                total = sums[t]
                if WIDE:
                    total = total * unit
                new_acc = new_acc + (acc[block * TILES + t] * gl.expand_dims(alpha[t], 0) + total,)
    return new_acc, new_zeros


@gluon.constexpr_function
def _spread(words):
    return gl.BlockedLayout([words // 32], [32], [1], [0])


@gluon.jit
def v_shift(scales):
    """-log2 of the power of two in a page's largest V scale, at most 1: weights times scales stay in fp16."""
    words = scales.load(_spread(scales.shape[0])).to(gl.uint32)
    top = gl.max(gl.maximum(words & 0xFFFF, words >> 16), 0)
    return gl.minimum(15 - (top >> 10).to(gl.int32), 1).to(gl.float32)


@gluon.jit
def _top(words):
    """The largest exponent field of bf16 numbers, two a word."""
    return gl.max(gl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF), 0) >> 7


@gluon.jit
def _to_half(numbers, words, exponent):
    """Store bf16 numbers as fp16, times the power of two with that exponent field; -> what undoes it."""
    factor = (exponent << 23).to(gl.float32, bitcast=True)
    low = (words << 16).to(gl.float32, bitcast=True) * factor
    high = (words & -65536).to(gl.float32, bitcast=True) * factor
    numbers.store(
        gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    )
    return ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def to_half(numbers, TOP: gl.constexpr):
    """bf16 numbers to fp16 in place, by a power of two that takes the largest to 2^TOP; -> what undoes it."""
    words = numbers.load(_spread(numbers.shape[0]))
    return _to_half(numbers, words, gl.maximum(gl.minimum(254 + TOP - _top(words), 253), 1))


@gluon.jit
def k_to_half(scales, zeros):
    """The same of K's scales and zeros, by one power of two."""
    words, more = scales.load(_spread(scales.shape[0])), zeros.load(_spread(zeros.shape[0]))
    exponent = gl.maximum(gl.minimum(254 + 13 - gl.maximum(_top(words), _top(more)), 253), 1)
    _to_half(zeros, more, exponent)
    return _to_half(scales, words, exponent)
