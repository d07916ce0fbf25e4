"""The typer application: one function per command, in files of their own."""

from typing import Annotated

import typer

from .. import __version__
from .evaluate import evaluate
from .generate import generate
from .inspect import inspect
from .plan import plan

app = typer.Typer(
    name="kivi",
    help="2-bit KV caches: plan their memory, generate with them, measure their accuracy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(plan)
app.command()(generate)
app.command("eval")(evaluate)
app.command("inspect")(inspect)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"kivi-kv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
