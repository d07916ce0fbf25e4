"""Every Python block of the README and of docs/ runs, in order, one namespace per file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, source) of each ```python block."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start()) + 2, m.group(1)) for m in found]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(smollm2.parent)  # snippets name the model file without a folder
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, source in blocks(page):
        padded = "\n" * (line - 1) + source  # so that a failure names the page's own line
        exec(compile(padded, str(page), "exec"), namespace)


def test_there_are_blocks_to_run() -> None:
    assert {p.name for p in PAGES if blocks(p)} >= {"README.md", "format.md", "guide.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_are_finished_and_their_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"@[A-Z_]+@|^[A-Z_]+$", text, flags=re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
