"""Pictures of a ModelReport: one overview as a file, and what the HTML report has inside."""

import base64
import math
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor

from ..ops.simulate import AXES
from .inspection import LayerReport, ModelReport

MOST_LAYERS = 6
COLORMAP = "magma_r"  # light for small values, as the page is
SERIES = (  # what the chart over the layers shows: side, axis, colour, dash pattern
    ("k", "token", "#7aa6d6", "5 4"),
    ("k", "channel", "#1f5fa8", ""),
    ("v", "channel", "#e5a667", "5 4"),
    ("v", "token", "#c2570c", ""),
)


def plot_overview(report: ModelReport, file: Path) -> None:
    """Maps of K and V for up to six layers, and what each grouping costs the attention output."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = spread(report.layers, MOST_LAYERS)
    figure = plt.figure(figsize=(13, 8.2), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.75, 1])
    maps, charts = parts
    grid = maps.subplots(2, len(shown), squeeze=False)
    for column, layer in enumerate(shown):
        for axes, name, x in ((grid[0, column], "K", layer.k), (grid[1, column], "V", layer.v)):
            extent = (0, x.map.shape[1], report.tokens, 0)
            axes.imshow(x.map.numpy(), cmap=COLORMAP, vmin=0, aspect="auto", extent=extent)
            axes.set_title(f"{name}, layer {layer.index}: {x.outlier_ratio:.1f}×", fontsize=10)
            axes.tick_params(labelsize=8)
            if column:
                axes.set_yticklabels([])
            else:
                axes.set_ylabel("token", fontsize=9)
        grid[1, column].set_xlabel("channel", fontsize=9)
    maps.suptitle(
        f"{report.model}: |K| and |V| of one head, dark for large; the largest channel as a multiple of the median",
        fontsize=12,
        parse_math=False,
    )
    charts.suptitle("Relative error of the attention output, median layer", fontsize=12)
    panels = charts.subplots(1, 2, sharey=True)
    for axes, side in zip(panels, ("k", "v"), strict=True):
        for offset, bits, color in ((-0.19, 2, "#c2570c"), (0.19, 4, "#1f5fa8")):
            heights = [max(report.median(side, "output_error", bits, axis), 1e-6) for axis in AXES]
            places = [place + offset for place in range(len(AXES))]
            bars = axes.bar(places, heights, width=0.36, color=color, label=f"{bits} bits")
            axes.bar_label(bars, fmt="%.2g", fontsize=9, padding=2)
        axes.set(yscale="log", title=f"only {side.upper()} quantized")
        axes.set_xticks(range(len(AXES)), [f"per {axis}" for axis in AXES])
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    panels[0].set_ylabel("|o' - o|² / |o|²")
    panels[1].legend(frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def spread(layers: list[LayerReport], most: int) -> list[LayerReport]:
    """At most that many of the layers, the first and the last among them, evenly apart."""
    if len(layers) <= most:
        return layers
    return [layers[round(place * (len(layers) - 1) / (most - 1))] for place in range(most)]


def svg_lines(report: ModelReport) -> str:
    """The output errors of SERIES as lines over the layers, in SVG."""
    width, height, left, right, top, bottom = 900, 330, 56, 120, 12, 34
    logs = {
        (side, axis): [math.log10(max(getattr(x, side).output_error[2][axis], 1e-6)) for x in report.layers]
        for side, axis, _, _ in SERIES
    }
    low = math.floor(min(map(min, logs.values())))
    high = max(math.ceil(max(map(max, logs.values()))), low + 1)
    step = (width - left - right) / max(len(report.layers) - 1, 1)

    def y(log: float) -> float:
        return top + (high - log) / (high - low) * (height - top - bottom)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" font-size="12" fill="#6b665b">']
    for decade in range(low, high + 1):
        parts.append(f'<path d="M{left} {y(decade):.1f}H{width - right}" stroke="#ddd8cc"/>')
        parts.append(f'<text x="{left - 8}" y="{y(decade) + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for place, layer in enumerate(report.layers):
        if place % math.ceil(len(report.layers) / 16) == 0:
            x = left + place * step
            parts.append(f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle">{layer.index}</text>')
    parts.append(f'<text x="{width - right + 10}" y="{height - 12}">layer</text>')
    labels = sorted(SERIES, key=lambda s: -logs[s[0], s[1]][-1])
    floor = -math.inf  # labels keep their distance from the one above
    for side, axis, color, dash in labels:
        line = [(left + place * step, y(log)) for place, log in enumerate(logs[side, axis])]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{color}"/>' for px, py in line]
        floor = max(floor + 16, line[-1][1] + 4)
        name = f"{side.upper()} per {axis}"
        parts.append(f'<text x="{width - right + 10}" y="{floor:.1f}" fill="{color}">{name}</text>')
    return "".join(parts) + "</svg>"


def svg_bars(channels: Tensor) -> str:
    """A bar [D] per channel, under its column of the map."""
    sizes = channels / channels.max().clamp(min=1e-12)
    bars = "".join(f"M{place}.5 20V{20 - 19 * size:.2f}" for place, size in enumerate(sizes.tolist()))
    return (
        f'<svg viewBox="0 0 {len(sizes)} 20" preserveAspectRatio="none" height="42" role="img">'
        f'<path d="{bars}" stroke="#7d5b8c" stroke-width=".8"/></svg>'
    )


def png_uri(values: Tensor) -> str:
    """A map [R, C] as a PNG data URI, one pixel per value, from 0 to its maximum."""
    from matplotlib.image import imsave

    buffer = BytesIO()
    top = max(values.max().item(), 1e-12)
    imsave(buffer, values.numpy(), vmin=0, vmax=top, cmap=COLORMAP, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
