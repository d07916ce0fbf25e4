"""Shapes of well-known models, as the fields of their published configs that decide memory."""

from typing import Any


def _llama(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }


def _qwen2(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool, context: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151936 if tied else 152064,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
    }


def _gemma3(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, window: int, context: int
) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "sliding_window": window,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "max_position_embeddings": context,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, True, 32768),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, True, 32768),
    "Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, True, 32768),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, False, 131072),
    "Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, False, 131072),
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, False, 131072),
    "Qwen2.5-72B": _qwen2(8192, 29568, 80, 64, 8, False, 131072),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, False),
    "Mistral-7B": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
    },
    "Gemma-3-1B": _gemma3(1152, 6912, 26, 4, 1, 256, 512, 32768),
    "Gemma-3-4B": _gemma3(2560, 10240, 34, 8, 4, 256, 1024, 131072),
    "Gemma-3-12B": _gemma3(3840, 15360, 48, 16, 8, 256, 1024, 131072),
    "Gemma-3-27B": _gemma3(5376, 21504, 62, 32, 16, 128, 1024, 131072),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}

# checkpoints that are not 16-bit: bytes as published
WEIGHT_BYTES = {"gpt-oss-20b": int(12.8 * 2**30), "gpt-oss-120b": int(60.8 * 2**30)}

PAPER_NAME = "KIVI-540B"
PAPER_NOTE = (
    "the example of KIVI's paper, batch 512 and 2048 tokens: it counts 48 key-value heads, where the real 540B "
    "model (PaLM) is multi-query and has one"
)
