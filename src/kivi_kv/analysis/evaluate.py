"""What a simulated cache costs a model on a text: perplexity, divergence, agreement, by position and distance."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .remedies import SimConfig
from .simulation import simulate

_ROWS = 512  # positions whose logits are handled at once


@dataclass(frozen=True, slots=True)
class Result:
    """One config on one text.

    The lists by quarter have an entry per quarter of the text, in order; those by distance one per entry of
    distances: the least number of tokens behind the query, which the next entry's is the end of.
    """

    perplexity: float
    ratio: float  # to dense
    kl: float  # of dense from quantized, mean over positions, nats
    top1: float  # share of positions with dense's most likely token
    kl_by_quarter: list[float]
    top1_by_quarter: list[float]
    distances: list[int]
    kl_by_distance: list[float]
    top1_by_distance: list[float]
    output_error: list[float]  # of each layer's attention output, relative, by its own q, k and v

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def distance_bins(positions: int) -> list[tuple[int, int]]:
    """Ranges of the number of tokens behind a query: below 256, then doubling, until there are `positions`."""
    edges = [0]
    while edges[-1] < positions:
        edges.append(min(positions, max(256, 2 * edges[-1])))
    return list(pairwise(edges))


class Reference:
    """Dense predictions of a model on ids [1, T], which simulated caches are compared with."""

    @torch.no_grad()
    def __init__(self, model: Any, ids: Tensor) -> None:
        check_head(model, ids[:, :4])
        self.model, self.ids = model, ids
        self.hidden = hidden_states(model, ids, None)
        self.nll = torch.cat([_nll(logits, self._target(part)) for part, logits in self._logits(self.hidden)])

    @property
    def perplexity(self) -> float:
        return self.nll.mean().exp().item()

    @torch.no_grad()
    def compare(self, config: SimConfig | None) -> Result:
        """Evaluate one config; None is dense once more."""
        errors: dict[int, float] = {}
        hidden = hidden_states(self.model, self.ids, config, errors)
        nll, kl, same = [], [], []
        for (part, logits), (_, dense) in zip(self._logits(hidden), self._logits(self.hidden), strict=True):
            nll.append(_nll(logits, self._target(part)))
            kl.append(
                F.kl_div(logits.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none").sum(-1)
            )
            same.append((logits.argmax(-1) == dense.argmax(-1)).float())
        divergence, agreement = torch.cat(kl), torch.cat(same)
        perplexity = torch.cat(nll).mean().exp().item()
        bins = distance_bins(len(divergence))
        return Result(
            perplexity,
            perplexity / self.perplexity,
            divergence.mean().item(),
            agreement.mean().item(),
            [x.mean().item() for x in divergence.chunk(4)],
            [x.mean().item() for x in agreement.chunk(4)],
            [low for low, _ in bins],
            [divergence[low:high].mean().item() for low, high in bins],
            [agreement[low:high].mean().item() for low, high in bins],
            [errors[layer] for layer in sorted(errors)],
        )

    def _target(self, part: slice) -> Tensor:
        return self.ids[0, 1:][part]

    def _logits(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(positions, fp32 logits) of every position but the last, a few at a time."""
        for start in range(0, hidden.shape[0] - 1, _ROWS):
            part = slice(start, min(start + _ROWS, hidden.shape[0] - 1))
            yield part, self.model.lm_head(hidden[part]).float()


@torch.no_grad()
def hidden_states(
    model: Any, ids: Tensor, config: SimConfig | None, errors: dict[int, float] | None = None
) -> Tensor:
    """The last layer's output [T, hidden] for ids [1, T], attending through a simulated cache."""
    with simulate(model, config, errors):
        return model.model(ids, use_cache=False).last_hidden_state[0]


@torch.no_grad()
def check_head(model: Any, ids: Tensor) -> None:
    """Refuse a model whose logits are more than lm_head of its last layer's output: scaled or capped ones."""
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise ValueError(f"model: expected a causal language model with lm_head, got {type(model).__name__}")
    direct = model.lm_head(model.model(ids, use_cache=False).last_hidden_state)
    if not torch.equal(direct, model(ids, use_cache=False).logits):
        raise ValueError(
            f"model: expected logits straight from lm_head, {type(model).__name__} scales or caps them"
        )


def _nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")
