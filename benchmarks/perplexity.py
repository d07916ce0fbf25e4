"""Perplexity of a real model through real caches, on any device: the same command on a CPU and on a GPU must agree.

    python benchmarks/perplexity.py --model FILE.gguf --text FILE [--tokens 2048] [--device cuda] [--out FILE.csv]

The text is fed in chunks that change nothing, the last tokens one at a time, so every kernel takes part. In fp16,
whose rounding moves the result less than that of bf16.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from timing import write_csv
from torch import Tensor
from transformers import DynamicCache

from kivi_kv import KiviConfig, cache_for
from kivi_kv.analysis import read_text
from kivi_kv.analysis.fidelity import decode_chunks
from kivi_kv.integrations.transformers import cache_argument, load


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, cache: Any, config: KiviConfig | None, singly: int) -> float:
    """Of tokens 1 .. T - 1 of ids [1, T]."""
    tokens = ids.shape[1]
    parts = [x for x in decode_chunks(tokens - singly, config) if x[0] < x[1]]
    total = 0.0
    for start, stop in [*parts, *((i, i + 1) for i in range(tokens - singly, tokens))]:
        logits = model(ids[:, start:stop], use_cache=True, **cache_argument(cache)).logits[0].float()
        target = ids[0, start + 1 : stop + 1]
        total += torch.nn.functional.cross_entropy(logits[: len(target)], target, reduction="sum").item()
    return math.exp(total / (tokens - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a model directory")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--singly", type=int, default=512, help="tokens at the end that are fed one at a time")
    parser.add_argument("--presets", nargs="*", default=["kivi4", "kivi2", "balanced"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    args = parser.parse_args()
    model, tokenizer = load(args.model, torch.float16, args.device, progress=False)
    ids = tokenizer(read_text(args.text), return_tensors="pt").input_ids[:, : args.tokens].to(args.device)
    rows: list[dict[str, Any]] = []
    for name in ("dense", *args.presets):
        config = None if name == "dense" else KiviConfig.preset(name)
        # room for all tokens, so that single ones are counted where the model runs
        cache = DynamicCache(config=model.config) if config is None else cache_for(model, config, args.tokens)
        value = perplexity(model, ids, cache, config, args.singly)
        rows.append({"model": args.model.stem, "device": args.device, "tokens": args.tokens, "cache": name})
        rows[-1] |= {"perplexity": round(value, 4)}
        if config is not None:
            rows[-1] |= {"attended by": " ".join(f"{by}:{n}" for by, n in cache.stats()["attend_calls"].items())}
        print("  ".join(f"{x}" for x in rows[-1].values()), flush=True)
    write_csv(args.out, rows)


if __name__ == "__main__":
    main()
