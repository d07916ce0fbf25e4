"""Tables of evaluation records, in Markdown."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

Row = Mapping[str, Any]


def mean_by_config(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row per config over all texts given: bits, and the means of log ratio (as ratio), kl and top1.

    Sorted by ratio, best first. Rows of passkey runs are ignored.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "ratio" in row:
            groups[row["config"]].append(row)
    means = []
    for config, group in groups.items():
        n = len(group)
        means.append(
            {
                "config": config,
                "bits": sum(r["bits"] for r in group) / n,
                "ratio": math.exp(sum(math.log(r["ratio"]) for r in group) / n),
                "kl": sum(r["kl"] for r in group) / n,
                "top1": sum(r["top1"] for r in group) / n,
                "texts": n,
            }
        )
    return sorted(means, key=lambda r: r["ratio"])


def accuracy_table(rows: Iterable[Row]) -> str:
    """Configs ranked by perplexity, averaged over the texts of the rows. removed: share of kivi2's gap to dense."""
    means = mean_by_config(rows)
    worst = next((math.log(r["ratio"]) for r in means if r["config"] == "kivi2"), None)
    lines = [
        "| config | bits/element | perplexity / dense | of kivi2's gap removed | KL (nats) | top-1 agreement |",
        "|---|---|---|---|---|---|",
    ]
    for r in means:
        removed = "" if not worst else f"{1 - math.log(r['ratio']) / worst:.0%}"
        lines.append(
            f"| {r['config']} | {r['bits']:.2f} | {r['ratio']:.4f} | {removed} | {r['kl']:.4f} | {r['top1']:.3f} |"
        )
    return "\n".join(lines)


def distance_table(rows: Iterable[Row]) -> str:
    """KL and top-1 agreement by the tokens behind a query, averaged over the texts of the rows: of one length."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "distances" in row:
            groups[row["config"]].append(row)
    lows = next(iter(groups.values()))[0]["distances"] if groups else []
    names = [f"{low:,} to {high - 1:,}" for low, high in pairwise(lows)] + [
        f"{low:,} and more" for low in lows[-1:]
    ]
    lines = ["| config: KL (top-1) | " + " | ".join(names) + " |", "|---" * (len(lows) + 1) + "|"]
    for config, group in groups.items():
        kl, top1 = (
            [sum(values) / len(group) for values in zip(*(row[field] for row in group), strict=True)]
            for field in ("kl_by_distance", "top1_by_distance")
        )
        cells = [f"{a:.4f} ({b:.3f})" for a, b in zip(kl, top1, strict=True)]
        lines.append(f"| {config} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def real_table(rows: Iterable[Row]) -> str:
    """What real caches gave, by text: perplexity over dense, top-1 agreement, bytes allocated."""
    lines = ["| config | text | perplexity / dense | top-1 agreement | MiB |", "|---|---|---|---|---|"]
    for r in rows:
        if r.get("real"):
            measured = f"{r['real_ratio']:.4f} | {r['real_top1']:.3f} | {r['nbytes'] / 2**20:.1f}"
            lines.append(f"| {r['config']} | {r['text']} | {measured} |")
    return "\n".join(lines)


def passkey_table(rows: Iterable[Row]) -> str:
    """Keys found, of those hidden, by config (rows) and prompt length (columns)."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for row in rows:
        if "passkey" in row:
            found[row["config"]][row["passkey"]] = f"{sum(row['found'])}/{len(row['found'])}"
    lengths = sorted({n for by_length in found.values() for n in by_length})
    lines = ["| config | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    lines += [f"| {c} | " + " | ".join(by.get(n, "") for n in lengths) + " |" for c, by in found.items()]
    return "\n".join(lines)
