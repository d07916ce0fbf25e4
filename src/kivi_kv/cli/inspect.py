"""`kivi inspect`: what is in a model's KV cache, and how to group it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .common import check_model_path, device_or_default, err, offline_and_quiet, one_line_errors, out

if TYPE_CHECKING:
    from ..analysis.inspection import ModelReport

FEWEST_TOKENS = 64


@one_line_errors
def inspect(
    model: Annotated[str, typer.Argument(help="A model directory or a GGUF file.")],
    text: Annotated[Path, typer.Option(help="A text file for the model to read.")],
    tokens: Annotated[int, typer.Option(help="At most this many tokens of it.", min=FEWEST_TOKENS)] = 1024,
    folder: Annotated[
        Path, typer.Option("--out", help="Folder for report.html, overview.png and report.json.")
    ] = Path("kivi-inspect"),
    device: Annotated[str | None, typer.Option(help="cpu, cuda ...  [default: cuda if there is one]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json.")] = False,
) -> None:
    """Look into a model's KV cache: outlier channels, the cost of each grouping, a config that follows from them.

    Writes a report with maps of K and V in every full-attention layer.

    Example: kivi inspect model.gguf --text novel.txt --tokens 2048 --out my-report
    """
    offline_and_quiet()
    check_model_path(model)
    if not text.is_file():
        raise ValueError(f"--text: expected a text file, got {str(text)!r}")

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..analysis.html_report import write_html
    from ..analysis.inspection import inspect_model
    from ..analysis.inspection_plots import plot_overview
    from ..analysis.shape import local_name
    from ..analysis.texts import read_text
    from ..integrations.transformers import load

    with err.status(f"loading {Path(model).name}"):
        loaded, tokenizer = load(model, device=device_or_default(device), progress=False)
    ids = _ids(loaded, tokenizer, read_text(text), tokens)
    folder.mkdir(parents=True, exist_ok=True)
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")]
    with Progress(*columns, TimeElapsedColumn(), console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task("layers", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        report = inspect_model(loaded, ids, local_name(Path(model)), text.stem, show)
    fields = json.dumps(report.asdict(), indent=2)
    (folder / "report.json").write_text(fields + "\n", encoding="utf-8")
    write_html(report, folder / "report.html")
    plot_overview(report, folder / "overview.png")
    if as_json:
        out.print_json(fields)
    else:
        _print(report)
        err.print(f"[dim]{folder}/: report.html, overview.png, report.json[/dim]", highlight=False)


def _ids(model: Any, tokenizer: Any, text: str, tokens: int) -> Any:
    """Token ids [1, T] of the text, checked against the model's limit."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
    if tokens > limit:
        raise ValueError(f"--tokens: expected at most {limit}, the model's limit, got {tokens}")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < FEWEST_TOKENS:
        raise ValueError(f"--text: expected at least {FEWEST_TOKENS} tokens, got {ids.shape[1]}")
    return ids.to(model.device)


def _print(report: "ModelReport") -> None:
    from ..analysis.html_report import config_code, explain
    from ..analysis.inspection import BITS, SINKS
    from ..ops.simulate import AXES

    title = f"{report.model}, {report.tokens:,} tokens: median of {len(report.layers)} layers"
    table = Table(title=escape(title))
    table.add_column("grouping", no_wrap=True)
    measures = {"error": "error", "output_error": "output error", "sinks_error": f"first {SINKS} exact"}
    for title in measures.values():
        for bits in BITS:
            table.add_column(f"{title}\n{bits} bits", justify="right")
    for side in ("k", "v"):
        for axis in AXES:
            cells = [f"{report.median(side, measure, bits, axis):.4f}" for measure in measures for bits in BITS]
            table.add_row(f"{side.upper()} per {axis}", *cells, end_section=axis == AXES[-1])
    out.print(table)
    out.print(explain(report), highlight=False)
    sensitive = ", ".join(map(str, report.sensitive_layers)) or "none"
    out.print(f"sensitive layers: {sensitive}", highlight=False)
    out.print(f"[bold]{config_code(report.recommended)}[/bold]", highlight=False)
