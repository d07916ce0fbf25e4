"""Plain texts as models read them."""

import re
from pathlib import Path


def read_text(path: str | Path) -> str:
    """A text file with one line per paragraph: hard line breaks inside paragraphs become spaces."""
    paragraphs = re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8"))
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
