"""Load a model and its tokenizer from a directory or a GGUF file, without a network."""

from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(
    path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", progress: bool = True
) -> tuple[Any, Any]:
    """(model, tokenizer) from a local model directory or a .gguf file.

    progress shows transformers' own bars. Raises ValueError when there is neither.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif (path / "config.json").is_file():
        where = {"pretrained_model_name_or_path": str(path)}
    else:
        raise ValueError(f"path: expected a .gguf file or a directory with config.json, got {path}")
    # the GGUF reader's bar knows no switch
    with nullcontext() if progress else redirect_stderr(StringIO()):
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(**where, local_files_only=True)
    return model.to(device).eval(), tokenizer
