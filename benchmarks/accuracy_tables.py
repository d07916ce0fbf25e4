"""Make the tables and the picture of docs/accuracy.md from recorded results.

python benchmarks/accuracy_tables.py docs/data [--picture docs/accuracy.png]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kivi_kv.analysis.plots import plot_tradeoff
from kivi_kv.analysis.report import accuracy_table, distance_table, passkey_table


def read(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path, help="draw bits against gap, all models averaged, into this file")
    args = parser.parse_args()
    rows = read(args.folder)
    reporting = [r for r in rows if r.get("text", "").startswith("report-")]
    for model, tokens in sorted({(r["model"], r["tokens"]) for r in reporting}):
        mine = [r for r in reporting if (r["model"], r["tokens"]) == (model, tokens)]
        print(f"### {model}, {tokens:,} tokens\n\n{accuracy_table(mine)}\n")
        if any("distances" in r for r in mine):
            print(f"#### By tokens behind the query\n\n{distance_table(mine)}\n")
    for model in sorted({r["model"] for r in rows if "passkey" in r}):
        mine = [r for r in rows if r["model"] == model]
        print(f"### Passkey: {model}\n\n{passkey_table(mine)}\n")
    if args.picture:
        short = [r for r in reporting if r["tokens"] == 4096]
        plot_tradeoff(short, args.picture, "mean over three models and three texts, 4,096 tokens")


if __name__ == "__main__":
    main()
