"""`kivi plan`: memory before anything is loaded."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..analysis.plan import Plan, format_bytes, make_plan, parse_bytes
from ..analysis.shape import ModelShape
from .common import offline_and_quiet, one_line_errors, out


@one_line_errors
def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, a model directory, a GGUF file or a name such as Llama-3.1-8B.")
    ],
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory for weights and cache together, such as 24GiB.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    tokens: Annotated[int | None, typer.Option(help="Tokens per sequence.  [default: the model's limit]")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Size of the weights, if they are not 16-bit, such as 5GiB.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory against context into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how much memory a model's KV cache takes in each format, and what fits.

    Example: kivi plan Llama-3.1-8B --gpu-memory 24GiB --batch 8 --tokens 32768
    """
    offline_and_quiet()
    memory = _size("gpu-memory", gpu_memory)
    shape = ModelShape.find(model)
    if weights is not None:
        shape = ModelShape(shape.name, shape.groups, shape.max_tokens, _size("weights", weights), shape.note)
    tokens = tokens or shape.max_tokens or 2048
    plans = make_plan(shape, batch, tokens, memory)
    if plot is not None:
        from ..analysis.plots import plot_memory

        plot_memory(shape, batch, tokens, memory, plot)
    if as_json:
        out.print_json(json.dumps(_json(shape, batch, tokens, memory, plans)))
        return
    _print(shape, batch, tokens, memory, plans)
    if plot is not None:
        out.print(f"plot: {plot}")


def _size(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"--{option}: {error}") from None


def _layers(shape: ModelShape) -> list[str]:
    lines = []
    for g in shape.groups:
        what = "packed" if g.reason is None else f"native: {g.reason}"
        window = f", window {g.window}" if g.window else ", constant state, not counted" if g.window == 0 else ""
        lines.append(f"{g.count} layers of {g.kv_heads} kv heads x {g.head_dim}{window}: {what}")
    return lines


def _print(shape: ModelShape, batch: int, tokens: int, memory: int | None, plans: list[Plan]) -> None:
    out.print(f"[bold]{shape.name}[/bold], batch {batch}, {tokens:,} tokens", highlight=False)
    for line in _layers(shape):
        out.print(f"  {line}", highlight=False)
    if shape.weight_bytes:
        out.print(f"  weights {format_bytes(shape.weight_bytes)}", highlight=False)
    if shape.note:
        out.print(f"  note: {shape.note}", highlight=False)
    table = Table()
    headings = ["cache", "bytes", "bits/element", "of fp16"]
    if memory is not None:
        headings += [f"longest context (batch {batch})", f"largest batch ({tokens:,} tokens)"]
    for heading in headings:
        name = heading == "cache"
        table.add_column(heading, justify="left" if name else "right", no_wrap=name)
    for p in plans:
        row = [
            p.cache,
            format_bytes(p.cache_bytes),
            f"{p.bits_per_element:.2f}",
            f"{p.cache_bytes / plans[0].cache_bytes:.1%}",
        ]
        if p.longest_context is not None:
            row += [_context(p.longest_context, shape.max_tokens), f"{p.largest_batch:,}"]
        table.add_row(*row)
    out.print(table)
    if any(p.longest_context == shape.max_tokens for p in plans):
        out.print("[dim](max): the model's own limit.[/dim]")
    out.print(
        "[dim]kivi caches count everything they allocate: codes, scales, zeros, the full-precision residual.[/dim]"
    )


def _context(tokens: int, limit: int | None) -> str:
    return f"{tokens:,} (max)" if tokens == limit else f"{tokens:,}"


def _json(shape: ModelShape, batch: int, tokens: int, memory: int | None, plans: list[Plan]) -> dict[str, object]:
    return {
        "model": asdict(shape),
        "batch": batch,
        "tokens": tokens,
        "gpu_memory": memory,
        "caches": [asdict(p) for p in plans],
    }
