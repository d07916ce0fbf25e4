"""Models whose attention or layers are their own: packed where possible, else native or dequantized, and said."""

import warnings
from collections.abc import Callable

import pytest
import torch
from transformers import DeepseekV3Config, FalconConfig, GPTNeoXConfig, PreTrainedConfig, Qwen3NextConfig

from kivi_kv import KiviConfig, KiviWarning, cache_for
from tiny_models import FALCON_ASKS, generate, prompt, random_model, tiny_config

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt_neox": lambda: tiny_config(GPTNeoXConfig),
    "falcon, one kv head": lambda: tiny_config(FalconConfig, new_decoder_architecture=False, multi_query=True),
    "falcon": lambda: tiny_config(FalconConfig, new_decoder_architecture=True, num_kv_heads=2),
    "deepseek_v3": lambda: tiny_config(
        DeepseekV3Config,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=1,
        **EXPERTS,
    ),
    "qwen3_next": lambda: tiny_config(
        Qwen3NextConfig,
        layers=4,  # three of linear attention, one full
        head_dim=32,
        num_experts=4,
        shared_expert_intermediate_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        **EXPERTS,
    ),
}
PACKED = {"gpt_neox": 2, "falcon, one kv head": 2, "falcon": 2, "deepseek_v3": 0, "qwen3_next": 1}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [40, 300])
def test_tokens_and_what_the_cache_says_of_itself(name, length):
    """The tokens of a dense cache, at 8 bits; how each layer was kept is counted and warned of."""
    expected = generate(random_model(CONFIGS[name]()), prompt(length))
    model = random_model(CONFIGS[name]())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        cache = cache_for(model, KiviConfig(8, 8, 32, residual_length=64))
        assert torch.equal(generate(model, prompt(length), cache), expected)
    said = [str(w.message) for w in warned if issubclass(w.category, KiviWarning)]
    stats = cache.stats()
    assert stats["packed_layers"] == PACKED[name]
    assert len(stats["native_layers"]) == model.config.num_hidden_layers - PACKED[name]
    own_code = name.startswith("falcon") and not FALCON_ASKS
    if own_code:
        assert stats["materializations"] > 0
        assert any("dequantized at every step" in text for text in said)
    else:
        assert (stats["materializations"], stats["unattended"]) == (0, 0)
    if name == "deepseek_v3":
        assert any("no layer can be packed: multi-head latent attention" in text for text in said)
    elif not own_code:
        assert not said
        assert stats["pages"] == (2 if length == 300 else 0)
        assert bool(stats["attend_calls"]) == (length == 300)
