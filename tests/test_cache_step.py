"""LayerCache.step: every query attends the state that it must see."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from caching import (
    SEEDS,
    as_attended,
    assert_holds,
    assert_same_row,
    configs,
    filled,
    inputs,
    quick,
    tokens,
)
from kivi_kv import KiviConfig, LayerCache, reference
from kivi_kv.ops import attend
from oracle import DTYPES, assert_bitwise_equal, randn

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
