"""Bar charts of the report, with confidence intervals."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt

from benchmarks.records import Summary
from benchmarks.run import format_number

WIDTH_INCHES = 9.0
DPI = 110
# Colours of the colour-blind safe palette by Okabe and Ito.
OURS, OTHERS, LIMIT = "#0072B2", "#999999", "#009E73"


Bar = tuple[str, Summary | None, str]
"""Label, value (None: not measured) and colour."""

Panel = tuple[str, str, list[Bar]]
"""Title, axis label with unit, and bars from top to bottom."""


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Write a PNG of horizontal bars, one panel below the other, with intervals as black lines."""
    heights = [len(bars) + 2.2 for _, _, bars in panels]
    figure, axes = plt.subplots(
        *(len(panels), 1),
        figsize=(WIDTH_INCHES, 0.3 * sum(heights) + 0.3),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for ax, (title, axis, bars) in zip(axes[:, 0], panels, strict=True):
        known = [value for _, value, _ in bars if value is not None]
        left = min([0.0, *(value.low for value in known)])
        right = max([0.0, *(value.high for value in known)])
        gap = 0.01 * (right - left or 1.0)
        for place, (_, value, colour) in enumerate(bars):
            if value is None:
                ax.text(gap, place, "not measured", va="center", fontsize=8, style="italic")
                continue
            median, low, high = value
            ax.barh(place, median, color=colour, height=0.7)
            ax.plot([low, high], [place, place], "|-", color="black", linewidth=1, markersize=4)
            ax.text(max(high, 0) + gap, place, format_number(median), va="center", fontsize=8)
        ax.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        ax.set_ylim(len(bars) - 0.4, -0.6)
        ax.set_xlim(left - (5 * gap if left < 0 else 0), right + 14 * gap)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel(axis, fontsize=8)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
