"""GraphDecoder: the tokens of generate(), and a cache that is as if it had been generate()."""

import pytest
import torch
from transformers import BloomConfig
from transformers.generation.configuration_utils import CompileConfig

from kivi_kv import KiviConfig, cache_for
from kivi_kv.integrations.transformers import GraphDecoder, cache_argument
from tiny_models import generate, left_padded, make_model, prompt, random_model, tiny_config

CONFIG = KiviConfig(4, 4, 32, residual_length=32, sink_length=3)
_COMPILE = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
_COMPILE._compile_all_devices = True
COMPILED = {"compile_config": _COMPILE}
PACKED = ("llama", "qwen2", "qwen3", "mistral", "phi3", "qwen3_moe", "mixtral", "olmo2", "smollm3")


def decoded(model, inputs: dict, tokens: int, cache) -> torch.Tensor:
    """Tokens [B, tokens]: the first from the prompt, the rest by a GraphDecoder."""
    with torch.no_grad():
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        first = model(**inputs, position_ids=positions, **cache_argument(cache)).logits[:, -1].argmax(-1)
    return torch.cat([first[:, None], GraphDecoder(model, cache).generate(first, tokens - 1)], dim=1)


FULL = [("llama", [20]), ("llama", [200]), *((family, [150, 31, 90]) for family in PACKED)]


@pytest.mark.parametrize(("family", "lengths"), FULL)
def test_tokens_and_cache_of_generate(family, lengths):
    """A page is packed on the way; padded rows; afterwards the cache goes on as any."""
    model, inputs, new = make_model(family), left_padded(lengths), 140
    usual, other = (cache_for(model, CONFIG, max_tokens=500) for _ in range(2))
    expected = generate(model, inputs, usual, max_new_tokens=new)[:, max(lengths) :]
    assert torch.equal(decoded(model, inputs, new, other), expected)
    for a, b in zip(usual.packed_layers, other.packed_layers, strict=True):
        assert (a.get_seq_length(), a.cache.lengths, a.cache.packed) == (
            b.get_seq_length(),
            b.cache.lengths,
            b.cache.packed,
        )
        for x, y in zip(a.cache.dequantize(), b.cache.dequantize(), strict=True):
            assert torch.allclose(x, y, atol=1e-3)
    assert other.stats()["unattended"] == other.stats()["materializations"] == 0

    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), new, dtype=torch.long)], dim=1)
    ids = torch.cat([inputs["input_ids"], expected], dim=1)
    more = [
        generate(model, {"input_ids": ids, "attention_mask": mask}, c, max_new_tokens=5) for c in (usual, other)
    ]
    assert torch.equal(*more)


def test_in_parts():
    """Two calls give what one gives."""
    model, inputs = make_model("llama"), left_padded([70])
    whole, parts = (cache_for(model, CONFIG, max_tokens=400) for _ in range(2))
    expected = decoded(model, inputs, 61, whole)
    some = decoded(model, inputs, 31, parts)
    rest = GraphDecoder(model, parts).generate(some[:, -1], 30)
    assert torch.equal(torch.cat([some, rest], dim=1), expected)


def test_refusals():
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"^cache: expected max_tokens"):
        GraphDecoder(model, cache_for(model, CONFIG))
    with pytest.raises(ValueError, match=r"^cache: expected one that holds the prompt"):
        GraphDecoder(model, cache_for(model, CONFIG, max_tokens=50))
    hybrid = make_model("gemma3")
    with pytest.raises(ValueError, match=r"^cache: expected every layer packed, got 2 that are not"):
        GraphDecoder(hybrid, cache_for(hybrid, CONFIG, max_tokens=50))
    cache = cache_for(model, CONFIG, max_tokens=50)
    with torch.no_grad():
        model(prompt(40), **cache_argument(cache))
    decoder = GraphDecoder(model, cache)
    with pytest.raises(ValueError, match=r"^token: expected shape \(1,\), got \(1, 1\)$"):
        decoder.generate(torch.ones(1, 1), 5)
    for tokens in (0, 11):
        with pytest.raises(ValueError, match=r"^tokens: expected from 1 to the 10 that max_tokens leaves"):
            decoder.generate(torch.ones(1), tokens)
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize(("family", "lengths"), FULL[:1] + FULL[2:])
def test_generate_counts_on_the_device(family, lengths):
    """As it does on a GPU with storage of a fixed size: the tokens are the same, and so is the cache."""
    model, inputs = make_model(family), left_padded(lengths)
    usual, other = (cache_for(model, CONFIG, max_tokens=500) for _ in range(2))
    other.decode_on_device = True
    expected, actual = (generate(model, inputs, c, max_new_tokens=140) for c in (usual, other))
    assert other.packed_layers[0].on_device
    assert torch.equal(actual, expected)
    assert usual.get_seq_length() == other.get_seq_length() == max(lengths) + 139
    more = torch.cat([expected, prompt(50, batch=len(lengths))], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), 190, dtype=torch.long)], dim=1)
    ids = {"input_ids": more, "attention_mask": mask}
    assert torch.equal(*(generate(model, ids, c, max_new_tokens=5) for c in (usual, other)))
    for a, b in zip(usual.packed_layers, other.packed_layers, strict=True):
        b.finish()
        assert (a.seen, a.cache.lengths, a.cache.packed) == (b.seen, b.cache.lengths, b.cache.packed)
        assert torch.equal(a.mask, b.mask) if a.mask is not None else b.mask is None


@pytest.mark.parametrize("compiled", [False, True])
def test_max_tokens_is_refused_on_the_device_too(compiled):
    model = make_model("llama")
    cache = cache_for(model, CONFIG, max_tokens=60)
    cache.decode_on_device = True
    with pytest.raises(ValueError, match=r"^max_tokens: the cache holds 60 tokens a row, got 61$"):
        generate(model, prompt(40), cache, max_new_tokens=22, **(COMPILED if compiled else {}))
    assert cache.get_seq_length() == 60


@pytest.mark.quick
@pytest.mark.parametrize("lengths", [[150, 31, 90], [150]], ids=str)
def test_a_step_is_one_graph_whatever_the_length(lengths):
    """generate() compiles it once for caches of one size, without a break, whoever made them."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model, inputs = make_model("llama"), left_padded(lengths)
    expected = generate(model, inputs, cache_for(model, CONFIG, max_tokens=500), max_new_tokens=60)
    for _ in range(2):
        cache = cache_for(model, CONFIG, max_tokens=500)
        cache.decode_on_device = True
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=60, **COMPILED), expected)
        assert cache.stats()["attend_calls"] == {"reference": 59 * 2}
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_what_generate_may_compile():
    """On a GPU generate() compiles the model for a cache that says so: one graph must be all of it."""
    model = make_model("llama")
    assert cache_for(model, CONFIG, max_tokens=50).is_compileable
    assert not cache_for(model, CONFIG).is_compileable, "storage that grows moves"
    assert not cache_for(make_model("gemma3"), CONFIG, max_tokens=50).is_compileable, "sliding layers are native"
    model.model.layers[1].to("meta")
    assert not cache_for(model, CONFIG, max_tokens=50).is_compileable, "layers on two devices"
    bloom = random_model(tiny_config(BloomConfig))
    assert not cache_for(bloom, CONFIG, max_tokens=50).is_compileable, "its attention code is its own"


def test_what_moves_or_cuts_rows_does_without(recwarn):
    """Beam search and drafts change rows at every step: preparing each anew would cost more than it brings."""
    model, draft = make_model("llama"), make_model("llama", seed=7)
    for options in ({"num_beams": 3}, {"assistant_model": draft}, {"prompt_lookup_num_tokens": 4}):
        usual, other = (cache_for(model, CONFIG, max_tokens=500) for _ in range(2))
        other.decode_on_device = True
        tokens = [generate(model, prompt(200), c, **options) for c in (usual, other)]
        assert torch.equal(*tokens), options


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_captured_step_gives_the_same_tokens(family):
    model = make_model(family).half().cuda()
    inputs = {name: x.cuda() for name, x in left_padded([200, 40]).items()}
    usual, other = (cache_for(model, CONFIG, max_tokens=600) for _ in range(2))
    expected = generate(model, inputs, usual, max_new_tokens=200, disable_compile=True)[:, 200:]
    assert torch.equal(decoded(model, inputs, 200, other).cpu(), expected)
    decoder = GraphDecoder(model, other)
    tokens = decoder.generate(expected[:, -1].cuda(), 20)
    graph = decoder.graph
    decoder.generate(tokens[:, -1], 20)
    assert decoder.graph is graph is not None, "storage has not moved"


@pytest.mark.gpu
def test_a_compiled_and_captured_step_gives_the_same_tokens():
    model = make_model("llama").half().cuda()
    inputs = {name: x.cuda() for name, x in left_padded([200, 40]).items()}
    plain, other = (cache_for(model, CONFIG, max_tokens=600) for _ in range(2))
    expected = decoded(model, inputs, 100, plain)
    with torch.no_grad():
        model(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0), **cache_argument(other))
    actual = GraphDecoder(model, other, compile=True).generate(expected[:, 0], 99)
    same = actual == expected[:, 1:]
    assert same[:, :5].all()
    assert same[:, :30].float().mean() > 0.5, "rounding decides a token sooner or later"
