"""GraphDecoder: the tokens of generate(), and a cache that is as if it had been generate()."""

import pytest
import torch

from kivi_kv import KiviConfig, cache_for
from kivi_kv.integrations.transformers import GraphDecoder, cache_argument
from tiny_models import generate, left_padded, make_model, prompt

CONFIG = KiviConfig(4, 4, 32, residual_length=32, sink_length=3)
PACKED = ("llama", "qwen2", "qwen3", "mistral", "phi3", "qwen3_moe", "mixtral", "olmo2", "smollm3")


def decoded(model, inputs: dict, tokens: int, cache) -> torch.Tensor:
    """Tokens [B, tokens]: the first from the prompt, the rest by a GraphDecoder."""
    with torch.no_grad():
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        first = model(**inputs, position_ids=positions, **cache_argument(cache)).logits[:, -1].argmax(-1)
    return torch.cat([first[:, None], GraphDecoder(model, cache).generate(first, tokens - 1)], dim=1)


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("lengths", [[20], [200], [150, 31, 90]], ids=str)
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


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_captured_step_gives_the_same_tokens(family):
    model = make_model(family).half().cuda()
    inputs = {name: x.cuda() for name, x in left_padded([200, 40]).items()}
    usual, other = (cache_for(model, CONFIG, max_tokens=600) for _ in range(2))
    expected = generate(model, inputs, usual, max_new_tokens=200)[:, 200:]
    assert torch.equal(decoded(model, inputs, 200, other), expected)
