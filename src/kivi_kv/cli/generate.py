"""`kivi generate`: complete a text or chat, streaming, with a packed cache."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import PRESETS, KiviConfig
from .common import check_model_path, err, offline_and_quiet, one_line_errors, out


@one_line_errors
def generate(
    model: Annotated[str, typer.Argument(help="A model directory or a GGUF file.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to complete; - reads standard input. Without it: a chat.")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Cache format: {', '.join(PRESETS)}.")] = "balanced",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    compare: Annotated[bool, typer.Option(help="Run the dense cache beside it; mark where they part.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda ...  [default: cuda if there is one]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; needs --prompt.")] = False,
) -> None:
    """Complete a text, or chat, with a local model and a packed cache.

    Example: kivi generate SmolLM2-135M-Instruct.Q4_1.gguf --prompt "Once upon a time" --compare
    """
    offline_and_quiet()
    config = KiviConfig.preset(preset)
    if as_json and prompt is None:
        raise ValueError("--json: expected a --prompt beside it, got none")
    if compare and temperature:
        raise ValueError(f"--compare: expected --temperature 0, since sampling parts by itself, got {temperature}")
    if compare and prompt is None:
        raise ValueError("--compare: expected a --prompt beside it, got none")
    text = sys.stdin.read() if prompt == "-" else prompt
    if text is not None and not text.strip():
        raise ValueError("--prompt: expected some text, got none")
    check_model_path(model)

    from .session import Session

    with err.status(f"loading {Path(model).name}"):
        session = Session.open(model, config, max_new_tokens, temperature, seed, device)
    if text is None:
        _chat(session)
        return
    ids = session.encode(text)
    packed = session.run(ids, packed=True, stream=not as_json and not compare)
    dense = session.run(ids, packed=False, stream=False) if compare else None
    if as_json:
        result = {"prompt_tokens": ids.shape[1], preset: packed.report()}
        if dense is not None:
            result |= {"dense": dense.report(), "part_at": packed.parts_from(dense)}
        out.print_json(json.dumps(result))
        return
    if dense is not None:
        _print_comparison(session, preset, packed, dense)
    else:
        _print_footer(preset, packed)


def _chat(session: Any) -> None:
    if session.tokenizer.chat_template is None:
        raise ValueError("MODEL: expected a chat template for a chat, got none; give --prompt to complete a text")
    err.print("[dim]Chat. An empty line or Ctrl-D ends it.[/dim]")
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            said = ""
        if not said:
            return
        result = session.say(said)
        _print_footer(session.name, result)


def _print_footer(name: str, result: Any) -> None:
    r = result.report()
    err.print(
        f"[dim]{name}: {r['tokens']} tokens at {r['tokens_per_second']:.1f}/s, {r['cached_tokens']} cached in "
        f"{r['cache_bytes'] / 2**20:.1f} MiB (dense: {r['dense_bytes'] / 2**20:.1f} MiB)[/dim]",
        highlight=False,
    )


def _print_comparison(session: Any, preset: str, packed: Any, dense: Any) -> None:
    part = packed.parts_from(dense)
    same = session.tokenizer.decode(packed.tokens[:part], skip_special_tokens=True)
    for name, result in (("dense", dense), (preset, packed)):
        rest = session.tokenizer.decode(result.tokens[part:], skip_special_tokens=True)
        out.print(f"[bold]{name}[/bold]", highlight=False)
        out.print(same, end="", markup=False, highlight=False, soft_wrap=True)
        out.print(rest, style="reverse", markup=False, highlight=False, soft_wrap=True)
        out.print()
    where = f"after {part} tokens" if part < len(packed.tokens) or part < len(dense.tokens) else "nowhere"
    out.print(f"they part {where}", highlight=False)
    for name, result in (("dense", dense), (preset, packed)):
        _print_footer(name, result)
