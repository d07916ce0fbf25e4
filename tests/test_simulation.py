"""One-pass simulation: equal to the real cache where one exists, and to its own definition where none does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from kivi_kv import KiviConfig, cache_for, fake_quantize, quantize_k, reference
from kivi_kv.analysis import teacher_forced
from kivi_kv.analysis.catalog import catalog, ends, mildest, worst
from kivi_kv.analysis.evaluate import Reference
from kivi_kv.analysis.remedies import SimConfig, hadamard, quantize_keys, quantize_values
from kivi_kv.analysis.simulation import attend_as_decoded, simulate
from kivi_kv.format import PageLayout
from oracle import assert_bitwise_equal, randn
from tiny_models import make_model

PLAIN = SimConfig()


def scored(model: PreTrainedModel, ids: Tensor, config: SimConfig | None) -> Tensor:
    with simulate(model, config), torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")


@pytest.mark.parametrize(
    "config",
    [
        KiviConfig(residual_length=32),
        KiviConfig(4, 2, 64, residual_length=0, sink_length=4),
        KiviConfig(2, 8, 128, residual_length=100, sink_length=40),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_simulation_equals_the_real_cache(family: str, config: KiviConfig) -> None:
    model = make_model(family)
    ids = torch.randint(3, model.config.vocab_size, (1, 600))
    real = teacher_forced(model, ids, cache_for(model, config), config)
    # fp32 sums in another order, through layers; another page packed would move single tokens by more than 0.1
    torch.testing.assert_close(scored(model, ids, SimConfig(config)), real.nll, atol=2e-3, rtol=1e-3)
    assert (real.nll - scored(model, ids, None)).abs().max() > 0.1


def test_the_model_has_its_attention_back_afterwards() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(KeyError), simulate(model, PLAIN):
        raise KeyError
    assert model.config._attn_implementation == before


@settings(deadline=None, max_examples=20)
@given(T=st.integers(1, 420), residual=st.integers(0, 150), sinks=st.integers(0, 9))
def test_each_query_sees_what_its_step_would(T: int, residual: int, sinks: int) -> None:
    config = SimConfig(KiviConfig(residual_length=residual, sink_length=sinks))
    q, k, v = randn(1, 4, T, 16, seed=1), randn(1, 2, T, 16, seed=2), randn(1, 2, T, 16, seed=3)
    out = attend_as_decoded(q, k, v, config, 0, 0.25)
    for t in {0, T // 2, T - 1}:
        end = sinks + 128 * config.cache.pages(t + 1)
        seen_k, seen_v = k[:, :, : t + 1].clone(), v[:, :, : t + 1].clone()
        if end > sinks:
            seen_k[:, :, sinks:end] = quantize_k(k[:, :, sinks:end], 2, 32).dequantize()
            seen_v[:, :, sinks:end] = fake_quantize(v[:, :, sinks:end], 2, 32, "token")
        expected = reference.attend(q[:, :, t : t + 1], seen_k, seen_v, 0.25)
        # fp32 sums of at most 420 products of values below 5
        torch.testing.assert_close(out[:, :, t : t + 1].double(), expected, atol=1e-4, rtol=1e-4)


def test_the_papers_flush_by_its_definition() -> None:
    T, R = 300, 32
    config = SimConfig(KiviConfig(residual_length=R), paper_flush=True)
    q, k, v = randn(1, 4, T, 16, seed=1), randn(1, 2, T, 16, seed=2), randn(1, 2, T, 16, seed=3)
    out = attend_as_decoded(q, k, v, config, 0, 0.25)
    whole = T // 32 * 32
    packed_k = torch.cat([fake_quantize(k[:, :, :whole], 2, 32, "channel"), k[:, :, whole:]], dim=2)
    packed_v = fake_quantize(v, 2, 32, "token")
    for t in (0, 31, 32, 33, 63, 64, 65, 200, 299):
        keys, values = t // R * R, max(0, t - R)  # both are packed after the step in which they become too many
        seen_k = torch.cat([packed_k[:, :, :keys], k[:, :, keys : t + 1]], dim=2)
        seen_v = torch.cat([packed_v[:, :, :values], v[:, :, values : t + 1]], dim=2)
        expected = reference.attend(q[:, :, t : t + 1], seen_k, seen_v, 0.25)
        torch.testing.assert_close(out[:, :, t : t + 1].double(), expected, atol=1e-4, rtol=1e-4)


def test_without_switches_keys_and_values_are_the_formats() -> None:
    k, v = randn(2, 3, 256, 64, dtype=torch.float16, seed=1), randn(2, 3, 100, 80, dtype=torch.float16, seed=2)
    assert_bitwise_equal(quantize_keys(k, PLAIN, 0).contiguous(), quantize_k(k, 2, 32).dequantize().contiguous())
    assert_bitwise_equal(quantize_values(v, PLAIN, 0), fake_quantize(v, 2, 32, "token"))


def test_boosted_channels_are_those_of_largest_mean() -> None:
    k = randn(1, 1, 128, 64, seed=1)
    k[..., [3, 20]] *= 50
    out = quantize_keys(k, SimConfig(k_boost=2 / 64), 0)
    four, two = fake_quantize(k, 4, 32, "channel"), fake_quantize(k, 2, 32, "channel")
    boosted = [d for d in range(64) if torch.equal(out[..., d], four[..., d])]
    assert boosted == [3, 20]
    assert torch.equal(out[..., 4:20], two[..., 4:20])


@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_rotation_is_orthogonal_and_spreads_an_outlier(size: int) -> None:
    rotation = hadamard(size)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(size))
    v = randn(1, 1, 64, size, seed=1)
    v[..., 5] += 40
    plain, rotated = (quantize_values(v, SimConfig(rotate_v=r), 0) for r in (False, True))
    assert (rotated - v).norm() != (plain - v).norm()
    eight = SimConfig(KiviConfig(8, 8), rotate_v=True)
    assert (quantize_values(v, eight, 0) - v).abs().max() < 0.4  # steps of a 40-wide group: 40 / 255, rotated back


def test_clipping_saturates_and_refines() -> None:
    v = randn(1, 1, 64, 32, seed=1)
    full, clipped = (quantize_values(v, SimConfig(clip=c), 0) for c in (1.0, 0.8))
    assert clipped.amax() < full.amax()
    assert len(clipped[0, 0, 0].unique()) <= 4


def test_small_scales_are_near_the_full_ones() -> None:
    k = randn(1, 2, 512, 64, seed=1) * torch.logspace(-2, 2, 64) + torch.linspace(-300, 300, 64)
    full, small = quantize_keys(k, PLAIN, 0), quantize_keys(k, SimConfig(small_scales=True), 0)
    per_channel = [(x - k).norm(dim=2) for x in (full, small)]
    # scales round to 3 bits of mantissa: off by at most 1/16, and zeros by half a 1/16 of a step
    assert (per_channel[1] <= 1.25 * per_channel[0]).all()


def test_layers_have_bits_of_their_own() -> None:
    config = SimConfig(KiviConfig(layer_bits=((1, 4, 8),)))
    k = randn(1, 1, 128, 32, seed=1)
    assert torch.equal(quantize_keys(k, config, 1), fake_quantize(k, 4, 32, "channel"))
    assert torch.equal(quantize_values(k, config, 1), fake_quantize(k, 8, 32, "token"))
    assert torch.equal(quantize_keys(k, config, 0), fake_quantize(k, 2, 32, "channel"))


def test_bits_per_element_are_those_of_the_page() -> None:
    """Where a page exists, its bytes; switches add what they store."""
    for cache in (KiviConfig(), KiviConfig(4, 2, 64), KiviConfig(8, 4, 128)):
        for D in (64, 128):
            page = PageLayout.of(cache, D, torch.float16).words * 32 / (2 * 128 * D)
            assert SimConfig(cache).bits_per_element(5, D) == page
    assert SimConfig(k_boost=0.25).bits_per_element(1, 128) == 3 + (0.5 + 1 / 128) / 2
    assert SimConfig(small_scales=True).bits_per_element(1, 128) == 2.5 + 16 / 128 / 2
    assert SimConfig(KiviConfig(layer_bits=((0, 4, 4),))).bits_per_element(4, 128) == 3.5
    share = 128 * KiviConfig().pages(4096) / 4096
    assert PLAIN.bits_per_element(1, 128, 4096) == share * 3 + (1 - share) * 16


def test_bad_switches_are_refused() -> None:
    for field, value in (("k_boost", 1.5), ("clip", 0.0), ("clip", 1.1)):
        with pytest.raises(ValueError, match=f"^{field}: expected"):
            replace(PLAIN, **{field: value})


def test_evaluation_of_dense_against_itself_and_of_worse_caches() -> None:
    model = make_model("llama")
    reference_ = Reference(model, torch.randint(3, model.config.vocab_size, (1, 500)))
    same = reference_.compare(None)
    assert (same.ratio, same.top1) == (1.0, 1.0)
    assert abs(same.kl) < 1e-6
    fine, coarse = (reference_.compare(SimConfig(KiviConfig(b, b, residual_length=0))) for b in (8, 2))
    assert fine.kl < coarse.kl / 10
    assert fine.top1 > coarse.top1
    assert len(fine.output_error) == len(coarse.output_error) == model.config.num_hidden_layers
    assert all(0 < a < b / 5 for a, b in zip(fine.output_error, coarse.output_error, strict=True))
    assert sum(coarse.kl_by_quarter) / 4 == pytest.approx(coarse.kl, rel=0.02)  # quarters of 125, 125, 125, 124


def test_every_config_of_the_catalog_runs() -> None:
    model = make_model("llama")
    ids = torch.randint(3, model.config.vocab_size, (1, 450))
    reference_ = Reference(model, ids)
    for name, config in catalog(model.config.num_hidden_layers).items():
        result = reference_.compare(config)
        assert result.kl >= 0, name
        assert 2 < config.bits_per_element(4, 64) < 12, name


def test_rules_for_layers() -> None:
    assert ends(6, 1) == ((0, 4, 4), (5, 4, 4))
    assert [layer for layer, _, _ in ends(6, 2)] == [0, 1, 4, 5]
    assert [layer for layer, _, _ in ends(3, 2)] == [0, 1, 2]
    assert worst([0.1, 0.9, 0.2, 0.8], 2, 8, 4) == ((1, 8, 4), (3, 8, 4))
    assert mildest([0.1, 0.9, 0.2, 0.8], 2) == ((0, 2, 2), (2, 2, 2))
