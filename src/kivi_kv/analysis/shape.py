"""ModelShape: the few numbers about a model that decide the memory of its cache."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import known_models


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind. reason says why they keep their own storage, None for layers that are packed."""

    count: int
    kv_heads: int
    head_dim: int
    reason: str | None = None
    window: int | None = None  # tokens that a sliding layer keeps


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as a memory planner sees it. weight_bytes is None when unknown; note is for the reader."""

    name: str
    groups: tuple[LayerGroup, ...]
    max_tokens: int | None = None
    weight_bytes: int | None = None
    note: str = ""

    @classmethod
    def find(cls, model: str) -> "ModelShape":
        """From a config.json, a model directory, a GGUF file or the name of a well-known model.

        Raises ValueError naming what can be given.
        """
        path = Path(model)
        if model.lower() == known_models.PAPER_NAME.lower():
            group = LayerGroup(count=118, kv_heads=48, head_dim=128)
            return cls(known_models.PAPER_NAME, (group,), note=known_models.PAPER_NOTE)
        names = {name.lower(): name for name in known_models.CONFIGS}
        if model.lower() in names:
            name = names[model.lower()]
            return cls.from_config(_known_config(name), name, known_models.WEIGHT_BYTES.get(name))
        if path.exists():
            return cls.from_config(_local_config(path), local_name(path))
        raise ValueError(
            f"MODEL: expected a config.json, a model directory, a GGUF file or one of "
            f"{', '.join([*known_models.CONFIGS, known_models.PAPER_NAME])}; got {model!r}"
        )

    @classmethod
    def from_config(cls, config: Any, name: str, weight_bytes: int | None = None) -> "ModelShape":
        """From a transformers config. Layers are judged by the cache itself; weights are counted as 16-bit."""
        from transformers.cache_utils import CacheLayerMixin

        from ..integrations.transformers import KiviCache, head_dim_of

        text = config.get_text_config(decoder=True)
        if config.is_encoder_decoder or not hasattr(text, "num_attention_heads"):
            raise ValueError(f"MODEL: expected a decoder with attention layers, got {config.model_type}")
        if getattr(text, "kv_lora_rank", None) is not None:
            raise ValueError(
                f"MODEL: expected K and V of one shape, got the latent attention of {config.model_type}"
            )
        cache = KiviCache(config)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
            heads = 1
        head_dim = head_dim_of(text)
        kinds = Counter(
            (
                cache.native.get(index),
                # linear attention keeps a state of constant size, which is not counted
                getattr(layer, "sliding_window", None) if isinstance(layer, CacheLayerMixin) else 0,
            )
            for index, layer in enumerate(cache.layers)
        )
        groups = tuple(
            LayerGroup(count, heads, head_dim, reason, window) for (reason, window), count in kinds.items()
        )
        tokens = getattr(text, "max_position_embeddings", None)
        return cls(name, groups, tokens, weight_bytes or 2 * _count_parameters(config))


def _known_config(name: str) -> Any:
    from transformers import AutoConfig

    fields = dict(known_models.CONFIGS[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _local_config(path: Path) -> Any:
    from transformers import AutoConfig

    if path.suffix == ".gguf":
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file() or (path.is_file() and path.name != "config.json"):
        raise ValueError(f"MODEL: expected a config.json, a directory that holds one or a .gguf file, got {path}")
    return AutoConfig.from_pretrained(str(folder), local_files_only=True)


def local_name(path: Path) -> str:
    """What to call a local model: its folder, or its file without the ending."""
    path = path.resolve()
    return path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name


def _count_parameters(config: Any) -> int:
    """Parameters of the model, built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())
