"""KiviCache and cache_for: the user's two names."""

import warnings
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ...config import PAGE, KiviConfig, KiviWarning
from ...format import MIN_HEAD_DIM
from ...ops.dispatch import BACKENDS, choose
from .attention import NAME, NEWEST, register
from .layer import KiviLayer


class KiviCache(DynamicCache):
    """A transformers cache whose full-attention layers are packed; pass it as past_key_values.

    Layers that cannot be packed (sliding windows, linear attention ...) keep transformers' own storage. Most users
    call cache_for(model), which also turns on the attention that reads packed layers.

    model_config: the model's config. config: a KiviConfig or a preset's name. max_tokens: allocate room for that
    many tokens at the first update, and refuse more; None grows as needed. backend: "reference", "triton", or None
    for the fastest that runs on the model's device.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: KiviConfig | str = "kivi2",
        max_tokens: int | None = None,
        backend: str | None = None,
    ) -> None:
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {backend!r}")
        self.config = KiviConfig.of(config)
        self.max_tokens = max_tokens
        self.model_config = model_config
        self.native: dict[int, str] = {}  # layers that keep their own storage, and why
        self.compileable = False  # whether generate() may compile the model: cache_for knows
        self.decode_on_device: bool | None = None  # count tokens there in steps of one token; None: on a GPU
        self._room = 0  # steps that certainly fit, on the device
        super().__init__(config=model_config)
        self.counts: Counter[str] = Counter()
        if not self.layers:  # a config that names no layers: they come with the first updates
            if self.config.layer_bits:
                raise ValueError(
                    f"layer_bits: expected none for {type(model_config).__name__}, which names no layers"
                )
            self.layer_class_to_replicate = partial(KiviLayer, self.config, max_tokens, self.counts, backend)
        beyond = [i for i, _, _ in self.config.layer_bits if self.layers and i >= len(self.layers)]
        if beyond:
            raise ValueError(f"layer_bits: expected layers from 0 to {len(self.layers) - 1}, got {beyond}")
        text = model_config.get_text_config(decoder=True)
        for index, layer in enumerate(self.layers):
            reason = _native_reason(layer, text)
            if reason is None:
                self.layers[index] = KiviLayer(self.config.for_layer(index), max_tokens, self.counts, backend)
            else:
                self.native[index] = reason

    @property
    def packed_layers(self) -> list[KiviLayer]:
        return [layer for layer in self.layers if isinstance(layer, KiviLayer)]

    @property
    def is_compileable(self) -> bool:
        """Whether generate() compiles the model's steps, and captures them in a CUDA graph.

        Chunks of a prompt (prefill_chunk_size) and of drafts are compiled too then, which brings nothing: pass
        disable_compile=True with them.
        """
        if torch.compiler.is_compiling():  # asked again by the compiled model
            return self.compileable
        return self.compileable and self.decode_on_device is not False and self._plain_steps()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """What transformers asks before every call of the model: how many tokens come is known here first."""
        if not torch.compiler.is_compiling():
            if query_length > 1:
                self.finish()
            elif self._decodes_on_device():
                self._take_room()
        return super().get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        layers = self.packed_layers
        if len(layers) and layers[0].on_device:
            if torch.compiler.is_compiling() or self.model_config._attn_implementation == NAME:
                return NEWEST
            self.finish()  # other masks need the number
        return super().get_query_offset(layer_idx)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layers = self.packed_layers
        if not torch.compiler.is_compiling() and len(layers) and layers[0].on_device and layer_idx == 0:
            self._take_room()  # for models that make no mask
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def prepare(self, masked: bool = False) -> None:
        """From here to `finish`, steps of one token need nothing of the host: see KiviLayer.prepare."""
        for layer in self.packed_layers:
            layer.prepare(masked)
        self._room = self.get_max_length() - max(self.packed_layers[0]._ready().lengths)

    def finish(self) -> None:
        """Know again how many tokens each layer holds."""
        for layer in self.packed_layers:
            layer.finish()

    def _decodes_on_device(self) -> bool:
        """Whether the next token is counted on the device; from the first one on it is."""
        layers = self.packed_layers
        if layers and layers[0].on_device:
            return True
        first = layers[0].cache if layers else None
        if first is None or self.max_tokens is None or self.native or not self._plain_steps():
            return False
        if torch.is_grad_enabled() or self.model_config._attn_implementation != NAME:
            return False
        if any(layer.cache is None or not layer.seen for layer in layers):
            return False
        kernels = "reference" not in first.backends.values()  # which waits for a GPU
        by_device = first.storage.pool.is_cuda and kernels
        by_device = by_device if self.decode_on_device is None else self.decode_on_device
        if not by_device:
            return False
        self.prepare(masked=True)
        return True

    def _plain_steps(self) -> bool:
        """Whether every token so far was attended by 'kivi' in its turn, with no beams and no drafts."""
        edited = any(layer.edited for layer in self.packed_layers)
        return not (edited or self.counts["materializations"] or self.counts["unattended"])

    def _take_room(self) -> None:
        """Refuse a token that finds no room. Called a few times a step; asks the device when it may matter."""
        first = self.packed_layers[0]._ready()
        if first.storage.pool.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing is stored now, and nothing can be asked
        self._room -= 1
        if self._room < 0:
            longest, most = max(first.lengths), self.get_max_length()
            if longest >= most:
                raise ValueError(f"max_tokens: the cache holds {most} tokens a row, got {longest + 1}")
            self._room = most - longest - 1

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K and V, by packed and native layers."""
        packed = sum(layer.cache.nbytes for layer in self.packed_layers if layer.cache)
        return packed + self._native_nbytes()

    @property
    def dense_nbytes(self) -> int:
        """Bytes that a dense cache of the same tokens takes."""
        total = self._native_nbytes()
        for layer in self.packed_layers:
            if layer.cache:
                B, H, _, D = layer.cache.storage.dense_k.shape
                total += 2 * B * H * layer.get_seq_length() * D * layer.cache.storage.dense_k.element_size()
        return total

    def stats(self) -> dict[str, Any]:
        """What the cache holds and how it was used.

        backends: what runs each operator, None before the first update; attend_calls: how often each attended
        packed pages, of all layers, and steps counted on the device; tokens seen; packed_layers; native_layers
        with the reason for each; pages and dense_tokens, of all rows of the first packed layer; used_bytes (pages
        and rows that hold tokens) and reserved_bytes (allocated) of the packed layers; materializations and
        unattended: how often a packed layer was dequantized whole, and how many updates never met the 'kivi'
        attention. The last two should be 0.
        """
        caches = [layer.cache for layer in self.packed_layers if layer.cache]
        packed = [sum(cache.packed) for cache in caches]  # of all, since a layer knows its calls once it is asked
        pages = packed[0] if caches else 0
        return {
            "backends": dict(caches[0].backends) if caches else None,
            "attend_calls": dict(sum((cache.attend_calls for cache in caches), Counter())),
            "tokens": self.get_seq_length() if any(isinstance(x, CacheLayerMixin) for x in self.layers) else 0,
            "packed_layers": len(self.packed_layers),
            "native_layers": dict(self.native),
            "pages": pages,
            "dense_tokens": sum(caches[0].lengths) - pages * PAGE if caches else 0,
            "used_bytes": sum(cache.storage.used_nbytes for cache in caches),
            "reserved_bytes": sum(cache.nbytes for cache in caches),
            "materializations": self.counts["materializations"],
            "unattended": self.counts["unattended"],
        }

    def _native_nbytes(self) -> int:
        return sum(native_nbytes(layer) for layer in self.layers if not isinstance(layer, KiviLayer))


def cache_for(
    model: PreTrainedModel,
    config: KiviConfig | str = "kivi2",
    max_tokens: int | None = None,
    backend: str | None = None,
) -> KiviCache:
    """A packed cache for this model; one cache serves one sequence or batch.

    Sets the model's attention implementation to 'kivi', which also serves the model's other caches. config is a
    KiviConfig or a preset's name; max_tokens allocates for that many tokens at once and refuses more; backend is
    "reference", "triton", or None for the fastest that runs on the model's device (KIVI_BACKEND says otherwise).

    >>> cache = cache_for(model, "kivi2")
    >>> model.generate(**inputs, past_key_values=cache)

    Raises ValueError for a model whose output would be wrong: an encoder-decoder, or one whose config says
    is_causal=False. Warns once when no layer can be packed. A model whose attention code is its own (bloom), or
    adds to the mask (falcon with alibi), works, but has to dequantize the cache at every step; the first one warns.
    """
    config = KiviConfig.of(config)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder-only model, got the encoder-decoder {name}")
    if not getattr(model.config.get_text_config(decoder=True), "is_causal", True):
        raise ValueError(f"model: expected causal attention, got the bidirectional {name}")
    cache = KiviCache(model.config, config, max_tokens, backend)
    if cache.layers and not cache.packed_layers:
        reasons = ", ".join(f"{reason} ({n})" for reason, n in Counter(cache.native.values()).items())
        warnings.warn(f"{name}: no layer can be packed: {reasons}", KiviWarning, stacklevel=2)
    cache.compileable = max_tokens is not None and not cache.native and _compileable(model, backend)
    register()
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    return cache


def _compileable(model: PreTrainedModel, backend: str | None) -> bool:
    """Whether a step is one graph: on one device, by kernels, with a causal mask and no attention of its own."""
    devices = {x.device for x in model.parameters()}
    text_only = model.config.get_text_config(decoder=True) is model.config
    parallel = (getattr(model, "_tp_size", None) or 1) > 1
    if len(devices) > 1 or parallel or not text_only or not model.is_backend_compatible():
        return False
    waits = [choose(op, model.device, model.dtype, backend) == "reference" for op in ("quantize", "attend")]
    return model.device.type == "cpu" or not any(waits)  # the reference waits for a GPU


def native_nbytes(layer: object) -> int:
    """Bytes of K and V in one of transformers' own layers; states of linear attention do not count."""
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


def cache_nbytes(cache: Cache) -> int:
    """Bytes that any transformers cache holds for K and V; for a KiviCache those allocated."""
    return cache.nbytes if isinstance(cache, KiviCache) else sum(native_nbytes(layer) for layer in cache.layers)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Channels of a head, by a text config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _native_reason(layer: object, config: PreTrainedConfig) -> str | None:
    """Why a layer keeps its own storage, or None when it can be packed."""
    if type(layer) is not DynamicLayer:
        window = getattr(layer, "sliding_window", None)
        return f"{type(layer).__name__}" if window is None else f"sliding window of {window} tokens"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "multi-head latent attention: K and V differ in shape"
    if getattr(config, "num_kv_shared_layers", 0):
        return "layers share K and V"
    head_dim = head_dim_of(config)
    if head_dim < MIN_HEAD_DIM:
        return f"head dimension {head_dim} is below {MIN_HEAD_DIM}"
    return None
