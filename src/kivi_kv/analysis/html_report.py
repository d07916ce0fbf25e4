"""A ModelReport as one HTML file that needs nothing else: styles, pictures and all are inside."""

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from statistics import median

from ..config import KiviConfig
from ..ops.simulate import AXES
from .inspection import BITS, DECIDED, GROUP_SIZE, SINKS, LayerReport, ModelReport, TensorReport
from .inspection_plots import png_uri, svg_bars, svg_lines

MEASURES = {
    "error": "error of K or V",
    "output_error": "output error",
    "sinks_error": f"output error, first {SINKS} exact",
}
STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 60rem; padding: 3rem 1.5rem 6rem; background: #fdfcf9; color: #23211d;
  font: 1.05rem/1.6 Charter, "Bitstream Charter", Georgia, "DejaVu Serif", serif; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.4rem; margin: 3.2rem 0 .6rem; padding-top: .8rem; border-top: 1px solid #ddd8cc; }
h3 { font-size: 1.15rem; margin: 0 0 .4rem; }
p { max-width: 44rem; margin: .7rem 0; }
.lead, figcaption, .note, h3 small { color: #6b665b; }
figcaption, .note, table, h3 small, svg text { font-family: system-ui, "DejaVu Sans", sans-serif; }
figcaption, .note, h3 small { font-size: .84rem; line-height: 1.45; font-weight: normal; }
.config { background: #f1ede2; border-left: 4px solid #c2570c; padding: .9rem 1.1rem; margin: 1rem 0; }
code { font: .92rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; line-height: 1.35; margin: 1rem 0; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; }
tr:first-child th:first-child, tbody th, td:first-child { text-align: left; }
th { font-weight: 600; } thead th { border-bottom: 1px solid #bdb6a5; }
thead tr:first-child th[colspan] { text-align: center; border-bottom: 1px solid #ddd8cc; }
tbody th { font-weight: normal; } tbody tr + tr > * { border-top: 1px solid #eeeade; }
tbody .k + .v > * { border-top: 1px solid #bdb6a5; }
.best { font-weight: 700; color: #14693a; }
a { color: #1f5fa8; text-decoration: none; } a:hover { text-decoration: underline; }
svg { display: block; width: 100%; } .maps svg { margin: 3px 0 6px; }
.layer { margin: 0 0 2.6rem; padding-top: 1.2rem; border-top: 1px solid #eeeade; break-inside: avoid; }
.maps { display: grid; grid-template-columns: 1fr 1fr; gap: 1.6rem; }
figure { margin: 0; } .maps figcaption { min-height: 2.6em; }
.maps img { display: block; width: 100%; height: 13rem; image-rendering: pixelated; outline: 1px solid #ddd8cc; }
@media (max-width: 40rem) { .maps { grid-template-columns: 1fr; } }
"""


def write_html(report: ModelReport, file: Path) -> None:
    """Write the report. It loads nothing from anywhere; the policy in its head makes browsers enforce that."""
    title = escape(f"kivi inspect: {report.model}")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        *_head(report),
        *_comparison(report),
        *_all_layers(report),
        *_layers(report),
        "</body></html>\n",
    ]
    file.write_text("\n".join(parts), encoding="utf-8")


def config_code(config: KiviConfig) -> str:
    """The fields that an inspection decides, as Python."""
    return f"KiviConfig({', '.join(f'{name}={getattr(config, name)}' for name in DECIDED)})"


def explain(report: ModelReport) -> str:
    """One sentence: the measures behind the recommended config."""
    ratio = report.k_output_error / max(report.v_output_error, 1e-12)
    return (
        f"In the median layer, 2-bit keys (per channel) change the attention output by {report.k_output_error:.3f} "
        f"and 2-bit values (per token) by {report.v_output_error:.3f}. The ratio is {ratio:.2f}, so keys get "
        f"{report.recommended.k_bits} bits."
    )


def _head(report: ModelReport) -> Iterator[str]:
    others = f", {report.other_layers} others left out" if report.other_layers else ""
    yield f"<h1>The KV cache of {escape(report.model)}</h1>"
    yield (
        f'<p class="lead">The first {report.tokens:,} tokens of {escape(report.text)}. {len(report.layers)} '
        f"full-attention layers{others}; {report.kv_heads} key-value heads of {report.head_dim} channels.</p>"
    )
    yield "<h2>Recommended config</h2>"
    yield f'<div class="config"><code id="recommended">{escape(config_code(report.recommended))}</code></div>'
    yield f"<p>{escape(explain(report))} The numbers are relative squared errors.</p>"
    links = ", ".join(f'<a href="#layer-{index}">{index}</a>' for index in report.sensitive_layers)
    yield f"<p>Sensitive layers: {links or 'none'}.</p>"
    caution = "The numbers come from one text: confirm the config with kivi eval."
    yield f'<p class="note">The rule: {escape(report.rule)} {caution}</p>'


def _comparison(report: ModelReport) -> Iterator[str]:
    yield "<h2>Which values should share a range?</h2>"
    yield (
        "<p>Low-bit codes divide the range of a group of values into a few steps: 4 levels at 2 bits. All of a "
        "group gets the coarseness of its widest member. There are three ways to draw the groups: "
        f"<b>per tensor</b>, all values together; <b>per token</b>, {GROUP_SIZE} channels of one token; "
        f"<b>per channel</b>, {GROUP_SIZE} tokens of one channel.</p>"
        "<p>Each way is judged twice. The <b>error of K or V</b> is |xq - x|² / |x|², of the tensor itself. "
        "The <b>output error</b> is the same of what attention makes of it: softmax(q·k)·v for the newest queries, "
        "with only K or only V quantized. It is given once more with the first "
        f"{SINKS} tokens in full precision, as the recommended config keeps them.</p>"
    )
    yield _table(report.median, "median layer")
    yield f"<p>{_k_finding(report)}</p><p>{_v_finding(report)}</p>"


def _k_finding(report: ModelReport) -> str:
    wins = sum(layer.k.output_error[2]["channel"] < layer.k.output_error[2]["token"] for layer in report.layers)
    ratio = max(layer.k.outlier_ratio for layer in report.layers)
    return (
        f"<b>Keys.</b> The largest key channel is up to {ratio:.1f} times the median one. Per token, it sets "
        "the range for its neighbours; per channel, only its own. By the output error at 2 bits, per channel is "
        f"better than per token in {wins} of {len(report.layers)} layers."
    )


def _v_finding(report: ModelReport) -> str:
    wins = {
        measure: sum(getattr(x.v, measure)[2]["channel"] < getattr(x.v, measure)[2]["token"] for x in report.layers)
        for measure in MEASURES
    }
    attention, value = (
        median(getattr(x, name) for x in report.layers) for name in ("first_token_attention", "first_token_value")
    )
    return (
        "<b>Values: squared error is not enough.</b> At 2 bits, by the error of V itself, per channel is better "
        f"than per token in {wins['error']} of {len(report.layers)} layers; by the output error, in "
        f"{wins['output_error']}; with the first {SINKS} tokens exact, in {wins['sinks_error']}. Attention is a "
        "weighted mean of tokens, and the sum of squares does not know the weights. Here the first token gets "
        f"{attention:.0%} of the attention in the median layer, and its values have {value:.2f} times the size of "
        "the median token's. A per-channel group gives a small token the coarse steps of its largest neighbour; a "
        "per-token group keeps each token's error to itself. It also lets a new value be quantized as it comes, "
        "without waiting for 31 others.</p><p>So there are two remedies for a first token that attention leans on: "
        "groups per token, and a few first tokens in full precision. The cache has both."
    )


def _all_layers(report: ModelReport) -> Iterator[str]:
    yield "<h2>Output error over the layers</h2>"
    yield f"<figure>{svg_lines(report)}<figcaption>2 bits, logarithmic; lower is better.</figcaption></figure>"
    heads = ("layer", "largest K channel", "largest V channel", "attention to first token", "error, K", "error, V")
    yield '<div class="scroll"><table><thead><tr>' + "".join(f"<th>{head}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for layer in report.layers:
        k, v = layer.k, layer.v
        cells = f"<td>{k.outlier_ratio:.1f}× median</td><td>{v.outlier_ratio:.1f}× median</td>"
        cells += f"<td>{layer.first_token_attention:.0%}</td>"
        cells += f"<td>{k.output_error[2]['channel']:.4f}</td><td>{v.output_error[2]['token']:.4f}</td>"
        mark = " (sensitive)" if layer.index in report.sensitive_layers else ""
        yield f'<tr><td><a href="#layer-{layer.index}">{layer.index}</a>{mark}</td>{cells}</tr>'
    yield "</tbody></table></div>"
    yield '<p class="note">Output errors at 2 bits, K per channel and V per token.</p>'


def _layers(report: ModelReport) -> Iterator[str]:
    yield "<h2>Layer by layer</h2>"
    yield (
        "<p>The maps show the magnitude |x| of one head, the one whose largest channel is the furthest above its "
        "median: tokens from top to bottom, channels from left to right, dark for large. Bars below a map are the "
        "channel means. A dark vertical stripe is a channel that is large in every token: only per-channel groups "
        "keep its range from its neighbours.</p>"
    )
    yield from (_layer(layer) for layer in report.layers)


def _layer(layer: LayerReport) -> str:
    def value(side: str, measure: str, bits: int, axis: str) -> float:
        return float(getattr(getattr(layer, side), measure)[bits][axis])

    maps = _figure("K", layer.index, layer.k) + _figure("V", layer.index, layer.v)
    return (
        f'<section class="layer" id="layer-{layer.index}"><h3>Layer {layer.index}</h3>'
        f'<div class="maps">{maps}</div>{_table(value, "grouping")}</section>'
    )


def _figure(name: str, index: int, x: TensorReport) -> str:
    what = f"channel {x.outlier_channel} is {x.outlier_ratio:.1f} times the median; darkest is {x.map.max():.3g}"
    return (
        f'<figure><img alt="{name} of layer {index}" src="{png_uri(x.map)}">{svg_bars(x.map.mean(0))}'
        f"<figcaption>{name}, head {x.outlier_head}: {what}</figcaption></figure>"
    )


def _table(value: Callable[[str, str, int, str], float], corner: str) -> str:
    """All errors that value(side, measure, bits, axis) knows; the smallest of a side's column is marked."""
    head = "".join(f'<th colspan="{len(BITS)}">{title}</th>' for title in MEASURES.values())
    bits_head = "".join(f"<th>{bits} bits</th>" for _ in MEASURES for bits in BITS)
    rows = ""
    for side in ("k", "v"):
        columns = [[value(side, measure, bits, axis) for axis in AXES] for measure in MEASURES for bits in BITS]
        for row, axis in enumerate(AXES):
            marks = [' class="best"' if column[row] == min(column) else "" for column in columns]
            cells = (f"<td{mark}>{column[row]:.4f}</td>" for column, mark in zip(columns, marks, strict=True))
            rows += f'<tr class="{side}"><th>{side.upper()} per {axis}</th>{"".join(cells)}</tr>'
    head = f'<thead><tr><th rowspan="2">{corner}</th>{head}</tr><tr>{bits_head}</tr></thead>'
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'
