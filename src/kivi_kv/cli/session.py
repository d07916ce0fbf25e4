"""A loaded model and one conversation's cache, for `kivi generate`."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, TextStreamer

from ..config import PRESETS, KiviConfig
from ..integrations.transformers import KiviCache, cache_argument, cache_for, cache_nbytes, load
from .common import device_or_default


@dataclass(frozen=True, slots=True)
class Result:
    """What one run generated, and its cache as it was then."""

    tokens: list[int]
    text: str
    seconds: float
    cached_tokens: int
    cache_bytes: int
    dense_bytes: int

    def report(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": len(self.tokens),
            "tokens_per_second": len(self.tokens) / self.seconds,
            "cached_tokens": self.cached_tokens,
            "cache_bytes": self.cache_bytes,
            "dense_bytes": self.dense_bytes,
        }

    def parts_from(self, other: "Result") -> int:
        """The number of tokens that both begin with."""
        return _common(self.tokens, other.tokens)


class Session:
    """A model with its tokenizer and settings; a chat keeps its cache from turn to turn."""

    def __init__(
        self, model: Any, tokenizer: Any, config: KiviConfig, max_new_tokens: int, temperature: float, seed: int
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.name = next((name for name, preset in PRESETS.items() if preset == config), "kivi")
        self.sampling: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        if temperature > 0:
            self.sampling |= {"do_sample": True, "temperature": temperature}
            torch.manual_seed(seed)
        self.messages: list[dict[str, str]] = []
        self.cache: KiviCache | None = None
        self.seen: list[int] = []  # the tokens that the chat's cache holds

    @classmethod
    def open(
        cls, path: str, config: KiviConfig, max_new_tokens: int, temperature: float, seed: int, device: str | None
    ) -> "Session":
        model, tokenizer = load(path, device=device_or_default(device), progress=False)
        return cls(model, tokenizer, config, max_new_tokens, temperature, seed)

    def encode(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt").input_ids.to(self.model.device)

    def run(self, ids: Tensor, packed: bool, stream: bool) -> Result:
        """Complete ids [1, T] with a fresh cache."""
        cache = cache_for(self.model, self.config) if packed else DynamicCache(config=self.model.config)
        return self._generate(ids, cache, stream)

    def say(self, text: str) -> Result:
        """One turn of a chat, streamed. What the cache already holds of the conversation is not computed again."""
        self.messages.append({"role": "user", "content": text})
        ids = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids.to(self.model.device)
        if self.cache is None:
            self.cache = cache_for(self.model, self.config)
        else:
            # the template may write the last answer differently: keep what both agree on, and recompute the rest
            same = min(_common(self.seen, ids[0].tolist()), ids.shape[1] - 1)
            self.cache.crop(same - len(self.seen))
        result = self._generate(ids, self.cache, stream=True)
        self.seen = [*ids[0].tolist(), *result.tokens][: self.cache.get_seq_length()]
        self.messages.append({"role": "assistant", "content": result.text})
        return result

    def _generate(self, ids: Tensor, cache: Any, stream: bool) -> Result:
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        start = time.perf_counter()
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=streamer, **self.sampling, **cache_argument(cache)
        )
        seconds = time.perf_counter() - start
        tokens = made[0, ids.shape[1] :].tolist()
        return Result(
            tokens,
            self.tokenizer.decode(tokens, skip_special_tokens=True),
            seconds,
            cache.get_seq_length(),
            cache_nbytes(cache),
            cache.dense_nbytes if isinstance(cache, KiviCache) else cache_nbytes(cache),
        )


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
