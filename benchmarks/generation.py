"""Decode steps of a whole model of the shape of Llama-3.1-8B, with random bf16 weights, on a GPU.

    python benchmarks/generation.py [--rows kivi2:1:32768 identity:1:32768 ...] [--out FILE.csv]
    python benchmarks/generation.py --memory | --prefill [--out FILE.csv]

A row is CACHE:BATCH:TOKENS. kivi2, kivi4, ...: GraphDecoder over that preset, filled with random K and V by its own
quantizer; identity: the same compiled model with attention replaced by the identity; dense: the same with a
preallocated bf16 cache and cuDNN's attention; StaticCache: transformers' own, compiled, in a graph; DynamicCache:
transformers' own, eager. Every row but the last replays one CUDA graph a step. Medians of the steps' times, and the
slowest of 160 steps, which is where pages are packed. Before a packed cache is timed, the logits of its compiled
step are compared with those of the same step not compiled, attended by the portable kernel.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timing import gate, relative_error, write_csv
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from kivi_kv import cache_for
from kivi_kv.integrations.transformers import GraphDecoder, cache_argument

LAYERS, HEADS, D, STEPS, CHUNK = 32, 8, 128, 160, 4096
ROWS = [
    "identity:1:32768", "kivi2:1:32768", "kivi2:1:131072", "kivi2:24:32768", "kivi2:128:32768",
    "dense:1:32768", "dense:30:32768", "StaticCache:1:32768", "StaticCache:24:32768", "DynamicCache:1:32768",
]  # fmt: skip


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=HEADS, head_dim=D, vocab_size=128256, max_position_embeddings=1 << 18,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).eval()


class Attend:
    """What stands in for attention: (q [B, HQ, 1, D], k, v [B, H, 1, D], layer) -> [B, HQ, 1, D]."""

    now: Callable[[Tensor, Tensor, Tensor, int], Tensor]


@torch.library.custom_op("benchmark::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    return Attend.now(q, k, v, layer).contiguous()


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **kwargs: object) -> tuple[Tensor, None]:
    return _attend(q, k, v, module.layer_idx).transpose(1, 2).contiguous(), None


def dense_attention(B: int, T: int) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """Over a preallocated cache of which T tokens are attended; the new token is written at the end of them."""
    k_cache, v_cache = torch.randn(2, LAYERS, B, HEADS, T, D, device="cuda", dtype=torch.bfloat16)
    position = torch.tensor([T - 1], device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k_all, v_all = k_cache[layer], v_cache[layer]
        k_all.index_copy_(2, position, k)
        v_all.index_copy_(2, position, v)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k_all, v_all, enable_gqa=True)

    return attend


def captured(step: Callable[[], None]) -> Callable[[], None]:
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(run: Callable[[], None], steps: int = STEPS) -> list[float]:
    """Milliseconds of each step."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for _ in range(2):
        run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def chunks(B: int, T: int) -> Iterator[tuple[Tensor, Tensor]]:
    n = min(CHUNK, T)
    k, v = torch.randn(2, B, HEADS, n, D, device="cuda", dtype=torch.bfloat16)
    for _ in range(T // n):
        yield k, v


def packed(model: LlamaForCausalLM, preset: str, B: int, T: int, compiled: bool = True) -> GraphDecoder:
    """A decoder whose cache holds T tokens a row."""
    cache = cache_for(model, preset, max_tokens=T + 2 * STEPS)
    for layer in cache.packed_layers:
        for k, v in chunks(B, T):
            layer.update(k, v)
            layer.store(torch.ones(B, k.shape[2], dtype=torch.bool, device="cuda"))
    decoder = GraphDecoder(model, cache, compile=compiled)
    decoder.generate(torch.randint(1000, (B,), device="cuda"), 3)
    if compiled:
        check(model, decoder, f"{preset} {B} {T}")
    return decoder


def check(model: LlamaForCausalLM, decoder: GraphDecoder, name: str) -> None:
    """The same step twice: by other kernels, not compiled; then as it is timed."""
    layers = [layer.cache for layer in decoder.cache.packed_layers if layer.cache]
    before = [(x.storage.lengths.clone(), x.storage.packed.clone()) for x in layers]
    decoder.cache.prepare()
    found = []
    for call, backend in ((model, "triton"), (decoder.model, "gluon")):
        for layer, (lengths, packed) in zip(layers, before, strict=True):
            layer.backends["attend"] = backend
            layer.storage.lengths.copy_(lengths)
            layer.storage.packed.copy_(packed)
        position = before[0][0].long()[:, None]
        options = {"position_ids": position, "use_cache": True, **cache_argument(decoder.cache)}
        found.append(call(input_ids=decoder.newest[:, None], **options).logits[:, -1].float())
    decoder.cache.finish()
    # after 32 layers in bf16 two correct kernels part by 4.3e-2, compiled or not by 5.6e-2; a wrong one by about 1
    gate(name, relative_error(found[1], found[0].double()), 1.5e-1)


def step_of(model: LlamaForCausalLM, B: int, T: int, forward: Callable[..., Any], cache: Any = None) -> Any:
    """A greedy step at position T; without a cache of transformers', attention is Attend.now."""
    ids, position = torch.randint(1000, (B, 1), device="cuda"), torch.full((B, 1), T, device="cuda")
    options = {"use_cache": False} if cache is None else {"use_cache": True, **cache_argument(cache)}

    def step() -> None:
        ids.copy_(forward(input_ids=ids, position_ids=position, **options).logits[:, -1:].argmax(-1))

    return step


@contextmanager
def prepared(model: LlamaForCausalLM, name: str, B: int, T: int, compiled: bool = True) -> Iterator[Any]:
    """A step of the model over a cache of that name."""
    if name == "StaticCache":
        model.set_attn_implementation("sdpa")
        cache = StaticCache(config=model.config, max_cache_len=T + 2 * STEPS)
        for layer in cache.layers:
            for k, v in chunks(B, T):
                layer.update(k, v)
        yield captured(step_of(model, B, T, torch.compile(model.__call__), cache))
    elif name == "DynamicCache":
        model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            for k, v in chunks(B, T):
                layer.update(k, v)
        yield step_of(model, B, T, model, cache)
    elif name in ("identity", "dense"):
        AttentionInterface.register("benchmark", _attention)
        model.set_attn_implementation("benchmark")
        Attend.now = dense_attention(B, T) if name == "dense" else lambda q, k, v, layer: q.clone()
        forward = torch.compile(model.__call__, fullgraph=True) if compiled else model
        yield captured(step_of(model, B, T, forward))
        del Attend.now
    else:
        decoder = packed(model, name, B, T, compiled)
        decoder.cache.prepare()
        yield decoder.graph.replay if decoder.graph else decoder.step
        decoder.cache.finish()


@torch.no_grad()
def measure(model: LlamaForCausalLM, row: str) -> dict[str, Any]:
    name, B, T = row.split(":")[0], *map(int, row.split(":")[1:])
    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    with prepared(model, name, B, T) as run:
        times = timed(run, 20 if name == "DynamicCache" else STEPS)
    ms = sorted(times)[len(times) // 2]
    out = {"cache": name, "batch": B, "tokens": T, "ms": round(ms, 2), "slowest": round(max(times), 2)}
    out |= {"tokens/s": round(1e3 * B / ms), "peak GB": round(torch.cuda.max_memory_allocated() / 1e9, 1)}
    return out | {"set up, s": round(time.perf_counter() - start)}


@torch.no_grad()
def peak(model: LlamaForCausalLM, name: str, B: int, T: int) -> dict[str, Any]:
    """Bytes at most allocated while a step runs, weights included."""
    torch.cuda.reset_peak_memory_stats()
    try:
        with prepared(model, name, B, T, compiled=False) as run:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run()
        value: Any = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    except torch.cuda.OutOfMemoryError:
        value = "does not fit"
    return {"cache": name, "batch": B, "tokens": T, "peak GB": value}


@torch.no_grad()
def prefill(model: LlamaForCausalLM, name: str, T: int, chunk: int) -> dict[str, Any]:
    """Peak bytes while one sequence is read, weights included, whole or in chunks, and the seconds that takes."""
    ids = torch.randint(1000, (1, T), device="cuda")
    if name == "DynamicCache":
        model.set_attn_implementation("sdpa")
        cache: Any = DynamicCache(config=model.config)
    else:
        cache = cache_for(model, name, max_tokens=T + 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for i in range(0, T, chunk):
        model(input_ids=ids[:, i : i + chunk], use_cache=True, logits_to_keep=1, **cache_argument(cache))
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - start, 2)
    gigabytes = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return {"cache": name, "tokens": T, "chunk": chunk, "peak GB": gigabytes, "seconds": seconds}


def largest(model: LlamaForCausalLM, name: str, T: int, low: int, high: int) -> dict[str, Any]:
    """The largest batch between low, which fits, and high, which does not, to 1 in 64."""
    while high - low > max(1, low // 64):
        B = (low + high) // 2
        fits = peak(model, name, B, T)["peak GB"] != "does not fit"
        low, high = (B, high) if fits else (low, B)
        gc.collect()
        torch.cuda.empty_cache()
    return {"cache": name, "batch": low, "tokens": T, "peak GB": "largest batch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--memory", action="store_true", help="peak bytes of dense, kivi4 and kivi2 instead")
    parser.add_argument("--prefill", action="store_true", help="peak bytes of reading a long prompt instead")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # one model serves all rows
    model, rows = llama(), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print("  ".join(f"{value}" for value in row.values()), flush=True)
        write_csv(args.out, rows)
        gc.collect()
        torch.cuda.empty_cache()

    if args.prefill:
        for chunk in (131072, 8192):
            for name in ("DynamicCache", "kivi4", "kivi2"):
                add(prefill(model, name, 131072, chunk))
        return
    if not args.memory:
        for row in args.rows:
            add(measure(model, row))
        return
    for name in ("dense", "kivi4", "kivi2"):
        for T in (4096, 32768, 131072):
            for B in (1, 8, 24, 64, 128):
                add(peak(model, name, B, T))
                if rows[-1]["peak GB"] == "does not fit":
                    break
    for name, low, high in (("kivi2", 128, 192), ("kivi4", 64, 128), ("dense", 24, 40)):
        add(largest(model, name, 32768, low, high))


if __name__ == "__main__":
    main()
