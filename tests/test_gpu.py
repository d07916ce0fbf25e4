"""The same code on a CUDA device: same bytes, same attention, same tokens."""

import pytest
import torch

from kivi_kv import KiviConfig, LayerCache, cache_for, quantize_k, quantize_v, reference
from kivi_kv.format import from_pages
from kivi_kv.integrations.transformers import cache_argument
from oracle import assert_bitwise_equal
from tiny_models import make_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("D", [64, 80, 128])
def test_codes_equal_those_of_the_cpu(dtype: torch.dtype, bits: int, D: int) -> None:
    k = torch.randn(2, 3, 1024, D).to(dtype)
    k[..., 3] += 300
    k[..., 4] = 7.0
    for quantize in (quantize_k, quantize_v):
        cpu, gpu = quantize(k, bits, 32), quantize(k.cuda(), bits, 32)
        for name in ("code", "scale", "zero"):
            assert_bitwise_equal(getattr(gpu, name).cpu(), getattr(cpu, name))


@pytest.mark.parametrize("config", [KiviConfig(), KiviConfig(4, 2, 64, residual_length=40, sink_length=5)])
def test_a_layer_stores_the_same_bytes_and_attends_them(config: KiviConfig) -> None:
    B, H, HQ, T, D = 2, 2, 8, 3000, 128
    k, v = torch.randn(2, B, H, T, D).half()
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[1, :700] = False
    layers = {}
    for device in ("cpu", "cuda"):
        layer = LayerCache(config, B, H, D, torch.float16, device)
        for start in range(0, T, 977):
            part = slice(start, start + 977)
            layer.append(k[:, :, part].to(device), v[:, :, part].to(device), valid[:, part].to(device))
        layers[device] = layer
    for name, x in layers["cuda"].storage.tensors().items():
        assert_bitwise_equal(x.cpu(), layers["cpu"].storage.tensors()[name])
    q = torch.randn(B, HQ, 1, D).half()
    new_k, new_v = torch.randn(2, B, H, 1, D).half()
    out = layers["cuda"].step(q.cuda(), new_k.cuda(), new_v.cuda()).cpu()
    dense_k, dense_v = (x.cpu() for x in layers["cuda"].dequantize())
    for row, length in enumerate(layers["cuda"].lengths):
        rows = slice(row, row + 1)
        expected = reference.attend(q[rows], dense_k[rows, :, :length], dense_v[rows, :, :length], D**-0.5)
        # fp32 arithmetic (tf32 is off by default) and one fp16 rounding of the output
        assert (out[rows] - expected).norm() / expected.norm() < 1e-3


def test_offsets_beyond_two_billion_elements() -> None:
    """A pool of more than 2^31 words: the far end holds what was put there."""
    B, H, T, D = 16, 32, 65536, 128
    layer = LayerCache(KiviConfig(8, 8), B, H, D, torch.float16, "cuda", max_tokens=T)
    assert layer.storage.pool.numel() > 2**31
    k, v = torch.randn(2, B, H, T // 8, D, device="cuda").half()
    for start in range(0, T, T // 8):
        layer.append(k + start / T, v)
    packed = layer.packed[0]
    page = layer.storage.table[B - 1, packed - 1 : packed]
    last = layer.storage.pool[page.long()]
    tokens = slice((packed - 1) * 128 % (T // 8), (packed - 1) * 128 % (T // 8) + 128)
    expected = quantize_k((k + 7 / 8)[B - 1 :, :, tokens], 8, 32)
    assert_bitwise_equal(from_pages(last[None], layer.storage.layout)[0].code, expected.code)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_generation_gives_the_tokens_of_the_cpu(family: str) -> None:
    model = make_model(family)
    ids = torch.randint(3, model.config.vocab_size, (2, 400))
    config = KiviConfig(residual_length=32)
    tokens = []
    for device in ("cpu", "cuda"):
        model.to(device)
        cache = cache_for(model, config)
        mask = torch.ones_like(ids, device=device)
        mask[1, :100] = 0
        made = model.generate(
            ids.to(device), attention_mask=mask, max_new_tokens=24, do_sample=False, **cache_argument(cache)
        )
        tokens.append(made.cpu())
        assert cache.stats()["materializations"] == 0
    assert_bitwise_equal(tokens[0], tokens[1])
