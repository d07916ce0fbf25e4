"""Teacher-forced scores of a text, through a real cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import PAGE, KiviConfig


@dataclass(frozen=True, slots=True)
class Scores:
    """Per position t of a text: how the model predicts token t + 1 from tokens 0 .. t."""

    nll: Tensor  # [T - 1] fp32, natural log
    top1: Tensor  # [T - 1] int64, the most likely token

    @property
    def perplexity(self) -> float:
        return self.nll.mean().exp().item()

    def agreement(self, other: "Scores") -> float:
        """The share of positions with the same most likely token."""
        return (self.top1 == other.top1).float().mean().item()


def decode_chunks(tokens: int, config: KiviConfig | None) -> list[tuple[int, int]]:
    """Token ranges that may be fed at once with exactly the result of feeding one token at a time.

    Within a range config.pages(n) is constant, so each query sees the same packed pages, and everything else in
    full precision, as it would alone.
    """
    first = PAGE if config is None else config.sink_length + config.residual_length + PAGE
    starts = [0, *range(first, tokens, PAGE)]
    return list(zip(starts, [*starts[1:], tokens], strict=True))


@torch.no_grad()
def teacher_forced(
    model: Any,
    ids: Tensor,
    cache: Any,
    config: KiviConfig | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Scores:
    """Score ids [1, T] through cache, which must be empty; config is that of a KiviCache, None for a dense one.

    Equal to decoding token by token, at prefill speed. progress is called with the tokens done in each chunk.
    """
    from ..integrations.transformers.compat import cache_argument

    nll, top1 = [], []
    for start, stop in decode_chunks(ids.shape[1], config):
        logits = model(ids[:, start:stop], use_cache=True, **cache_argument(cache)).logits[0].float()
        target = ids[0, start + 1 : stop + 1]
        scored = logits[: len(target)]
        nll.append(torch.nn.functional.cross_entropy(scored, target, reduction="none"))
        top1.append(scored.argmax(-1))
        progress(stop - start)
    return Scores(torch.cat(nll), torch.cat(top1))
