"""From a matplotlib figure to an inline SVG that takes its colours from the page, so that dark mode works.

Figures are drawn in placeholder colours; each placeholder becomes a CSS variable in the SVG text. Text stays text, in
the page's own font.
"""

from __future__ import annotations

import html
import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

VARIABLES: Final = ("ink", "soft", "grid", "blue", "orange", "green", "purple", "teal", "wait", "wait-2")
"""The page defines ``--ink``, ``--soft`` and so on, for light and for dark."""
PLACEHOLDER: Final = {name: f"#0a00{number:02x}" for number, name in enumerate(VARIABLES)}

_POINTS_PER_INCH: Final = 72.0


@contextmanager
def figure(width_px: float, height_px: float) -> Iterator[Figure]:
    """Make a figure and apply the style inside; neither pyplot nor a global backend is touched."""
    # Here and not above: only a finished run needs matplotlib, and it takes half a second.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "verl_async",
            "font.size": 10.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": PLACEHOLDER["soft"],
            "axes.labelcolor": PLACEHOLDER["soft"],
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": PLACEHOLDER["grid"],
            "grid.linewidth": 0.8,
            "text.color": PLACEHOLDER["ink"],
            "xtick.color": PLACEHOLDER["soft"],
            "ytick.color": PLACEHOLDER["soft"],
            "lines.linewidth": 1.8,
            "lines.solid_capstyle": "round",
        }
    ):
        yield Figure(figsize=(width_px / _POINTS_PER_INCH, height_px / _POINTS_PER_INCH), layout="constrained")


def inline_svg(drawn: Figure, name: str, label: str) -> str:
    """Render a figure for the middle of an HTML page.

    Args:
        drawn: made with `figure`, inside its ``with``.
        name: a word of its own for each figure of the page; its ids begin with it.
        label: what a screen reader says.
    """
    stream = io.StringIO()
    drawn.savefig(stream, format="svg", transparent=True)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # HTML needs no namespaces, and the page fixes the size.
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    # A tenth of a pixel is exact enough, and halves the file.
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r"; ?font-family: [^;\"]*|font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 var(--font)", svg)
    for variable, colour in PLACEHOLDER.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
