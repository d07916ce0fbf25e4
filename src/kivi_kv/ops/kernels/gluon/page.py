"""A page's logits and weighted values, by one warp, from the page's words in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..numbers import slots_in_place

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
FLAT4 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
# [blocks, lane, 4]: four words a lane and block
WORDS2 = gl.constexpr(gl.BlockedLayout([2, 1, 4], [1, 32, 1], [1, 1, 1], [2, 1, 0]))
# [pair of lanes 4, 8]: eight numbers a pair of lanes, the same for all eight rows
PAIRS = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]], [], [], [4, 8]))

PAIRS32 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2]], [[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]], [], [], [4, 4]))


@gluon.constexpr_function
def _group_rows(groups):
    """[groups, 1, pair of lanes 4, 8]: rows of lanes hold a group each, as far as there are groups."""
    rows = [[g if g < groups else 0, 0, 0, 0] for g in (1, 2, 4)]
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    return gl.DistributedLinearLayout(registers, [[0, 0, 1, 0], [0, 0, 2, 0], *rows], [], [], [groups, 1, 4, 8])


@gluon.constexpr_function
def _mask(slot, bits):
    here = slots_in_place(bits, "fp16")
    return "{ .reg .b32 t; and.b32 t, $2, %d; mov.b32 {$0, $1}, t; }" % ((((1 << bits) - 1) * 0x10001) << (slot % here * bits))


@gluon.constexpr_function
def _unit(slot, bits):
    """What a code of this slot is worth, as a power of two."""
    return 2.0 ** (slot % slots_in_place(bits, "fp16") * bits - 24)


@gluon.jit
def _codes(words, SLOT: gl.constexpr, BITS: gl.constexpr):
    """Codes of one slot as subnormal halves, times _unit: a pair a word."""
    HERE: gl.constexpr = slots_in_place(BITS, "fp16")
    if SLOT >= HERE:
        words = words >> (SLOT // HERE * HERE * BITS)
    low, high = gl.inline_asm_elementwise(
        _mask(SLOT, BITS), "=h,=h,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.join(low, high)


@gluon.jit
def _k_codes(words, SLOT: gl.constexpr, BITS: gl.constexpr):
    """[2 blocks, 32 lanes, 4] words to the operand [16 tokens, 32 channels]."""
    x = _codes(words, SLOT, BITS).reshape([2, 8, 4, 2, 2, 2]).permute([4, 1, 0, 3, 2, 5]).reshape([16, 32])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _v_codes(words, SLOT: gl.constexpr, BITS: gl.constexpr):
    """[2 blocks, 32 lanes, 4] words to the operand [32 channels, 16 tokens]."""
    x = _codes(words, SLOT, BITS).reshape([2, 8, 4, 2, 2, 2]).permute([0, 4, 1, 3, 2, 5]).reshape([32, 16])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def multiply(a, b):
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def to_words(x):
    """An operand [32, 8] as words of two halves [16, 8]: halves that live through a loop would take a register each."""
    low, high = gl.split(x.reshape([16, 2, 8]).permute([0, 2, 1]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _operand(low, high):
    return gl.convert_layout(gl.join(low, high).permute([0, 2, 1]).reshape([32, 8]), B, assert_trivial=True)


@gluon.jit
def from_words(x):
    """Undo to_words."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return _operand(low, high)


@gluon.jit
def _two_terms(q, minus, scale):
    """q * scale in even columns, what its rounding lost in odd ones: an operand. All are words of two halves."""
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b32 t; mul.rn.f16x2 t, $3, $4; fma.rn.f16x2 t, $2, $4, t; mov.b32 {$0, $1}, t; }",
        "=h,=h,r,r,r", [q, minus, scale], dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    return _operand(low, high)


@gluon.jit
def apart(x):
    """[16, 8], or [1, 8] for every row, to two of [16, 4]: even and odd columns, which lie in one lane."""
    x, _ = gl.broadcast(x, gl.zeros([16, 8], gl.float32, layout=MMA))
    return gl.split(x.reshape([16, 4, 2]))


@gluon.jit
def together(even, odd):
    """Undo apart: [16, 8]."""
    return gl.convert_layout(gl.join(even, odd).reshape([16, 8]), MMA, assert_trivial=True)


@gluon.jit
def to_operand(even, odd):
    """Two of fp32 [16 tokens, 4] to the fp16 operand [16 tokens, 8], even and odd columns: transposed between lanes."""
    t = gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.f16x2.f32 t, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, t; }",
        "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [t], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    x = gl.join(low, high).reshape([2, 8, 4, 2]).permute([0, 2, 3, 1]).reshape([16, 8])
    return gl.convert_layout(x, B, assert_trivial=True)


@gluon.jit
def _k_zeros(params, kb, D: gl.constexpr, KG: gl.constexpr):
    """Zeros of 32 channels as the operand [KG groups, 32]."""
    x = params.slice(KG * (D // 2), KG * (D // 2))._reinterpret(gl.float16, [KG, D // 32, 4, 8], FLAT4)
    x = x.slice(kb, 1, 1).load(_group_rows(KG)).reshape([KG, 4, 2, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([KG, 32])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _rows_apart(x, KG: gl.constexpr):
    """Rows of [KG, 8], whose even columns equal the odd ones: KG of [16, 4], each the same in every row."""
    rows = ()
    if KG == 1:
        rows = rows + (apart(x)[0],)
    else:
        row = gl.expand_dims(gl.arange(0, KG, layout=gl.SliceLayout(1, MMA)), 1)
        odd = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, MMA)) % 2, 0)
        for g in gl.static_range(0, KG, 2):
            two = gl.sum(gl.where(row == g + odd, x, 0.0), 0)  # even columns of one row, odd ones of the next
            rows = rows + apart(gl.expand_dims(two, 0))
    return rows


@gluon.jit
def page_logits(codes, params, q, minus, D: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr):
    """Logits of a page by tiles of 4 columns: a tuple, by slot and tile, of [16 tokens, 4].

    q: a tuple, by tile and 32 channels, of [32, 8]: columns 2 c and 2 c + 1 hold column c. minus is 0 and -q there.
    (q * scale) . code + q . zero, with q * scale in two terms of fp16, exactly: the even column and the odd one.
    """
    KG: gl.constexpr = 128 // G
    GS: gl.constexpr = G // 16
    SLOTS: gl.constexpr = 16 // BITS
    NB: gl.constexpr = D // 32
    TILES: gl.constexpr = len(q) // NB
    L: gl.constexpr = q[0].type.layout
    sums, biases = (), ()
    for i in gl.static_range(8 * TILES):
        sums = sums + (gl.zeros([16, 8], gl.float32, layout=MMA),)
    for t in gl.static_range(TILES):
        biases = biases + (gl.zeros([KG, 8], gl.float32, layout=MMA),)
    for kb in gl.static_range(NB):
        words = ()
        for plane in gl.static_range(BITS // 2):
            at = codes.slice(plane * (D * 8) + kb * 256, 256)._reinterpret(gl.int32, [2, 32, 4], FLAT3)
            words = words + (at.load(WORDS2),)
        new_sums, new_biases = (), ()
        zero = _k_zeros(params, kb, D, KG)
        for t in gl.static_range(TILES):
            new_biases = new_biases + (mma_v2(zero, from_words(q[t * NB + kb]), biases[t]),)
        for g in gl.static_range(KG):
            scale = params.slice(g * (D // 2) + kb * 16, 16)._reinterpret(gl.int32, [4, 4], FLAT2).load(PAIRS32)
            scale = scale.reshape([4, 2, 2]).permute([1, 2, 0]).reshape([16])
            scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, L), assert_trivial=True), 1)
            scaled = ()
            for t in gl.static_range(TILES):
                scaled = scaled + (_two_terms(q[t * NB + kb], minus[t * NB + kb], scale),)
            for i in gl.static_range(GS):
                code = _k_codes(words[(g * GS + i) // SLOTS], (g * GS + i) % SLOTS, BITS)
                for t in gl.static_range(TILES):
                    new_sums = new_sums + (mma_v2(code, scaled[t], sums[(g * GS + i) * TILES + t]),)
        sums, biases = new_sums, new_biases
    of_group = ()
    for t in gl.static_range(TILES):
        of_group = of_group + _rows_apart(biases[t], KG)
    logits = ()
    for j in gl.static_range(8):
        for t in gl.static_range(TILES):
            high, low = apart(sums[j * TILES + t])
            logits = logits + ((high + low) * (1.0 / _unit(j % SLOTS, BITS)) + of_group[t * KG + j // GS],)
    return logits


@gluon.jit
def _in_unit(x, UNIT: gl.constexpr):
    if UNIT != 1.0:
        x = multiply(x, gl.full([16, 8], UNIT, gl.float16, layout=B))
    return x


@gluon.jit
def page_values(codes, params, weights, acc, acc_zero, alpha, D: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr):
    """acc [32 channels, 8 columns] by tile and 32 channels, acc_zero [groups, 8] by tile: times alpha, plus this page.

    weights: fp16 operands [16 tokens, 8], by slot and tile. acc is in units of 2^-24.
    """
    SLOTS: gl.constexpr = 16 // BITS
    NB: gl.constexpr = D // 32
    VG: gl.constexpr = (D + G - 1) // G
    PER: gl.constexpr = NB // VG  # blocks of 32 channels of a group
    TILES: gl.constexpr = len(acc_zero)
    zeros = ()
    for t in gl.static_range(TILES):
        zeros = zeros + (gl.zeros([VG, 8], gl.float32, layout=MMA),)
    scaled = ()
    table = params.slice(VG * 64, VG * 64)._reinterpret(gl.float16, [VG, 128], FLAT2)
    for j in gl.static_range(8):
        zero = table.slice(j * 16, 16, 1).load(A)
        sums = ()
        for t in gl.static_range(TILES):
            sums = sums + (mma_v2(zero, weights[j * TILES + t], zeros[t]),)
            scaled = scaled + (_in_unit(weights[j * TILES + t], 2.0**-24 / _unit(j % SLOTS, BITS)),)
        zeros = sums
    new_zeros, new_acc = (), ()
    for t in gl.static_range(TILES):
        new_zeros = new_zeros + (acc_zero[t] * gl.expand_dims(alpha[t], 0) + zeros[t],)
    for g in gl.static_range(VG):
        operands = ()
        for jp in gl.static_range(4):
            at = params.slice((jp * VG + g) * 16, 16)._reinterpret(gl.float16, [4, 8], FLAT2)
            s0, s1 = gl.split(at.load(PAIRS).reshape([4, 2, 2, 2]).permute([0, 2, 3, 1]))
            s0 = gl.convert_layout(s0.permute([1, 0, 2]).reshape([16]), gl.SliceLayout(1, B), assert_trivial=True)
            s1 = gl.convert_layout(s1.permute([1, 0, 2]).reshape([16]), gl.SliceLayout(1, B), assert_trivial=True)
            for t in gl.static_range(TILES):
                operands = operands + (multiply(scaled[2 * jp * TILES + t], gl.expand_dims(s0, 1)),)
            for t in gl.static_range(TILES):
                operands = operands + (multiply(scaled[(2 * jp + 1) * TILES + t], gl.expand_dims(s1, 1)),)
        for block in gl.static_range(PER):
            sums = ()
            for t in gl.static_range(TILES):
                sums = sums + (gl.zeros([32, 8], gl.float32, layout=MMA),)
            for plane in gl.static_range(BITS // 2):
                at = codes.slice(plane * (D * 8) + (g * PER + block) * 256, 256)._reinterpret(gl.int32, [2, 32, 4], FLAT3)
                words = at.load(WORDS2)
                for i in gl.static_range(SLOTS):
                    code = _v_codes(words, i, BITS)
                    added = ()
                    for t in gl.static_range(TILES):
                        added = added + (mma_v2(code, operands[(plane * SLOTS + i) * TILES + t], sums[t]),)
                    sums = added
            for t in gl.static_range(TILES):
                new_acc = new_acc + (acc[(g * PER + block) * TILES + t] * gl.expand_dims(alpha[t], 0) + sums[t],)
    return new_acc, new_zeros
