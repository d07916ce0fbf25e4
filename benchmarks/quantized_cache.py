"""Evaluate transformers' own QuantizedCache (quanto, hqq) on a model: what it costs, and the bits it really stores.

    python benchmarks/quantized_cache.py MODEL.gguf --name NAME --texts DIR --out FILE.jsonl [--tokens 4096]

Needs optimum-quanto and hqq. Resumable: what FILE.jsonl holds already is not computed again.

A text is fed to the real cache in chunks of its residual length, and to a dense cache in the same chunks. A
QuantizedCache quantizes all of its first call; after that, the whole cache anew, from dequantized values, each time
the residual is full. A call sees its own tokens, and those of the residual, as they are. So feeding chunks gives
the result of a prompt of one chunk, decoded token by token, and the first chunk is scored without any error. A
longer prompt in a single call would be scored so too, whatever its quantized copy is like.

What an axis of a tensor [1, heads, tokens, head_dim] means is up to the backend, here for a head_dim of 64 and
groups of 64. quanto's 0 and hqq's 1 are one token of a head. quanto's -1 is a channel of 64 consecutive tokens.
hqq's 0 is 64 values of one channel, evenly spaced over all heads and tokens: other ones at each flush, so that the
errors of all flushes add up, where groups that stay the same hardly change when quantized again.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache

from kivi_kv.analysis.lab import Records
from kivi_kv.integrations.transformers import load
from kivi_kv.integrations.transformers.compat import cache_argument

CHUNK = 128  # tokens per call, and residual_length
GROUP = 64

CONFIGS: dict[str, dict[str, Any]] = {
    f"{backend} {nbits} bits{suffix}": {"backend": backend, "nbits": nbits, **axes}
    for backend, suffix, axes in (
        ("quanto", "", {}),
        ("quanto", ", keys by channel", {"axis_key": -1}),
        ("hqq", "", {}),
        ("hqq", ", values by token", {"axis_value": 1}),
    )
    for nbits in (4, 2)
}


@torch.no_grad()
def chunk_logits(model: Any, ids: Tensor, cache: Cache) -> Iterator[Tensor]:
    """The logits of every position of ids [1, T], a chunk at a time, in the model's own type."""
    for part in ids.split(CHUNK, dim=1):
        yield model(part, use_cache=True, **cache_argument(cache)).logits[0]


def evaluate(model: Any, ids: Tensor, dense: list[Tensor], cache: Cache) -> dict[str, float]:
    """What cache, an empty one, makes of ids; ratio, kl (nats, of dense from cache) and top1 are to dense."""
    nll, dense_nll, kl, same = [], [], [], []
    for i, (expected, logits) in enumerate(zip(dense, chunk_logits(model, ids, cache), strict=True)):
        target = ids[0, 1 + i * CHUNK :][:CHUNK]
        p, q = (x[: len(target)].float().log_softmax(-1) for x in (expected, logits))
        nll.append(F.nll_loss(q, target, reduction="none"))
        dense_nll.append(F.nll_loss(p, target, reduction="none"))
        kl.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).float())
    perplexity, dense_perplexity = (torch.cat(x).mean().exp().item() for x in (nll, dense_nll))
    return {
        "ratio": perplexity / dense_perplexity,
        "kl": torch.cat(kl).mean().item(),
        "top1": torch.cat(same).mean().item(),
        "perplexity": perplexity,
        "dense_perplexity": dense_perplexity,
    }


def storages(value: Any) -> dict[int, int]:
    """Bytes by address of all memory that value's tensors hold: codes, scales, zeros, of tensor subclasses too."""
    if hasattr(value, "__tensor_flatten__"):  # a tensor subclass
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    elif isinstance(value, dict):
        value = list(value.values())
    return {k: v for x in value for k, v in storages(x).items()} if isinstance(value, list | tuple) else {}


def bits_per_element(cache: Cache) -> float:
    """Of the quantized part of a cache, the residual excluded."""
    states = [x for layer in cache.layers for x in (layer._quantized_keys, layer._quantized_values)]
    elements = sum(cache.layers[0]._dequantize(x).numel() for x in states[:2])  # of a layer
    return 8 * sum(storages(states).values()) / (elements * len(cache.layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--texts", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--pattern", default="*.txt", help="of the folder's files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS), choices=list(CONFIGS), help="only these")
    args = parser.parse_args()

    model, tokenizer = load(args.model, progress=False)
    records = Records(args.out)
    for file in sorted(args.texts.glob(args.pattern)):
        keys = {"model": args.name, "text": file.stem, "tokens": args.tokens}
        missing = [name for name in args.configs if not records.has("ratio", **keys, config=name)]
        if not missing:
            continue
        ids = tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : args.tokens]
        dense = list(chunk_logits(model, ids, DynamicCache()))
        for name in missing:
            start = time.perf_counter()
            cache = QuantizedCache(config=model.config, q_group_size=GROUP, residual_length=CHUNK, **CONFIGS[name])
            scores = evaluate(model, ids, dense, cache)
            records.add(**keys, config=name, bits=bits_per_element(cache), **scores)
            print(f"{time.perf_counter() - start:7.1f} s  {file.stem}  {name}", flush=True)


if __name__ == "__main__":
    main()
