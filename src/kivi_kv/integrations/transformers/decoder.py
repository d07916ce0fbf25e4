"""GraphDecoder: greedy decoding whose every step is the same launches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...cache import LayerCache
from .attention import NAME
from .cache import KiviCache
from .compat import cache_argument


class GraphDecoder:
    """Decode greedily from a packed cache that holds the prompt, with nothing of a step left to the host.

    On a GPU a step of the whole model is captured in a CUDA graph and replayed; elsewhere the same step runs as it
    is. Positions are the tokens that a row holds, so rows of a padded batch decode as they would alone.

    model, cache: cache = cache_for(model, config, max_tokens=...), to which the prompt has been given by a call of
    the model. Every layer must be packed. compile: fuse the small operations between attentions by torch.compile,
    which takes about a minute once. Raises ValueError where one of this is not so.
    """

    def __init__(self, model: PreTrainedModel, cache: KiviCache, compile: bool = False) -> None:
        if cache.native:
            raise ValueError(
                f"cache: expected every layer packed, got {len(cache.native)} that are not: {cache.native}"
            )
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"model: expected the attention '{NAME}', which cache_for sets, got "
                f"'{model.config._attn_implementation}'"
            )
        if cache.max_tokens is None:
            raise ValueError("cache: expected max_tokens, for storage that does not move, got None")
        self.cache, self.max_tokens = cache, cache.max_tokens
        self.held = self._layers()
        self.model: Callable[..., Any] = torch.compile(model.__call__, fullgraph=True) if compile else model
        self.newest = self._tokens()
        self.graph: torch.cuda.CUDAGraph | None = None  # of `step`, between `cache.prepare` and `cache.finish`
        self._captured: list[int] = []  # addresses of what the graph reads and writes

    @torch.no_grad()
    def generate(self, token: Tensor, tokens: int) -> Tensor:
        """The next `tokens` tokens of each row, [B, tokens].

        token: [B], the newest of each row, which the cache does not hold yet: the argmax of the prompt's last
        logits, say. The cache holds it afterwards, and all that is returned but the last.
        Raises ValueError before anything is stored.
        """
        self.held = self._layers()
        if self.held[0].storage.batch != len(self.newest):
            self.newest = self._tokens()
        if token.shape != self.newest.shape:
            raise ValueError(f"token: expected shape {tuple(self.newest.shape)}, got {tuple(token.shape)}")
        room = self.max_tokens - max(self.held[0].lengths)
        if not 1 <= tokens <= room:
            raise ValueError(f"tokens: expected from 1 to the {room} that max_tokens leaves, got {tokens}")
        self.newest.copy_(token)
        out = self.newest.new_empty((len(token), tokens))
        if self._addresses() != self._captured:
            self.graph = None
        self.cache.prepare()
        try:
            for i in range(tokens):
                if i and self.graph is None and self.newest.is_cuda:
                    self._capture()  # a step has run, so that nothing is left to set up
                if self.graph is None:
                    self.step()
                else:
                    self.graph.replay()
                out[:, i] = self.newest
        finally:
            self.cache.finish()
        return out

    def step(self) -> None:
        """Store `newest` and replace it by the next token of each row."""
        position = self.held[0].storage.lengths.long()[:, None]  # of the new token; layers then count it
        options = {"position_ids": position, "use_cache": True, **cache_argument(self.cache)}
        self.newest.copy_(self.model(input_ids=self.newest[:, None], **options).logits[:, -1].argmax(-1))

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.step()
        self._captured = self._addresses()

    def _layers(self) -> list[LayerCache]:
        """Those of the cache now: after a reset it may hold another batch, elsewhere."""
        held = [layer.cache for layer in self.cache.packed_layers if layer.cache is not None and layer.seen]
        if not held or len(held) < len(self.cache.packed_layers):
            raise ValueError("cache: expected one that holds the prompt, got an empty one")
        return held

    def _tokens(self) -> Tensor:
        storage = self.held[0].storage
        return torch.zeros(storage.batch, dtype=torch.long, device=storage.lengths.device)

    def _addresses(self) -> list[int]:
        tensors = [x for layer in self.held for x in layer.storage.tensors().values()]
        return [x.data_ptr() for x in (self.newest, *tensors)]
