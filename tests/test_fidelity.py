"""Teacher-forced scoring: its chunks must be exactly decoding token by token."""

import pytest
import torch
from transformers import DynamicCache

from kivi_kv import KiviConfig, cache_for
from kivi_kv.analysis import read_text, teacher_forced
from kivi_kv.analysis.fidelity import decode_chunks
from kivi_kv.integrations.transformers import cache_argument
from tiny_models import make_model


@pytest.mark.parametrize("config", [None, KiviConfig(), KiviConfig(residual_length=32, sink_length=4)])
@pytest.mark.parametrize("tokens", [2, 128, 129, 700])
def test_chunks_cover_the_text_and_never_cross_a_flush(tokens: int, config: KiviConfig | None) -> None:
    chunks = decode_chunks(tokens, config)
    assert [start for start, _ in chunks] == [0, *[stop for _, stop in chunks[:-1]]]
    assert chunks[-1][1] == tokens
    if config is not None:
        for start, stop in chunks:
            assert {config.pages(n) for n in range(start + 1, stop + 1)} == {config.pages(start + 1)}


@pytest.mark.parametrize("config", [KiviConfig(residual_length=32), KiviConfig(residual_length=0, sink_length=4)])
def test_equals_decoding_one_token_at_a_time(config: KiviConfig) -> None:
    model = make_model("llama")
    ids = torch.randint(3, model.config.vocab_size, (1, 400))
    scores = teacher_forced(model, ids, cache_for(model, config), config)

    cache = cache_for(model, config)
    nll = []
    with torch.no_grad():
        for t in range(ids.shape[1] - 1):
            logits = model(ids[:, t : t + 1], use_cache=True, **cache_argument(cache)).logits[0, -1].float()
            nll.append(-logits.log_softmax(-1)[ids[0, t + 1]])
    # fp32 sums in another order; a token that saw other codes would differ by more than 1e-2
    torch.testing.assert_close(scores.nll, torch.stack(nll), atol=1e-3, rtol=1e-3)
    assert scores.nll.shape == scores.top1.shape == (399,)


def test_dense_scores_equal_one_forward_pass() -> None:
    model = make_model("llama")
    ids = torch.randint(3, model.config.vocab_size, (1, 300))
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    done = []
    scores = teacher_forced(model, ids, DynamicCache(config=model.config), progress=done.append)
    torch.testing.assert_close(scores.nll, expected, atol=1e-4, rtol=1e-4)  # fp32 sums in another order
    assert scores.agreement(scores) == 1.0
    assert scores.perplexity == pytest.approx(expected.mean().exp().item(), rel=1e-4)
    assert sum(done) == 300


def test_read_text_joins_the_lines_of_a_paragraph(tmp_path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("One\n  two\n\n\nthree\nfour\n")
    assert read_text(file) == "One two\n\nthree four"
