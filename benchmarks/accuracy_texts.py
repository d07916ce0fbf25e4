"""Make the six texts of docs/accuracy.md: novels, technical prose and code, to choose on and to report on.

    python benchmarks/accuracy_texts.py --novels FOLDER --handbook FOLDER --out FOLDER

FOLDER of the novels holds persuasion.txt and emma.txt (as in Debian's r-cran-janeaustenr); that of the handbook the
English HTML of Debian's debian-handbook (usr/share/doc/debian-handbook/html/en-US), which is read page by page from
index.html, its paragraphs only. The code is this Python's own.
"""

import argparse
import html
import inspect
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

from kivi_kv.analysis.texts import read_text

CHARACTERS = 160_000  # of each text: more than 24,576 tokens


def handbook(folder: Path) -> str:
    """Every paragraph of the book, in order."""
    paragraphs = []
    page: str | None = "index.html"
    seen = set()
    while page and page not in seen:
        seen.add(page)
        source = (folder / page).read_text(encoding="utf-8")
        for paragraph in re.findall(r'<div class="para">(.*?)</div>', source, flags=re.DOTALL):
            paragraphs.append(" ".join(html.unescape(re.sub(r"<[^>]+>", "", paragraph)).split()))
        following = re.search(r'<link rel="next" href="([^"]+)"', source)
        page = following and following.group(1)
    return "\n\n".join(paragraphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True)
    parser.add_argument("--handbook", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prose = handbook(args.handbook)
    texts = {
        "choose-novel": read_text(args.novels / "persuasion.txt"),
        "report-novel": read_text(args.novels / "emma.txt"),
        "choose-prose": prose[: len(prose) // 2],
        "report-prose": prose[len(prose) // 2 :],
        "choose-code": "\n\n".join(inspect.getsource(module) for module in (argparse, subprocess)),
        "report-code": "\n\n".join(inspect.getsource(module) for module in (tarfile, zipfile)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (args.out / f"{name}.txt").write_text(text[:CHARACTERS], encoding="utf-8")


if __name__ == "__main__":
    main()
