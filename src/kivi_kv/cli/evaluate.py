"""`kivi eval`: what a cache costs a model in accuracy."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import check_model_path, device_or_default, err, offline_and_quiet, one_line_errors, out


@one_line_errors
def evaluate(
    model: Annotated[str, typer.Argument(help="A model directory or a GGUF file.")],
    text: Annotated[list[Path], typer.Option(help="A text file; may be given several times.")],
    config: Annotated[
        list[str] | None,
        typer.Option(help="A config of the catalog; may be given several times. [default: kivi2 and kivi4]"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=2)] = 4096,
    passkey: Annotated[
        list[int] | None, typer.Option(help="Also hide keys in prompts of this length; may be repeated.")
    ] = None,
    passkey_seeds: Annotated[int, typer.Option(help="Keys at each of five depths.", min=1)] = 4,
    real: Annotated[
        bool, typer.Option("--real", help="Also feed the text through real caches, where they exist.")
    ] = False,
    all_configs: Annotated[bool, typer.Option("--all", help="Every config of the catalog.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for results.jsonl, report.md and tradeoff.png.")] = Path(
        "kivi-eval"
    ),
    device: Annotated[str | None, typer.Option(help="cpu, cuda ...  [default: cuda if there is one]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Compare simulated caches with the dense one: perplexity, KL divergence, top-1 agreement, passkey retrieval.

    One forward pass per config and text, with the semantics of decoding token by token. Stops and resumes at any
    point: what results.jsonl holds is not computed again.

    Example: kivi eval model.gguf --text novel.txt --config kivi2 --config "sinks 32 + K4 V2" --passkey 2048
    """
    offline_and_quiet()
    check_model_path(model)
    missing = [str(file) for file in text if not file.is_file()]
    if missing:
        raise ValueError(f"--text: expected text files, got {', '.join(missing)}")
    if len({file.stem for file in text}) < len(text):
        raise ValueError(f"--text: expected files of different names, got {', '.join(map(str, text))}")

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..analysis.catalog import catalog
    from ..analysis.lab import Records, run_passkey, run_real, run_texts, shape_of
    from ..analysis.shape import local_name
    from ..analysis.texts import read_text
    from ..integrations.transformers import load

    with err.status(f"loading {Path(model).name}"):
        loaded, tokenizer = load(model, device=device_or_default(device), progress=False)
    known = catalog(shape_of(loaded)[0])
    names = list(known) if all_configs else config or ["kivi2", "kivi4"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--config: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    configs = {name: known[name] for name in names}
    texts = {file.stem: read_text(file) for file in text}
    results.mkdir(parents=True, exist_ok=True)
    records = Records(results / "results.jsonl")
    lengths = tuple(passkey or ())

    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")]
    with Progress(*columns, TimeElapsedColumn(), console=err, disable=not err.is_terminal) as progress:
        name = local_name(Path(model))
        task = progress.add_task("texts", total=len(texts) * len(configs))
        run_texts(loaded, tokenizer, name, texts, configs, tokens, records, lambda _: progress.advance(task))
        if real:
            task1 = progress.add_task("real caches", total=len(texts) * sum(c.is_real for c in configs.values()))
            run_real(loaded, tokenizer, name, texts, configs, tokens, records, lambda _: progress.advance(task1))
        if lengths:
            few: dict[str, Any] = {"dense": None, **configs}
            task2 = progress.add_task("passkey", total=len(lengths) * len(few))
            filler = next(iter(texts.values()))

            def passed(_: str) -> None:
                progress.advance(task2)

            run_passkey(loaded, tokenizer, name, filler, few, lengths, records, passed, passkey_seeds)
    report = _write_report(results, records.rows)
    if as_json:
        out.print_json(json.dumps(records.rows))
    else:
        from rich.markdown import Markdown

        out.print(Markdown(report))
        err.print(f"[dim]{results}/: results.jsonl, report.md, tradeoff.png[/dim]")


def _write_report(folder: Path, rows: list[dict[str, Any]]) -> str:
    from ..analysis.plots import plot_tradeoff
    from ..analysis.report import accuracy_table, distance_table, passkey_table, real_table

    parts = []
    for model, tokens in sorted({(r["model"], r["tokens"]) for r in rows if "ratio" in r}):
        mine = [r for r in rows if r["model"] == model and r.get("tokens") == tokens]
        parts.append(f"## {model}, {tokens} tokens\n\n{accuracy_table(mine)}")
        parts.append(f"### By tokens behind the query\n\n{distance_table(mine)}")
        plot_tradeoff(mine, folder / "tradeoff.png", f"{model}, {tokens} tokens")
    if any(r.get("real") for r in rows):
        parts.append(f"## Through real caches\n\n{real_table(rows)}")
    if any("passkey" in r for r in rows):
        parts.append(f"## Passkey\n\n{passkey_table(rows)}")
    report = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(report, encoding="utf-8")
    return report
