"""The kinds of picture in the report; each function writes one PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no screen needed
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from benchmarks.records import Summary
from benchmarks.run import number

WIDTH_INCHES = 9.0
DPI = 110
# Okabe and Ito's colours, which colour-blind readers can tell apart.
OURS, OTHERS, LIMIT = "#0072B2", "#999999", "#009E73"
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


class Bar(NamedTuple):
    label: str
    value: Summary | None
    """None: not measured."""

    colour: str


class Panel(NamedTuple):
    title: str
    axis: str
    """What the bars, or the curves' heights, show, with its unit."""

    content: Any
    """A list of bars, the first on top; or the points (x, y) of each curve by its label."""


def bars(path: Path, panels: Sequence[Panel]) -> Path:
    """Horizontal bars, one panel below the other; the intervals are black lines."""
    heights = [len(panel.content) + 2.2 for panel in panels]
    figure, axes = plt.subplots(
        *(len(panels), 1),
        figsize=(WIDTH_INCHES, 0.3 * sum(heights) + 0.3),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        known = [bar.value for bar in panel.content if bar.value is not None]
        left = min([0.0, *(value.low for value in known)])
        right = max([0.0, *(value.high for value in known)])
        gap = 0.01 * (right - left or 1.0)
        for place, (_, value, colour) in enumerate(panel.content):
            if value is None:
                ax.text(gap, place, "not measured", va="center", fontsize=8, style="italic")
                continue
            median, low, high = value
            ax.barh(place, median, color=colour, height=0.7)
            ax.plot([low, high], [place, place], "|-", color="black", linewidth=1, markersize=4)
            ax.text(max(high, 0) + gap, place, number(median), va="center", fontsize=8)
        ax.set_yticks(range(len(panel.content)), [bar.label for bar in panel.content])
        ax.set_ylim(len(panel.content) - 0.4, -0.6)
        ax.set_xlim(left - (5 * gap if left < 0 else 0), right + 14 * gap)
        _label(ax, panel.title)
        ax.set_xlabel(panel.axis, fontsize=8)
    return _save(figure, path)


def curves(path: Path, x_axis: str, panels: Sequence[Panel]) -> Path:
    """Curves over whole numbers, with their intervals shaded; up to two panels side by side."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(WIDTH_INCHES, 3.9 * rows), squeeze=False, layout="constrained"
    )
    for ax in list(axes.flat)[len(panels) :]:
        ax.remove()
    for ax, panel in zip(axes.flat, panels, strict=False):
        content: Mapping[str, Sequence[tuple[int, Summary]]] = panel.content
        for place, (label, points) in enumerate(content.items()):
            x = [count for count, _ in points]
            median, low, high = zip(*(summary for _, summary in points), strict=True)
            colour, marker = CYCLE[place % len(CYCLE)], MARKERS[place % len(MARKERS)]
            ax.plot(x, median, marker=marker, markersize=4, color=colour, label=label)
            ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _label(ax, panel.title)
        ax.set_xlabel(x_axis, fontsize=8)
        ax.set_ylabel(panel.axis, fontsize=8)
        ax.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _label(ax: Any, title: str) -> None:
    ax.set_title(title, fontsize=10, loc="left")
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
    return path
