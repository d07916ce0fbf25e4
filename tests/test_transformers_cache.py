"""cache_for and KiviCache around a model: what stays native, what is refused, what is counted, what is kept."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from kivi_kv import KiviCache, KiviConfig, KiviWarning, cache_for, kivi_cache_bytes, kv_cache_bytes
from kivi_kv.analysis import teacher_forced
from kivi_kv.analysis.remedies import SimConfig
from kivi_kv.analysis.simulation import simulate
from simulated_cache import SimulatedCache, equal_tokens, varied_and_equal
from tiny_models import (
    FAMILIES,
    NEW,
    PACKABLE,
    VOCAB,
    cache_of,
    cache_quietly,
    generate,
    left_padded,
    make_model,
    prompt,
    random_model,
    step,
    touched,
    untouched,
)

UNPACKED = KiviConfig(residual_length=1024)
PACKED = KiviConfig(residual_length=32)
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


@contextmanager
def slow_path() -> Iterator[None]:
    """One warning of each kind, and no other."""
    with pytest.warns(KiviWarning) as warned:
        yield
    messages = sorted(str(w.message) for w in warned if issubclass(w.category, KiviWarning))
    assert len(messages) == 2
    assert "dequantized at every step" in messages[0]
    assert "padding, if any, is stored too" in messages[1]


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_caches_give_the_same_tokens(family: str, cache_implementation: str | None) -> None:
    model = touched(family)
    cache_of(family)
    options = {"cache_implementation": cache_implementation}
    for inputs in (prompt(150), left_padded([150, 40])):
        equal_tokens(generate(model, inputs, **options), generate(untouched(family), inputs, **options))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}, id="prompt_lookup"),
        pytest.param({"assistant_model": "llama"}, id="assisted", marks=pytest.mark.quick),
        pytest.param({"prefill_chunk_size": 48}, id="chunked", marks=pytest.mark.quick),
    ],
)
def test_the_models_own_cache_takes_several_tokens_at_once(family: str, options: dict[str, Any]) -> None:
    model = touched(family)
    cache_of(family)
    if "assistant_model" in options:
        options = {"assistant_model": make_model(options["assistant_model"], seed=5)}
    equal_tokens(generate(model, prompt(150), **options), generate(untouched(family), prompt(150), **options))


@pytest.mark.quick
def test_hybrid_models_say_which_layers_stay_native() -> None:
    for family in ("gemma3", "gpt_oss"):
        stats = cache_for(touched(family)).stats()
        assert stats["packed_layers"] == 2
        assert set(stats["native_layers"]) == {0, 2}
        assert all("sliding" in reason.lower() for reason in stats["native_layers"].values())
    assert cache_for(touched("llama")).stats()["native_layers"] == {}


def test_a_model_without_a_packable_layer_warns_once_and_works() -> None:
    model = touched("mistral_sliding")
    cache = cache_quietly(model, PACKED)
    equal_tokens(generate(model, prompt(150), cache), generate(untouched("mistral_sliding"), prompt(150)))
    stats = cache.stats()
    assert (stats["packed_layers"], stats["tokens"], stats["used_bytes"]) == (0, 150 + NEW - 1, 0)
    assert cache.nbytes == cache.dense_nbytes > 0


def test_a_model_without_attention_has_stats_too() -> None:
    fields = {name: TINY[name] for name in TINY if name != "num_attention_heads"}
    cache = cache_quietly(random_model(MambaConfig(**fields)), PACKED)
    assert (cache.stats()["packed_layers"], cache.stats()["tokens"]) == (0, 0)


def test_small_heads_stay_native() -> None:
    config = LlamaConfig(**TINY | {"hidden_size": 32}, intermediate_size=32, num_key_value_heads=4)
    assert "head dimension 8" in cache_quietly(random_model(config), PACKED).stats()["native_layers"][0]


@pytest.mark.quick
def test_latent_attention_stays_native_and_right() -> None:
    def make() -> PreTrainedModel:
        latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        sizes = {"v_head_dim": 24, "intermediate_size": 64, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
        return random_model(DeepseekV3Config(**TINY, **latent, **experts, **sizes, num_key_value_heads=4))

    model = make()
    cache = cache_quietly(model, PACKED)
    varied_and_equal(generate(model, prompt(180), cache), generate(make(), prompt(180)))
    assert "latent attention" in cache.stats()["native_layers"][0]


def test_softcap_is_applied() -> None:
    fields = TINY | {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64}
    fields |= {"query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 2}
    config = Gemma2Config(**fields, attn_logit_softcapping=1.0)
    model = random_model(config)
    expected = generate(random_model(config, attn_implementation="eager"), left_padded([150, 90]))
    varied_and_equal(generate(model, left_padded([150, 90]), cache_for(model, UNPACKED)), expected)


def test_models_that_would_be_wrong_are_refused() -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=32, num_layers=1))
    with pytest.raises(ValueError, match="model: expected a decoder-only model, got the encoder-decoder T5"):
        cache_for(t5)
    fields = TINY | {"intermediate_size": 64, "is_causal": False}
    with pytest.raises(ValueError, match="model: expected causal attention, got the bidirectional Llama"):
        cache_for(random_model(LlamaConfig(**fields)))


def test_an_unknown_preset_lists_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"preset: expected one of kivi2, kivi4.*, got 'kivi3'"):
        cache_for(touched("llama"), "kivi3")
    with pytest.raises(ValueError, match="config: expected a KiviConfig or a preset's name, got int"):
        cache_for(touched("llama"), 2)


@pytest.mark.quick
@pytest.mark.parametrize("length", [150, 180])  # the page is packed while decoding, and at once
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_is_right_and_said_to_be_slow(attention: str, length: int) -> None:
    model = make_model("qwen2", attn_implementation=attention)
    cache = KiviCache(model.config, PACKED)
    with slow_path():
        actual = generate(model, prompt(length), cache)
    equal_tokens(actual, generate(untouched("qwen2"), prompt(length), SimulatedCache(model.config, PACKED, [0])))
    stats = cache.stats()
    assert stats["pages"] == 1
    assert min(stats["materializations"], stats["unattended"]) > 0


def test_another_attention_is_right_with_padding() -> None:
    model, inputs = make_model("llama"), left_padded([180, 60])
    with slow_path():
        actual = generate(model, inputs, KiviCache(model.config, UNPACKED))
    equal_tokens(actual, generate(untouched("llama"), inputs))


@pytest.mark.quick
@pytest.mark.parametrize("family", PACKABLE)
def test_a_padded_batch_gives_the_tokens_of_each_prompt_alone(family: str) -> None:
    model, lengths = touched(family), [180, 167, 40]
    batch = generate(model, left_padded(lengths), cache_for(model, PACKED))
    for row, length in enumerate(lengths):
        alone = generate(model, prompt(length, seed=row), cache_for(model, PACKED))
        equal_tokens(batch[row : row + 1, 180:], alone[:, length:])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda mask: mask.index_fill(1, torch.tensor([3]), 1), id="one token more"),
        pytest.param(lambda mask: mask.index_fill(1, torch.tensor([45]), 0), id="one token less"),
        pytest.param(torch.ones_like, id="no padding"),
    ],
)
def test_a_mask_that_changes_the_past_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    model, inputs = touched("llama"), left_padded([50, 30])
    cache = cache_for(model, UNPACKED)
    step(model, inputs["input_ids"], inputs["attention_mask"], cache)
    mask = torch.cat([change(inputs["attention_mask"]), torch.ones(2, 1, dtype=torch.long)], dim=1)
    with pytest.raises(
        ValueError, match="attention_mask: expected the padding that earlier tokens were stored with"
    ):
        step(model, prompt(1, batch=2), mask, cache)


def test_max_tokens_allocates_once_and_refuses_more() -> None:
    model = touched("llama")
    cache = cache_for(model, PACKED, max_tokens=200)
    ids = generate(model, prompt(100), cache, max_new_tokens=1)
    allocated = cache.nbytes
    ids = generate(model, ids, cache, max_new_tokens=100)  # the newest is not stored yet
    equal_tokens(ids, generate(model, prompt(100), cache_for(model, PACKED), max_new_tokens=101))
    assert cache.nbytes == allocated == kivi_cache_bytes(PACKED, 2, 1, 200, 2, 32, torch.float32)
    assert (cache.stats()["tokens"], cache.stats()["pages"]) == (200, 1)
    with pytest.raises(ValueError, match="max_tokens: the cache holds 200 tokens a row, got 201"):
        generate(model, ids, cache, max_new_tokens=1)
    cache.crop(-20)  # and goes on from there
    equal_tokens(generate(model, ids[:, :181], cache, max_new_tokens=5)[:, :181], ids[:, :181])


def test_bytes_and_stats_count_what_is_allocated() -> None:
    model, lengths = touched("gemma3"), [290, 180]
    cache = cache_for(model, PACKED)
    assert (cache.nbytes, cache.dense_nbytes, cache.stats()["tokens"]) == (0, 0, 0)
    generate(model, left_padded(lengths), cache)
    stats, stored, seen = cache.stats(), [length + NEW - 1 for length in lengths], 290 + NEW - 1
    native = sum(layer.keys.nbytes + layer.values.nbytes for layer in (cache.layers[0], cache.layers[2]))
    packed = [layer.cache.storage for layer in cache.packed_layers]
    assert cache.nbytes == native + sum(x.nbytes for storage in packed for x in storage.tensors().values())
    assert cache.dense_nbytes == native + kv_cache_bytes(2, 2, seen, 2, 32, 4)
    assert stats["reserved_bytes"] == cache.nbytes - native
    assert 0 < stats["used_bytes"] <= stats["reserved_bytes"]
    assert (stats["tokens"], stats["pages"]) == (seen, sum(map(PACKED.pages, stored)))
    assert stats["dense_tokens"] == sum(stored) - 128 * stats["pages"]
    assert (stats["materializations"], stats["unattended"]) == (0, 0)
    assert stats["backends"] == {"quantize": "reference", "attend": "reference"}


@pytest.mark.quick
def test_the_same_run_gives_the_same_bits_also_after_reset() -> None:
    model = touched("qwen2")
    first, second = cache_for(model, PACKED), cache_for(model, PACKED)
    generate(model, prompt(60), second)  # something else
    second.reset()
    assert second.get_seq_length() == 0
    equal_tokens(generate(model, prompt(280), second), generate(model, prompt(280), first))
    for a, b in zip(first.packed_layers, second.packed_layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_store_their_dtype_and_stay_close(dtype: torch.dtype) -> None:
    config = LlamaConfig(**TINY, intermediate_size=64, num_key_value_heads=2)
    own, model = (random_model(config).to(dtype) for _ in range(2))
    cache = cache_for(model, UNPACKED)
    ids = prompt(160)
    for part in ids.split([150, 1, 9], dim=1):
        logits = step(model, part, None, cache)
    with torch.no_grad():
        expected = own(ids).logits[:, -9:]
    assert logits.dtype == dtype
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
    packed = cache_for(model, PACKED)
    assert generate(model, ids, packed).shape == (1, 160 + NEW)
    assert packed.packed_layers[0].keys.dtype == dtype
    assert packed.packed_layers[0].cache.storage.layout.dtype == dtype
    assert packed.stats()["pages"] == 1


def test_importing_the_package_does_not_import_transformers() -> None:
    code = "import sys, kivi_kv; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reset_takes_another_batch_size() -> None:
    model = touched("llama")
    cache = cache_for(model, PACKED)
    generate(model, prompt(180), cache)
    cache.reset()
    inputs = left_padded([180, 60])
    equal_tokens(generate(model, inputs, cache), generate(model, inputs, cache_for(model, PACKED)))


def test_layers_with_bits_of_their_own_equal_the_simulation() -> None:
    config = KiviConfig(residual_length=0, layer_bits=((0, 8, 4), (1, 4, 8)))
    model = touched("llama")
    ids = prompt(400)
    cache = cache_for(model, config, max_tokens=400)
    scores = teacher_forced(model, ids, cache, config)
    with simulate(model, SimConfig(config)), torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(scores.nll, nll, atol=2e-3, rtol=1e-3)  # fp32 sums in another order, through layers
    shape = cache.packed_layers[0].cache.storage.dense_k.shape
    assert cache.nbytes == kivi_cache_bytes(config, len(cache.layers), 1, 400, shape[1], shape[3], torch.float32)
    with pytest.raises(ValueError, match=r"layer_bits: expected layers from 0 to \d+, got \[99\]"):
        cache_for(model, KiviConfig(layer_bits=((99, 4, 4),)))


def test_reading_keys_and_values_is_counted() -> None:
    model = touched("llama")
    cache = cache_for(model, UNPACKED)
    step(model, prompt(50), None, cache)
    assert cache.layers[0].keys.shape[2] == 50
    assert cache.stats()["materializations"] == 1


def test_reset_takes_another_dtype() -> None:
    model = make_model("llama")
    cache = cache_for(model, PACKED)
    generate(model, prompt(180), cache)
    cache.reset()
    generate(model.to(torch.bfloat16), prompt(180), cache)
    assert cache.packed_layers[0].cache.storage.dense_k.dtype == torch.bfloat16
