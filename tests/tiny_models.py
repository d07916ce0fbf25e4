"""Random models of a few layers, one per kind of attention that a cache meets. Nothing is downloaded."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from kivi_kv import KiviCache, KiviConfig, KiviWarning, cache_for
from kivi_kv.integrations.transformers.compat import cache_argument

VOCAB = 99
PAD = 0
NEW = 24  # tokens that generate() adds
WINDOW = 64  # of the sliding layers: shorter than a page, so that they and the packed layers really differ
# whether falcon and doge attend through transformers' interface, with masks that they ask for
FALCON_ASKS = Version(transformers.__version__) >= Version("5.25")
KEY_BIAS = 30.0  # Qwen's first layers have key biases far larger than anything else in the model

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,  # generation always runs to max_new_tokens
}


def tiny_config(kind: type[PreTrainedConfig], layers: int = 2, **fields: Any) -> PreTrainedConfig:
    return kind(**(_COMMON | {"num_hidden_layers": layers} | fields))


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: tiny_config(LlamaConfig),
    "qwen2": lambda: tiny_config(Qwen2Config, use_sliding_window=False),
    "qwen3": lambda: tiny_config(Qwen3Config, head_dim=48, use_sliding_window=False),
    "mistral": lambda: tiny_config(MistralConfig, sliding_window=None),
    "mistral_sliding": lambda: tiny_config(MistralConfig, sliding_window=WINDOW),
    "phi3": lambda: tiny_config(Phi3Config),
    "gemma3": lambda: tiny_config(
        Gemma3TextConfig,
        layers=4,
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,  # a scale that is not head_dim ** -0.5
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt_oss": lambda: tiny_config(
        GptOssConfig,
        layers=4,
        head_dim=32,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3_moe": lambda: tiny_config(
        Qwen3MoeConfig, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "mixtral": lambda: tiny_config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "olmo2": lambda: tiny_config(Olmo2Config),
    "smollm3": lambda: tiny_config(SmolLM3Config, no_rope_layers=[1, 0], use_sliding_window=False),
    "cohere2": lambda: tiny_config(
        Cohere2Config, layers=4, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gemma2": lambda: tiny_config(  # bounds its logits
        Gemma2Config,
        layers=4,
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
FAMILIES = tuple(CONFIGS)
SLIDING = ("mistral_sliding", "gemma3", "gpt_oss", "cohere2", "gemma2")  # some layers have a window
PACKABLE = tuple(name for name in FAMILIES if name != "mistral_sliding")  # at least one layer can be packed


def random_model(config: PreTrainedConfig, seed: int = 0, **kwargs: Any) -> PreTrainedModel:
    """A model of this config with weights large enough that its greedy tokens vary."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **kwargs).eval()
    return randomize(model, seed)


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("k_proj.bias"):
                x.normal_(0, KEY_BIAS, generator=generator)
            elif name.endswith(("bias", "sinks")):
                x.normal_(0, 0.5, generator=generator)
            elif x.ndim >= 2:
                x.normal_(0, 0.15, generator=generator)
    return model


def make_model(family: str, seed: int = 0, **kwargs: Any) -> PreTrainedModel:
    """A new model of that family; the same seed gives the same weights."""
    if family == "gemma2":  # whose sdpa attention forgets the bound of its logits in transformers 5.17
        kwargs = {"attn_implementation": "eager"} | kwargs
    return random_model(CONFIGS[family](), seed + 10 * FAMILIES.index(family), **kwargs)


@cache
def untouched(family: str, seed: int = 0) -> PreTrainedModel:
    """A shared model that must never meet cache_for: the reference."""
    return make_model(family, seed)


@cache
def touched(family: str, seed: int = 0) -> PreTrainedModel:
    """A shared model of the same weights, for cache_for."""
    return make_model(family, seed)


def prompt(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    """Random token ids [batch, length], none of them padding."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1000 + seed))


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """input_ids and attention_mask [rows, longest length] of prompts of different lengths."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), PAD), torch.zeros((len(lengths), longest), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = prompt(length, seed + row)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def step(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **cache_argument(cache), use_cache=True).logits


def generate(
    model: PreTrainedModel, inputs: dict[str, Tensor] | Tensor, cache: Cache | None = None, **options: Any
) -> Tensor:
    """model.generate, greedy and of NEW tokens unless options say otherwise. inputs may be plain token ids.

    inputs go to the model's device, and the result comes from there.
    """
    if isinstance(inputs, Tensor):
        inputs = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    chosen = {} if cache is None else cache_argument(cache)
    return model.generate(**inputs, **chosen, **{"max_new_tokens": NEW, "do_sample": False} | options).cpu()


def cache_quietly(model: PreTrainedModel, config: KiviConfig | str) -> KiviCache:
    """cache_for of a model whose layers all stay native, which is worth one warning."""
    with pytest.warns(KiviWarning, match="no layer can be packed") as warned:
        cache = cache_for(model, config)
    assert len(warned) == 1
    return cache


def cache_of(family: str, config: KiviConfig | str = "kivi2") -> KiviCache:
    """cache_for of the shared model of that family."""
    model = touched(family)
    return cache_for(model, config) if family in PACKABLE else cache_quietly(model, config)
