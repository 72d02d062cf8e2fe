"""The kinds of picture in the report; each function writes one PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.run import number
from benchmarks.timing import Summary

WIDTH_INCHES = 9.0
DPI = 110
# Okabe and Ito's colours, which colour-blind readers can tell apart.
OURS, OTHERS, LIMIT = "#0072B2", "#999999", "#009E73"
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    low: float
    high: float
    colour: str = OTHERS


@dataclass(frozen=True)
class Panel:
    """Horizontal bars with a common unit, the first on top."""

    title: str
    axis: str
    """What the axis shows, with its unit."""

    bars: list[Bar]
    reference: float | None = None
    """Where a line is drawn."""


@dataclass(frozen=True)
class Line:
    label: str
    x: list[float]
    y: list[Summary]
    marked: bool = True
    """Whether the points are drawn."""

    dashed: bool = False
    """An ideal, not something measured."""


@dataclass(frozen=True)
class Lines:
    """Curves over a common axis."""

    title: str
    x_axis: str
    y_axis: str
    lines: list[Line]
    counts: bool = False
    """Whether x are whole numbers."""


def bar_panels(path: Path, panels: Sequence[Panel]) -> Path:
    """One panel below the other; their axes are independent."""
    heights = [len(panel.bars) + 2.2 for panel in panels]
    figure, axes = plt.subplots(
        len(panels),
        figsize=(WIDTH_INCHES, 0.3 * sum(heights) + 0.3),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        _bars(ax, panel)
    return _save(figure, path)


def _bars(ax: Axes, panel: Panel) -> None:
    places = range(len(panel.bars))
    values = [bar.value for bar in panel.bars]
    ends = [end for bar in panel.bars for end in (bar.low, bar.high) if not math.isnan(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    reach = (high - low) or 1.0
    ax.barh(places, values, color=[bar.colour for bar in panel.bars], height=0.7)
    for place, bar in zip(places, panel.bars, strict=True):
        if math.isnan(bar.value):
            ax.text(0.01 * reach, place, "not measured", va="center", fontsize=8, style="italic")
            continue
        ax.text(
            max(bar.value, bar.high, 0) + 0.01 * reach,
            place,
            number(bar.value),
            va="center",
            fontsize=8,
        )
        if bar.low == bar.high:
            continue
        errors = [[max(0.0, bar.value - bar.low)], [max(0.0, bar.high - bar.value)]]
        ax.errorbar(bar.value, place, xerr=errors, color="black", linewidth=1, capsize=2)
    if panel.reference is not None:
        ax.axvline(panel.reference, color="black", linewidth=1, linestyle=":")
    ax.set_yticks(places, [bar.label for bar in panel.bars], fontsize=8)
    ax.set_ylim(len(panel.bars) - 0.4, -0.6)
    ax.set_xlim(low - (0.05 * reach if low < 0 else 0.0), high + 0.14 * reach)
    ax.set_title(panel.title, fontsize=10, loc="left")
    ax.set_xlabel(panel.axis, fontsize=8)
    _tidy(ax)


def line_panels(path: Path, panels: Sequence[Lines]) -> Path:
    """Up to two panels side by side."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(WIDTH_INCHES, 3.9 * rows), squeeze=False, layout="constrained"
    )
    for ax, panel in zip(axes.flat, panels, strict=False):
        _lines(ax, panel)
    for ax in list(axes.flat)[len(panels) :]:
        ax.remove()
    return _save(figure, path)


def _lines(ax: Axes, panel: Lines) -> None:
    for place, line in enumerate(panel.lines):
        style = "--" if line.dashed else "-"
        marker = MARKERS[place % len(MARKERS)] if line.marked else None
        colour = "black" if line.dashed else CYCLE[place % len(CYCLE)]
        middle, low, high = zip(*line.y, strict=True)
        ax.plot(line.x, middle, style, marker=marker, markersize=4, color=colour, label=line.label)
        ax.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set_ylim(bottom=0)
    if panel.counts:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(panel.title, fontsize=10, loc="left")
    ax.set_xlabel(panel.x_axis, fontsize=8)
    ax.set_ylabel(panel.y_axis, fontsize=8)
    ax.legend(fontsize=7, frameon=False)
    _tidy(ax)


def stacked_bars(path: Path, title: str, axis: str, rows: dict[str, dict[str, float]]) -> Path:
    """One horizontal bar per row, made of named parts."""
    figure, ax = plt.subplots(figsize=(WIDTH_INCHES, 0.5 * len(rows) + 1.6), layout="constrained")
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    ends = [0.0] * len(rows)
    for name, colour in zip(names, CYCLE, strict=False):
        lengths = [parts.get(name, 0.0) for parts in rows.values()]
        ax.barh(list(rows), lengths, left=ends, color=colour, label=name, height=0.6)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for place, end in enumerate(ends):
        ax.text(end * 1.01, place, number(end), va="center", fontsize=8)
    ax.set_xlim(0, 1.12 * max(ends))
    ax.invert_yaxis()
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(axis, fontsize=8)
    ax.legend(
        fontsize=7, frameon=False, ncols=len(names), loc="upper left", bbox_to_anchor=(0, -0.3)
    )
    _tidy(ax)
    return _save(figure, path)


def _tidy(ax: Axes) -> None:
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
    return path
