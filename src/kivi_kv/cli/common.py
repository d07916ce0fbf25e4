"""What the commands share: consoles, errors, quiet libraries."""

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a user can get wrong into one line on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError, ImportError) as error:
            err.print(f"[red]error:[/red] {' '.join(str(error).split())}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None

    return run


def check_model_path(model: str) -> None:
    """Refuse a path at which there is nothing."""
    if not Path(model).exists():
        raise ValueError(f"MODEL: expected a model directory or a GGUF file, got {model!r}, which is not there")


def device_or_default(device: str | None) -> str:
    """The device asked for, else a GPU if there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def offline_and_quiet() -> None:
    """Keep Hugging Face libraries off the network and off the screen. Call before importing them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
