"""Pictures. Each function takes data and a file name, whose ending chooses the format."""

import math
from collections.abc import Iterable
from pathlib import Path

from .plan import CACHES, cache_bytes, format_bytes
from .report import Row, mean_by_config
from .shape import ModelShape


def plot_memory(shape: ModelShape, batch: int, tokens: int, memory: int | None, file: Path) -> None:
    """Cache memory against context length for every format, up to `tokens` or the model's limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longest = max(tokens, shape.max_tokens or 0)
    contexts = [max(1, longest * step // 64) for step in range(65)]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for cache in CACHES:
        sizes = [cache_bytes(shape, cache, batch, n) / 2**30 for n in contexts]
        (line,) = axes.plot(contexts, sizes, label=cache)
        axes.annotate(
            format_bytes(sizes[-1] * 2**30),
            (contexts[-1], sizes[-1]),
            textcoords="offset points",
            xytext=(4, 0),
            va="center",
            fontsize=8,
            color=line.get_color(),
        )
    if memory is not None:
        free = (memory - (shape.weight_bytes or 0)) / 2**30
        axes.axhline(free, color="gray", linestyle="--", linewidth=1)
        axes.text(0, free, f" free beside the weights: {free:.1f} GiB", va="bottom", fontsize=8, color="gray")
    axes.set(xlabel="context (tokens)", ylabel="cache (GiB)", title=f"{shape.name}, batch {batch}", ylim=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def plot_tradeoff(rows: Iterable[Row], file: Path, title: str = "") -> None:
    """Bits per element against the perplexity gap to dense, one point per config, the frontier joined."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # a gap below a ten-thousandth is rounding, and a logarithmic axis has no place for it
    points = sorted((r["bits"], max(r["ratio"] - 1, 1e-4), r["config"]) for r in mean_by_config(rows))
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    frontier: list[tuple[float, float]] = []
    best = []
    for bits, gap, config in points:
        if not frontier or gap < frontier[-1][1]:
            frontier.append((bits, gap))
            best.append(config)
    labels: list[tuple[float, float]] = []
    # the frontier is labelled first, other points where there is room
    for bits, gap, config in sorted(points, key=lambda p: p[2] not in best):
        on = config in best
        axes.plot(bits, gap, "o", color="tab:red" if on else "gray", markersize=5 if on else 4)
        crowded = any(abs(bits - x) < 1 and abs(math.log(gap / y)) < 0.11 for x, y in labels)
        if on or not crowded:
            labels.append((bits, gap))
            color = "black" if on else "gray"
            axes.annotate(config, (bits, gap), textcoords="offset points", xytext=(5, 2), fontsize=7, color=color)
    axes.step(*zip(*frontier, strict=True), where="post", color="tab:red", linewidth=1)
    axes.set(yscale="log", xlabel="bits per element", ylabel="perplexity / dense - 1", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
