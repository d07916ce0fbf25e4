"""Pictures. Each function takes data and a file name, whose ending chooses the format."""

from pathlib import Path

from .plan import CACHES, cache_bytes, format_bytes
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
