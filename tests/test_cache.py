"""LayerCache.append and step: what is stored does not depend on chunks or neighbours, and is what is attended."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kivi_kv import KiviConfig, LayerCache, fake_quantize, kivi_cache_bytes, reference
from kivi_kv.config import PAGE
from kivi_kv.ops import attend
from oracle import DTYPES, assert_bitwise_equal, randn, sample

BITS = st.sampled_from([2, 4, 8])
SEEDS = st.integers(0, 2**31)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

configs = st.builds(
    KiviConfig,
    k_bits=BITS,
    v_bits=BITS,
    group_size=st.sampled_from([32, 64, 128]),
    residual_length=st.integers(0, 200),
    sink_length=st.integers(0, 8),
)
quick = settings(deadline=None, max_examples=40)


def tokens(B: int, T: int, D: int = 16, H: int = 2, dtype: torch.dtype = torch.float16, seed: int = 0):
    """Keys and values whose channels differ in range and offset."""
    return sample(B, H, T, D, dtype=dtype, seed=seed), sample(B, H, T, D, dtype=dtype, seed=seed + 1)


def filled(config: KiviConfig, k: Tensor, v: Tensor, chunks: list[int] | None = None, **options) -> LayerCache:
    B, H, T, D = k.shape
    cache = LayerCache(config, B, H, D, k.dtype, **options)
    for part_k, part_v in zip(k.split(chunks or T, dim=2), v.split(chunks or T, dim=2), strict=True):
        cache.append(part_k, part_v)
    return cache


def state(cache: LayerCache, row: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """Everything that a row stores: length, page words, and the dense K and V oldest first."""
    s, S = cache.storage, cache.config.sink_length
    length, packed = cache.lengths[row], cache.packed[row]
    index = torch.cat([s.dense_index(0, min(S, length)), s.dense_index(min(S + packed * PAGE, length), length)])
    return length, s.pool[s.table[row, :packed]], s.dense_k[row, :, index], s.dense_v[row, :, index]


def assert_same_row(a: LayerCache, row_a: int, b: LayerCache, row_b: int) -> None:
    (length_a, *parts_a), (length_b, *parts_b) = state(a, row_a), state(b, row_b)
    assert length_a == length_b
    for x, y in zip(parts_a, parts_b, strict=True):
        assert_bitwise_equal(x, y)


def as_attended(config: KiviConfig, k: Tensor, v: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """K and V [B, H, T, D] with `pages` pages behind the sinks quantized and dequantized, the rest as it is."""
    k, v = k.clone(), v.clone()
    part = slice(config.sink_length, config.sink_length + pages * PAGE)
    if pages:
        k[:, :, part] = fake_quantize(k[:, :, part], config.k_bits, config.group_size, "channel")
        v[:, :, part] = fake_quantize(v[:, :, part], config.v_bits, config.group_size, "token")
    return k, v


def assert_holds(cache: LayerCache, k: Tensor, v: Tensor) -> None:
    """The cache holds k and v as the rule says: so many pages, their values, every other token bit-exact."""
    B, _, T, _ = k.shape
    pages = cache.config.pages(T)
    assert cache.lengths == [T] * B
    assert cache.packed == [pages] * B
    for actual, expected in zip(cache.dequantize(), as_attended(cache.config, k, v, pages), strict=True):
        assert_bitwise_equal(actual, expected)


def snapshot(cache: LayerCache) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in cache.storage.tensors().items()}


def assert_unchanged(cache: LayerCache, before: dict[str, Tensor]) -> None:
    for name, x in cache.storage.tensors().items():
        assert_bitwise_equal(x, before[name])


# --- chunks ---


@quick
@given(
    config=configs,
    chunks=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    D=st.sampled_from([16, 20, 80]),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_chunks_do_not_matter(config, chunks, D, dtype, seed):
    """Any chunks give the page words, scales, zeros and dense tokens of one append."""
    k, v = tokens(2, sum(chunks), D, dtype=dtype, seed=seed)
    whole = filled(config, k, v)
    parts = filled(config, k, v, chunks, max_tokens=sum(chunks))
    for row in range(2):
        assert_same_row(parts, row, whole, row)
    assert_holds(whole, k, v)


@pytest.mark.parametrize(("residual", "sinks"), [(0, 0), (1, 3), (128, 4), (200, 8)])
def test_token_by_token_equals_one_append(residual, sinks):
    """Besides, each page is written once: its words are the same after every later token."""
    config = KiviConfig(k_bits=2, v_bits=4, residual_length=residual, sink_length=sinks)
    T = residual + sinks + 3 * PAGE + 5
    k, v = tokens(1, T)
    cache, pages = LayerCache(config, 1, 2, 16), []
    for t in range(T):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert cache.packed == [config.pages(t + 1)]
        words = cache.storage.pool[cache.storage.table[0, : cache.packed[0]]]
        pages += list(words[len(pages) :].clone())
        if pages:
            assert torch.equal(words, torch.stack(pages)), f"a page changed at token {t}"
    assert len(pages) == 3
    assert_same_row(cache, 0, filled(config, k, v), 0)


@every_dtype
@pytest.mark.parametrize("T", [1, 39, 40, 41, 127, 128, 129, 120, 168, 169, 255, 257, 297, 511, 1001])
@pytest.mark.parametrize("sinks", [0, 5])
def test_prompts_of_every_awkward_length(T, sinks, dtype):
    """Around the residual of 40, around a page, three residuals, odd: the state after each."""
    config = KiviConfig(k_bits=4, v_bits=2, residual_length=40, sink_length=sinks)
    k, v = tokens(2, T, 80, dtype=dtype, seed=T)
    assert_holds(filled(config, k, v), k, v)


@every_dtype
def test_up_to_the_residual_everything_is_exact(dtype):
    for T in (1, 64, 127, 128, 256):
        k, v = tokens(2, T, 80, dtype=dtype, seed=T)
        cache = filled(KiviConfig(), k, v)
        assert cache.packed == [0, 0]
        assert_bitwise_equal(cache.dequantize()[0], k)
        assert_bitwise_equal(cache.dequantize()[1], v)


def test_decoded_tokens_are_quantized_and_billed_as_such():
    """32 prompt tokens and 400 decoded ones: decoded keys carry a quantization error, and bytes are as promised."""
    config, T = KiviConfig(residual_length=32), 432
    k, v = tokens(1, T, 64)
    cache = filled(config, k, v, [32] + [1] * 400, max_tokens=T)
    assert cache.packed == [3]
    for stored, x in zip(cache.dequantize(), (k, v), strict=True):
        error = (stored.float() - x.float()).abs().amax((0, 1, 3))
        assert (error[32 : 3 * PAGE] > 0).all(), "a packed token without any error was not quantized"
        assert not error[3 * PAGE :].any()
    assert cache.nbytes == kivi_cache_bytes(config, 1, 1, T, 2, 64)
    # 3 pages of 2-bit codes at 3 bits per element, and 48 dense tokens
    assert cache.storage.used_nbytes == 2 * 2 * 64 * (3 * PAGE * 3 + 48 * 16) // 8


# --- rows ---


@quick
@given(data=st.data(), config=configs, D=st.sampled_from([16, 20]), seed=SEEDS)
def test_a_row_stores_what_it_would_store_alone(data, config, D, seed):
    """Bit for bit, whatever its neighbours hold: left and right padding, holes, rows of padding only."""
    chunks = data.draw(st.lists(st.integers(1, 250), min_size=1, max_size=4), "chunks")
    cache, alone = LayerCache(config, 3, 2, D), [LayerCache(config, 1, 2, D) for _ in range(3)]
    for i, M in enumerate(chunks):
        k, v = tokens(3, M, D, seed=seed + i)
        k[1] *= 100
        valid = torch.ones(3, M, dtype=torch.bool)
        for row in range(3):
            kind = data.draw(st.sampled_from(["all", "left", "right", "holes", "none"]), "padding")
            pad = data.draw(st.integers(0, M), "padded")
            valid[row, {"left": slice(0, pad), "right": slice(M - pad, M)}.get(kind, slice(0))] = False
            if kind == "holes":
                valid[row] = randn(M, seed=seed + row) > 0
            if kind == "none":
                valid[row] = False
        cache.append(k, v, valid)
        for row, one in enumerate(alone):
            keep = valid[row]
            one.append(k[row : row + 1, :, keep], v[row : row + 1, :, keep])
    for row, one in enumerate(alone):
        assert_same_row(cache, row, one, 0)


def test_rows_of_one_length_equal_rows_alone():
    config = KiviConfig(residual_length=0)
    k, v = tokens(3, 300)
    k[0], v[0] = 60_000, -60_000
    cache = filled(config, k, v)
    for row in range(3):
        assert_same_row(cache, row, filled(config, k[row : row + 1], v[row : row + 1]), 0)


def test_dequantize_is_zero_behind_shorter_rows():
    k, v = tokens(3, 200)
    valid = torch.arange(200) < torch.tensor([[200], [0], [150]])
    cache = LayerCache(KiviConfig(residual_length=0), 3, 2, 16)
    cache.append(k, v, valid)
    assert cache.lengths == [200, 0, 150]
    for x in cache.dequantize():
        assert not x[1].any()
        assert not x[2, :, 150:].any()
        assert x[2, :, 149].any()


# --- values ---


@every_dtype
def test_constant_channels_and_rows_are_exact(dtype):
    """A constant key channel, a constant value token and zeros come back bit for bit, and harm no neighbour."""
    k, v = tokens(1, 300, 64, dtype=dtype)
    k[..., 5], v[:, :, 7] = 900, -31.25
    k[..., 6], v[:, :, 8] = 0, 0
    cache = filled(KiviConfig(residual_length=0), k, v)
    got_k, got_v = cache.dequantize()
    assert_bitwise_equal(got_k[..., 5:7], k[..., 5:7])
    assert_bitwise_equal(got_v[:, :, 7:9], v[:, :, 7:9])
    assert_holds(cache, k, v)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unchecked_bad_values_stay_in_their_group(bad):
    k, v = tokens(1, 300, 64)
    clean = filled(KiviConfig(residual_length=0), k, v).dequantize()
    k[0, 0, 40, 3] = v[0, 1, 50, 40] = bad
    got_k, got_v = filled(KiviConfig(residual_length=0, checked=False), k, v).dequantize()
    inside_k, inside_v = (torch.zeros(1, 2, 300, 64, dtype=torch.bool) for _ in range(2))
    inside_k[0, 0, 32:64, 3] = inside_v[0, 1, 50, 32:64] = True
    for got, expected, inside in ((got_k, clean[0], inside_k), (got_v, clean[1], inside_v)):
        assert_bitwise_equal(got[~inside], expected[~inside])
        assert not got[inside].isfinite().all() or not torch.equal(got[inside], expected[inside])


# --- refusals ---


def test_max_tokens_is_refused_before_anything_is_stored():
    k, v = tokens(2, 300)
    cache = filled(KiviConfig(residual_length=0), k, v, max_tokens=310)
    before = snapshot(cache)
    for M in (11, 500):
        more = tokens(2, M)
        for call in (cache.append, lambda k, v: cache.step(k, k, v)):
            with pytest.raises(ValueError, match=rf"^max_tokens: the cache holds 310 tokens a row, got {300 + M}$"):
                call(*more)
            assert_unchanged(cache, before)
    valid = torch.arange(11) > torch.tensor([[0], [5]])  # 10 and 5 tokens: padding takes no room
    cache.append(*tokens(2, 11), valid)
    assert cache.lengths == [310, 305]


@pytest.mark.parametrize("max_tokens", [0, -1, 2.0, "8"])
def test_a_bad_max_tokens_is_refused(max_tokens):
    with pytest.raises(ValueError, match=r"^max_tokens: expected a positive int or None, got "):
        LayerCache(KiviConfig(), 1, 1, 16, max_tokens=max_tokens)


def test_bad_shapes_and_dtypes_of_a_cache_are_refused():
    for args, message in [
        ((1, 1, 8), "expected a head dimension of at least 16, got 8"),
        ((1, 0, 16), "expected at least one element"),
        ((1, 1, 16, torch.float64), "expected a dtype of float16, bfloat16, float32, got float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            LayerCache(KiviConfig(), *args)


def inputs(M: int) -> dict[str, Tensor]:
    shapes = {"q": (2, 4, M, 16), "k": (2, 2, M, 16), "v": (2, 2, M, 16)}
    return {**{name: torch.zeros(shape).half() for name, shape in shapes.items()}, "valid": torch.ones(2, M) > 0}


def assert_refused(length: int, arguments: dict[str, Tensor], message: str) -> None:
    """step refuses the arguments, and append does unless only q is at fault; what is stored stays as it was."""
    cache = LayerCache(KiviConfig(residual_length=0), 2, 2, 16)
    cache.append(*tokens(2, length))
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        cache.step(**arguments)
    assert_unchanged(cache, before)
    if not message.startswith(("^q", "^sink_logits")):
        with pytest.raises(ValueError, match=message):
            cache.append(**{name: x for name, x in arguments.items() if name != "q"})
        assert_unchanged(cache, before)


WRONG_SHAPES = [("k", 0, 3), ("k", 1, 4), ("k", 3, 20), ("v", 1, 1), ("v", 2, 5), ("v", 3, 20), ("valid", 1, 5)]
WRONG_SHAPES += [("q", 0, 1), ("q", 1, 3), ("q", 2, 5), ("q", 3, 20)]
at_states = pytest.mark.parametrize("length", [0, 384])  # 384: the next token packs a page
of_tokens = pytest.mark.parametrize("M", [1, 2])


@at_states
@of_tokens
@pytest.mark.parametrize(("name", "dim", "size"), WRONG_SHAPES)
def test_a_wrong_shape_leaves_the_cache_as_it_was(name, dim, size, M, length):
    arguments = inputs(M)
    shape = list(arguments[name].shape)
    shape[dim] = size
    assert_refused(length, {**arguments, name: arguments[name].new_zeros(shape)}, rf"^{name}: expected .*, got ")


@at_states
@of_tokens
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda k: k[0], r"^k: expected shape"),
        ("k", lambda k: k.bfloat16(), r"^k: expected torch.float16 on cpu, got torch.bfloat16 on cpu"),
        ("v", lambda v: v.float(), r"^v: expected torch.float16 on cpu, got torch.float32 on cpu"),
        ("k", lambda k: k + torch.nan, r"^k: expected finite values, got \d+ NaN or inf of \d+"),
        ("v", lambda v: v + torch.inf, r"^v: expected finite values, got \d+ NaN or inf of \d+"),
        ("v", lambda v: v - torch.inf, r"^v: expected finite values, got \d+ NaN or inf of \d+"),
        ("valid", lambda valid: valid.long(), r"^valid: expected .*bool"),
        ("sink_logits", lambda _: torch.zeros(3), r"^sink_logits: expected"),
    ],
    ids=["3 dims", "bf16", "fp32", "nan", "inf", "minus inf", "integer mask", "sink logits"],
)
def test_a_wrong_value_leaves_the_cache_as_it_was(name, change, message, M, length):
    arguments = inputs(M)
    assert_refused(length, {**arguments, name: change(arguments.get(name))}, message)


@of_tokens
def test_an_unknown_option_leaves_the_cache_as_it_was(M):
    cache = filled(KiviConfig(residual_length=0), *tokens(2, 384))
    before = snapshot(cache)
    with pytest.raises(TypeError, match="scael"):
        cache.step(**inputs(M), scael=1.0)
    assert_unchanged(cache, before)


# --- step ---


def assert_close(actual: Tensor, expected: Tensor, v: Tensor) -> None:
    """Within rounding of the output's dtype, and of the weights' where torch's own attention makes them narrow."""
    # an output lies within the range of v: each of weights and output is off by at most eps / 2 of it; 1e-5 is
    # fp32's share (logits below 100 here: 100 * 2^-24 in each weight)
    tolerance = v.abs().max().item() * (torch.finfo(actual.dtype).eps + 1e-5)
    assert not actual.isnan().any()
    assert (actual.double() - expected).abs().max().item() <= tolerance


@quick
@given(
    config=configs,
    chunks=st.lists(st.one_of(st.just(1), st.integers(1, 300)), min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_step_attends_the_state_that_a_query_must_see(config, chunks, dtype, seed):
    """One token is stored, then attends; a chunk attends pages(n + 1) pages and itself in full precision."""
    cache, n = LayerCache(config, 2, 2, 16, dtype), 0
    all_q, all_k, all_v = (
        randn(2, heads, sum(chunks), 16, dtype=dtype, seed=seed + i) for i, heads in enumerate((4, 2, 2))
    )
    for M in chunks:
        new = slice(n, n + M)
        out = cache.step(all_q[:, :, new], all_k[:, :, new], all_v[:, :, new])
        k, v = as_attended(config, all_k[:, :, : n + M], all_v[:, :, : n + M], config.pages(n + 1))
        assert out.dtype == dtype
        assert_close(out, reference.attend(all_q[:, :, new], k, v, 0.25), v)
        n += M
        assert_holds(cache, all_k[:, :, :n], all_v[:, :, :n])


@pytest.mark.parametrize("n", [127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("M", [1, 2, 200])
def test_a_page_is_packed_before_the_token_that_fills_it_up_is_attended(n, M):
    """At a page boundary one token and a chunk see the same pages: those of one token more."""
    config = KiviConfig(residual_length=0)
    k, v = tokens(1, n + M, dtype=torch.float32)
    q, cache = randn(1, 2, M, 16), filled(config, k[:, :, :n], v[:, :, :n])
    out = cache.step(q, k[:, :, n:], v[:, :, n:], scale=0.01)  # a flat softmax: every token counts
    seen_k, seen_v = as_attended(config, k, v, config.pages(n + 1))
    assert_close(out, reference.attend(q, seen_k, seen_v, 0.01), v)


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"softcap": 2.0}, {"sink_logits": True}], ids=str)
def test_step_with_padding_equals_rows_alone(options):
    """Valid tokens give the row's outputs and stored bits, padding gives zeros and stores nothing."""
    config = KiviConfig(residual_length=16, sink_length=4)
    if "sink_logits" in options:
        options = {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 8.0])}
    cache, alone = LayerCache(config, 4, 2, 32), [LayerCache(config, 1, 2, 32) for _ in range(4)]
    for turn, M in enumerate([150, 1, 40, 200, 1, 7]):
        q, (k, v) = randn(4, 4, M, 32, dtype=torch.float16, seed=turn), tokens(4, M, 32, seed=10 * turn)
        valid = torch.ones(4, M, dtype=torch.bool)
        valid[1, : M // 2] = False  # left padding
        valid[2] = randn(M, seed=turn) > 0  # holes
        valid[3] = turn >= 3  # nothing but padding at first
        out = cache.step(q, k, v, valid, **options)
        for row, one in enumerate(alone):
            keep, at = valid[row], slice(row, row + 1)
            assert not out[row][:, ~keep].any()
            if keep.any():
                expected = one.step(q[at][:, :, keep], k[at][:, :, keep], v[at][:, :, keep], **options)
                assert_close(out[at][:, :, keep], expected.double(), v)
            assert_same_row(cache, row, one, 0)


def test_a_short_context_gives_dense_attention():
    """Up to the residual nothing is quantized: every output is that of attention over the dense K and V."""
    k, v = (randn(2, 2, 128, 64, seed=seed) for seed in (1, 2))
    q, cache = randn(2, 8, 128, 64, seed=3), LayerCache(KiviConfig(), 2, 2, 64, torch.float32)
    out = torch.cat([cache.step(*(x[:, :, part] for x in (q, k, v))) for part in _parts(100, 101, 120, 128)], dim=2)
    # fp32 against fp64: 64-term products and 128-term sums of rounding 2^-24
    torch.testing.assert_close(out.double(), reference.attend(q, k, v, 0.125), rtol=0, atol=1e-5)


def _parts(*stops: int) -> list[slice]:
    return [slice(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]


def test_the_models_own_attention_serves_until_something_is_packed():
    """A prompt and then single tokens: dense gets every token as it came, and its output is step's."""
    config, seen = KiviConfig(residual_length=0, sink_length=2), []
    k, v = tokens(2, 135)
    q, cache = randn(2, 4, 135, 16, dtype=torch.float16), LayerCache(config, 2, 2, 16)

    def dense(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        assert options.pop("scale") == 0.5
        assert not any(options.values())
        seen.append((k.clone(), v.clone()))
        return q + 1

    for part in _parts(126, *range(127, 136)):
        out = cache.step(*(x[:, :, part] for x in (q, k, v)), dense=dense, scale=0.5)
        assert torch.equal(out, q[:, :, part] + 1) == (part.stop <= 130)
    assert [x.shape[2] for x, _ in seen] == [
        126,
        127,
        128,
        129,
        130,
    ]  # 2 sinks and a page; the 131st token packs it
    for seen_k, seen_v in seen:
        assert_bitwise_equal(seen_k, k[:, :, : seen_k.shape[2]])
        assert_bitwise_equal(seen_v, v[:, :, : seen_v.shape[2]])


@pytest.mark.parametrize("max_tokens", [None, 384, 400])
def test_make_room_packs_what_one_more_token_would(max_tokens):
    """Rows of every state at once; only a row that is full for good has no next token to make room for."""
    config = KiviConfig(residual_length=0)
    k, v = tokens(4, 384)
    cache = LayerCache(config, 4, 2, 16, max_tokens=max_tokens)
    cache.append(k, v, torch.arange(384) < torch.tensor([[384], [127], [128], [0]]))
    for _ in range(2):
        cache.make_room()
        assert cache.lengths == [384, 127, 128, 0]
        assert cache.packed == [2 if max_tokens == 384 else 3, 0, 1, 0]
    expected_k, expected_v = as_attended(config, k[:1], v[:1], cache.packed[0])
    assert_bitwise_equal(cache.dequantize()[0][:1], expected_k)
    assert_bitwise_equal(cache.dequantize()[1][:1], expected_v)


def test_stored_tokens_carry_no_autograd_graph():
    k, v = tokens(1, 300)
    cache = LayerCache(KiviConfig(residual_length=0), 1, 2, 16)
    cache.append(k.requires_grad_(), v.requires_grad_())
    assert not any(x.requires_grad for x in cache.storage.tensors().values())


def test_bad_values_in_padding_are_not_stored_and_not_refused():
    k, v = tokens(1, 40)
    valid = torch.ones(1, 40, dtype=torch.bool)
    valid[0, :3] = False
    bad = k.clone()
    bad[:, :, 1] = torch.nan
    cache, clean = (LayerCache("kivi2", 1, 2, 16) for _ in range(2))
    cache.append(bad, v, valid)
    clean.append(k[:, :, 3:], v[:, :, 3:])
    assert torch.equal(cache.dequantize()[0], clean.dequantize()[0])


def test_a_nan_that_was_let_in_comes_out_as_one():
    k, v = tokens(1, 200)
    k[0, 0, 5, 5] = torch.nan
    cache = LayerCache(KiviConfig(residual_length=0, checked=False), 1, 2, 16)
    cache.append(k, v)
    assert attend(inputs(1)["q"][:1], cache.storage)[0, 0].isnan().all()


@pytest.mark.parametrize("indices", [torch.tensor([0.2]), torch.tensor([True])])
def test_rows_are_selected_by_integers(indices):
    with pytest.raises(ValueError, match=r"^indices: expected an integer dtype"):
        LayerCache("kivi2", 1, 2, 16).select(indices)
