"""KiviLayer: one layer of a transformers cache, over a LayerCache."""

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ...cache import DenseAttention, LayerCache
from ...config import KiviConfig, KiviWarning
from ...ops import dense_attention
from .handle import KVHandle

NOT_OURS = (
    "the packed cache is dequantized at every step, since the model's attention is not 'kivi': make the cache with "
    "cache_for(model); a model whose attention code is its own has no faster way"
)


class KiviLayer(CacheLayerMixin):
    """Stages new tokens in `update`, stores them in the attention call, which knows the padding mask.

    A token that the mask hides is never stored: a row's cache is what it would be without padding.
    `seen` counts tokens as transformers does, padding included.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False  # the first update allocates: it knows batch, heads, dtype and device

    def __init__(
        self,
        config: KiviConfig,
        max_tokens: int | None = None,
        counts: Counter[str] | None = None,
        backend: str | None = None,
    ) -> None:
        # not super().__init__, which would assign keys and values
        self.config = config
        self.max_tokens = max_tokens
        self.backend = backend
        self.cache: LayerCache | None = None
        self.is_initialized = False
        self.staged: tuple[Tensor, Tensor] | None = None
        self.seen = 0
        self.mask: Tensor | None = None  # [B, seen] bool: which seen tokens are stored; None for all
        self.counts: Counter[str] = Counter() if counts is None else counts  # shared by a cache's layers
        self.on_device = False  # between `prepare` and `finish`, when only the device counts tokens
        self.masked = False  # a padded batch must come with its mask there, too
        self.longest = 0  # tokens of the longest row when `prepare` was called
        self.edited = False  # rows were moved or cut since the last reset, as beam search and drafts do

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"key_states, value_states: expected equal shapes, got {tuple(key_states.shape)} and "
                f"{tuple(value_states.shape)}; this model's attention cannot be packed"
            )
        B, H, _, D = key_states.shape
        self.cache = LayerCache(
            self.config, B, H, D, key_states.dtype, key_states.device, self.max_tokens, self.backend
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[KVHandle, KVHandle]:
        """Stage tokens [B, H, M, D]; return handles for the attention call."""
        if self.on_device and key_states.shape[2] == 1:  # nothing here may depend on how many tokens there are
            self.staged, tokens = (key_states, value_states), self.get_max_length()
            return KVHandle(self, 0, key_states, tokens), KVHandle(self, 1, value_states, tokens)
        self._settle()
        if self.cache is None or not (self.seen or self.cache.fits(key_states)):
            self.lazy_initialization(key_states, value_states)  # also after reset(), when another batch comes
        self.staged = (key_states, value_states)
        tokens = self.get_seq_length()
        return KVHandle(self, 0, key_states, tokens), KVHandle(self, 1, value_states, tokens)

    def attend(
        self, q: Tensor, mask: Tensor | None, dense: DenseAttention = dense_attention, **options: Any
    ) -> Tensor:
        """Attend the staged tokens and store them. mask: [B, >= T] bool, False for padding, or None.

        Returns [B, HQ, M, D]. dense and options: those of LayerCache.step.
        """
        cache = self._ready()
        if self.staged is None:
            raise RuntimeError("attend: expected tokens staged by update, got none")
        k, v = self.staged
        self.staged = None  # what is refused below is not stored later either
        if self.on_device:
            if mask is None and self.mask is not None and self.masked:
                raise ValueError(
                    "attention_mask: expected the padding that earlier tokens were stored with, got none"
                )
            if mask is None or mask.shape[1] == 1:
                return cache.decode(q, k, v, **options)
            self._leave()  # some rows skip this token
        total = self.seen + k.shape[2]
        if mask is not None and mask.shape[1] < total:
            raise ValueError(f"attention_mask: expected one of {total} tokens, got {mask.shape[1]}")
        valid = self._valid(None if mask is None else mask[:, :total])
        out = cache.step(q, k, v, valid, dense, **options)
        self._advance(k.shape[2], valid)
        return out

    def is_padding(self, mask: Tensor) -> bool:
        """Whether a mask [B, T] hides what was not stored and nothing else, among tokens before the staged ones."""
        self._leave()
        return self._is_past(mask)

    def prepare(self, masked: bool = False) -> None:
        """From here to `finish`, store and attend one token at a time by the device alone, in every row.

        masked: refuse to attend a padded batch without a mask.
        """
        self._settle()
        cache = self._ready()
        cache.prepare()
        for x in cache.storage.tensors().values():
            torch._dynamo.mark_static_address(x)  # a graph of the whole model may write into it
        self.longest, self.on_device, self.masked = max(cache.lengths), True, masked

    def finish(self) -> None:
        """Count what was stored since `prepare`, in rows that all took as many tokens."""
        if self.on_device:
            self.staged = None
            self._leave()

    def _leave(self) -> None:
        """The same, and keep the token that has come."""
        if self.on_device:
            self.on_device = False
            self._advance(max(self._ready().lengths) - self.longest, None)

    def materialize(self, why: str = NOT_OURS) -> tuple[Tensor, Tensor]:
        """Dequantized K and V [B, H, T, D], staged tokens included: the slow way, counted. Warns why, once."""
        self._count("materializations", why)
        self._leave()
        if self.staged is not None:
            self._ready().make_room()
        return self._dense()

    @property
    def keys(self) -> Tensor | None:
        """Dequantized keys [B, H, T, D], or None before the first update. Counted, like every materialization."""
        return self._read()[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """Dequantized values [B, H, T, D], or None before the first update. Counted, like every materialization."""
        return self._read()[1] if self.is_initialized else None

    def store(self, valid: Tensor) -> None:
        """Store the staged tokens that valid [B, M] marks, after another attention than ours attended them."""
        if self.staged is None:
            return
        k, v = self.staged
        self.staged = None
        self._ready().append(k, v, valid)
        self._advance(k.shape[2], valid)

    def get_seq_length(self) -> int:
        if self.on_device:
            return self.seen + max(self._ready().lengths) - self.longest
        return self.seen + (self.staged[0].shape[2] if self.staged else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.on_device:
            return query_length, 0  # kivi_mask knows what to make of it
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.max_tokens is None else self.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -tokens_to_remove tokens; 0 does nothing."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding counts on the device
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected 0 or less, got {tokens_to_remove}")
        self._settle()
        if self.cache is None or tokens_to_remove == 0:
            return
        self.edited = True
        self.seen = max(0, self.seen + tokens_to_remove)
        if self.mask is None:
            self.cache.crop(self.seen)
        else:
            mask = self.mask[:, : self.seen]
            self.cache.crop(mask.sum(1).tolist())
            self.mask = _or_none(mask)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            rows = torch.arange(self.cache.storage.batch)
            self._select(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.staged, self.mask, self.seen = None, None, 0
        self.on_device = self.edited = False
        if self.cache is not None:
            self.cache.reset()

    def offload(self) -> None:
        raise ValueError("offloading: expected False, since a packed cache stays on its device, got True")

    def _select(self, indices: Tensor) -> None:
        self._settle()
        if self.cache is None:
            return
        self.edited = True
        self.cache.select(indices)
        if self.mask is not None:
            self.mask = _or_none(self.mask[indices.to(self.mask.device)])

    def _ready(self) -> LayerCache:
        if self.cache is None:
            raise RuntimeError("the layer holds nothing yet: update must come first")
        return self.cache

    def _valid(self, mask: Tensor | None) -> Tensor | None:
        """The staged part of the mask; the part before must mark what was stored when those tokens came."""
        if not (self.mask is None if mask is None else self._is_past(mask)):
            raise ValueError(
                "attention_mask: expected the padding that earlier tokens were stored with, got another one or none"
            )
        return None if mask is None else mask[:, self.seen :]

    def _is_past(self, mask: Tensor) -> bool:
        past = mask[:, : self.seen]
        return bool(past.all()) if self.mask is None else torch.equal(past, self.mask)

    def _advance(self, tokens: int, valid: Tensor | None) -> None:
        """Count tokens as seen, and remember which of them were stored."""
        hidden = valid is not None and not bool(valid.all())
        if hidden or self.mask is not None:
            B = self._ready().storage.batch
            device = self._ready().storage.lengths.device
            past = torch.ones(B, self.seen, dtype=torch.bool, device=device) if self.mask is None else self.mask
            new = torch.ones(B, tokens, dtype=torch.bool, device=device) if valid is None else valid
            self.mask = torch.cat([past, new], dim=1)
        self.seen += tokens

    def _settle(self) -> None:
        """Count what the device counted; store staged tokens that our attention never saw, padding and all."""
        self.finish()
        if self.staged is None:
            return
        k, v = self.staged
        self._count(
            "unattended",
            "tokens were stored without passing through the 'kivi' attention: padding, if any, is stored too; "
            "call model.set_attn_implementation('kivi')",
        )
        self.staged = None
        self._ready().append(k, v)
        self._advance(k.shape[2], None)

    def _read(self) -> tuple[Tensor, Tensor]:
        self.counts["materializations"] += 1  # asked for by name, so there is nothing to warn of
        self._leave()
        return self._dense()

    def _count(self, what: str, warning: str) -> None:
        self.counts[what] += 1
        if self.counts[what] == 1:
            warnings.warn(warning, KiviWarning, stacklevel=4)

    def _dense(self) -> tuple[Tensor, Tensor]:
        k, v = self._ready().dequantize()
        if self.mask is not None:  # put the tokens back where the padded batch has them
            spread = k.new_zeros((2, *k.shape[:2], self.seen, k.shape[3]))
            for row, keep in enumerate(self.mask):
                n = int(keep.sum())
                spread[0, row, :, keep], spread[1, row, :, keep] = k[row, :, :n], v[row, :, :n]
            k, v = spread[0], spread[1]
        if self.staged is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), self.staged, strict=True))
        return k, v


def _or_none(mask: Tensor) -> Tensor | None:
    """A mask that hides nothing is no mask."""
    return None if mask.all() else mask
