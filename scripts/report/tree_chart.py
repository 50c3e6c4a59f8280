"""A picture of a draft's tree: depth from left to right; the area of a dot is the share of rounds that accept it."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, PathPatch
from matplotlib.patheffects import withStroke

from draftsmith.decode.tree import ROOT, Tree

# In points, as are font sizes.
COLUMN, ROW, LEFT, RIGHT, TOP, BOTTOM = 165.0, 24.0, 50.0, 84.0, 126.0, 46.0
LARGEST, SMALLEST = 15.0, 2.5  # the radius of a dot that all rounds accept, and of one that no round accepts
INK, SOFT, LINE = "#1f2933", "#7b8794", "#cbd2d9"
BY_DEPTH = ("#334e68", "#0b69a3", "#1992a8", "#2d9d6f", "#b7791f", "#b83280", "#805ad5")
LEGEND = "number: the candidate's rank; area of a dot: the share of rounds that accept it"
HALO = [withStroke(linewidth=3, foreground="white")]


def draw_tree(tree: Tree, shares: Sequence[float], title: str, subtitle: str, png: Path | None = None) -> str:
    """Return a tree's picture as SVG, and write it to `png` too; `shares` of the rounds accept each node."""
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "draftsmith", "text.parse_math": False}
    with matplotlib.rc_context(options):
        figure = _figure(tree, shares, title, subtitle)
        if png is not None:
            figure.savefig(png, dpi=144)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = svg.getvalue()
    return text[text.index("<svg") :]


def _figure(tree: Tree, shares: Sequence[float], title: str, subtitle: str) -> Figure:
    heights = _layout(tree)
    depths, share = (*tree.depths, 0), (*shares, 1.0)  # the root has the index −1
    places = {node: (LEFT + depths[node] * COLUMN, y) for node, y in heights.items()}
    radius = [max(LARGEST * s**0.5, SMALLEST) for s in share]
    height = max(heights.values()) + 0.5 * ROW + BOTTOM
    width = max(LEFT + tree.depth * COLUMN + RIGHT, LEFT + 6 * len(subtitle), LEFT + 10.5 * len(title))
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    _write(axes, LEFT - 24, 30, title, 19)
    _write(axes, LEFT - 24, 54, subtitle, 12, SOFT)
    _write(axes, LEFT - 24, height - 20, LEGEND, 10, SOFT)
    for depth in range(1, tree.depth + 1):
        accepted = sum(s for s, node_depth in zip(shares, tree.depths, strict=True) if node_depth == depth)
        x = LEFT + depth * COLUMN
        _write(axes, x, 86, f"depth {depth}", 13, _colour(depth), ha="center")
        _write(axes, x, 102, f"accepted in {accepted:.0%} of rounds", 10, SOFT, ha="center")
    for node, parent in enumerate(tree.parents):
        (x0, y0), (x1, y1) = places[parent], places[node]
        middle = (x0 + x1) / 2
        path = matplotlib.path.Path([(x0, y0), (middle, y0), (middle, y1), (x1, y1)], [1, 4, 4, 4])
        axes.add_patch(PathPatch(path, fill=False, edgecolor=LINE, linewidth=1 + 5 * share[node], gid=f"edge {node}"))
    for node in range(ROOT, len(tree)):
        axes.add_patch(Circle(places[node], radius[node], color=_colour(depths[node]), linewidth=0, gid=f"node {node}"))
    _write(axes, places[ROOT][0], places[ROOT][1] - radius[ROOT] - 9, "text", 11, ha="center", path_effects=HALO)
    for node, parent in enumerate(tree.parents):
        (x, y), rank = places[node], tree.children[parent + 1].index(node)
        if tree.children[node + 1]:
            y -= radius[node] + 8
            _write(axes, x, y, f"{rank}", 11, ha="center", path_effects=HALO)
            _write(axes, x + 7, y, f"{share[node]:.1%}", 9, SOFT, path_effects=HALO)
        else:
            x += radius[node] + 6
            _write(axes, x, y, f"{rank}", 11)
            _write(axes, x + 7 * len(str(rank)) + 5, y, f"{share[node]:.1%}", 9, SOFT)
    return figure


def _layout(tree: Tree) -> dict[int, float]:
    """Return the height of each node: one row for each leaf, and parents in the middle of their children."""
    heights: dict[int, float] = {}
    rows = 0

    def place(node: int) -> float:
        nonlocal rows
        children = tree.children[node + 1]
        if children:
            below = [place(child) for child in children]
            heights[node] = (below[0] + below[-1]) / 2
        else:
            heights[node], rows = TOP + (rows + 0.5) * ROW, rows + 1
        return heights[node]

    place(ROOT)
    return heights


def _colour(depth: int) -> str:
    return BY_DEPTH[depth % len(BY_DEPTH)]


def _write(axes: Axes, x: float, y: float, words: str, size: float, colour: str = INK, **options: Any) -> None:
    axes.text(x, y, words, fontsize=size, color=colour, va="center", **options)
