"""GraphDecoder: greedy decoding whose every step is the same launches."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import KiviCache
from .compat import cache_argument


class GraphDecoder:
    """Decode greedily from a packed cache that holds the prompt, with nothing of a step left to the host.

    On a GPU a step of the whole model is captured in a CUDA graph and replayed; elsewhere the same step runs as it
    is. Positions are the tokens that a row holds, so rows of a padded batch decode as they would alone.

    model, cache: cache = cache_for(model, config, max_tokens=...), to which the prompt has been given by a call of
    the model. Every layer must be packed. Raises ValueError where one of this is not so.
    """

    def __init__(self, model: PreTrainedModel, cache: KiviCache) -> None:
        if cache.native:
            raise ValueError(
                f"cache: expected every layer packed, got {len(cache.native)} that are not: {cache.native}"
            )
        if cache.max_tokens is None:
            raise ValueError("cache: expected max_tokens, for storage that does not move, got None")
        held = [layer.cache for layer in cache.packed_layers if layer.cache is not None]
        if not held or len(held) < len(cache.packed_layers):
            raise ValueError("cache: expected one that holds the prompt, got an empty one")
        self.model, self.cache, self.first, self.max_tokens = model, cache, held[0], cache.max_tokens

    @torch.no_grad()
    def generate(self, token: Tensor, tokens: int) -> Tensor:
        """The next `tokens` tokens of each row, [B, tokens].

        token: [B], the newest of each row, which the cache does not hold yet: the argmax of the prompt's last
        logits, say. The cache holds it afterwards, and all that is returned but the last.
        Raises ValueError before anything is stored.
        """
        layers = self.cache.packed_layers
        storage = self.first.storage
        if token.shape != (storage.batch,):
            raise ValueError(f"token: expected shape ({storage.batch},), got {tuple(token.shape)}")
        room = self.max_tokens - max(self.first.lengths)
        if not 1 <= tokens <= room:
            raise ValueError(f"tokens: expected from 1 to the {room} that max_tokens leaves, got {tokens}")
        newest = token.to(device=storage.lengths.device, dtype=torch.long, copy=True)
        out = newest.new_empty((storage.batch, tokens))

        def step() -> None:
            position = storage.lengths.long()[:, None]  # of the new token; layers then count it
            options = {"position_ids": position, "use_cache": True, **cache_argument(self.cache)}
            newest.copy_(self.model(input_ids=newest[:, None], **options).logits[:, -1].argmax(-1))

        for layer in layers:
            layer.prepare()
        try:
            run: Callable[[], None] = step
            for i in range(tokens):
                if i == 1 and newest.is_cuda:
                    run = _captured(step)
                run()
                out[:, i] = newest
        finally:
            for layer in layers:
                layer.finish()
        return out


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a step, which must have run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
