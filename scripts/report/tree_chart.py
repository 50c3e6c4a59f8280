"""A picture of a draft's tree: depth from left to right, each dot as large as the share of rounds that accept it.

The scene is a list of curves, dots and texts, drawn as SVG by hand and as PNG by Pillow, from the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw, ImageFont

from draftsmith.decode.tree import ROOT, Tree

COLUMN, ROW, LEFT, RIGHT, TOP, BOTTOM = 165.0, 24.0, 50.0, 84.0, 126.0, 46.0
LARGEST, SMALLEST = 15.0, 2.5  # radius of a dot that every round accepts, and of one that none does
INK, SOFT, LINE = "#1f2933", "#7b8794", "#cbd2d9"
BY_DEPTH = ("#334e68", "#0b69a3", "#1992a8", "#2d9d6f", "#b7791f", "#b83280", "#805ad5")
SHARPNESS = 3  # drawn so many times larger, then reduced: Pillow draws without smoothing
ANCHORS = {"l": "start", "m": "middle", "r": "end"}


@dataclass(frozen=True)
class Curve:
    """From a parent to a child, level at both ends."""

    start: tuple[float, float]
    end: tuple[float, float]
    width: float

    def points(self, count: int = 24) -> list[tuple[float, float]]:
        """Return points along it: a cubic Bézier curve with its control points half-way."""
        (x0, y0), (x1, y1) = self.start, self.end
        middle, found = (x0 + x1) / 2, []
        for i in range(count + 1):
            t = i / count
            a, b, c, d = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
            found.append((a * x0 + (b + c) * middle + d * x1, (a + b) * y0 + (c + d) * y1))
        return found


@dataclass(frozen=True)
class Dot:
    """A node."""

    centre: tuple[float, float]
    radius: float
    colour: str


@dataclass(frozen=True)
class Text:
    """A line of text, its middle at the height of its place."""

    place: tuple[float, float]
    words: str
    size: float
    colour: str = INK
    anchor: str = "l"
    """Where the place is: "l", the text's left end, "m", its middle, or "r"."""
    halo: bool = False
    """Clear what lies behind it."""


@dataclass(frozen=True)
class Scene:
    """What to draw, in order."""

    width: float
    height: float
    shapes: Sequence[Curve | Dot | Text]


def tree_scene(tree: Tree, shares: Sequence[float], title: str, subtitle: str) -> Scene:
    """Lay a tree out: leaves a row each, parents in the middle of their children.

    Args:
        tree: at least one node.
        shares: for each node, the share of rounds that accept it.
        title: the first line.
        subtitle: the second.
    """
    y: dict[int, float] = {}
    rows = 0

    def place(node: int) -> float:
        nonlocal rows
        children = tree.children[node + 1]
        if not children:
            y[node], rows = TOP + (rows + 0.5) * ROW, rows + 1
        else:
            below = [place(child) for child in children]
            y[node] = (below[0] + below[-1]) / 2
        return y[node]

    place(ROOT)
    depths = (*tree.depths, 0)  # the root's, found at index −1
    at = {node: (LEFT + depths[node] * COLUMN, own) for node, own in y.items()}
    share = [*shares, 1.0]
    radius = [max(LARGEST * s**0.5, SMALLEST) for s in share]
    width = LEFT + tree.depth * COLUMN + RIGHT
    shapes: list[Curve | Dot | Text] = [
        Text((LEFT - 24, 30), title, 19),
        Text((LEFT - 24, 54), subtitle, 12, SOFT),
    ]
    for depth in range(1, tree.depth + 1):
        accepted = sum(s for s, own in zip(shares, tree.depths, strict=True) if own == depth)
        x = LEFT + depth * COLUMN
        shapes.append(Text((x, 86), f"head {depth - 1}", 13, _colour(depth), "m"))
        shapes.append(Text((x, 102), f"accepted in {accepted:.0%} of rounds", 10, SOFT, "m"))
    for node, parent in enumerate(tree.parents):
        shapes.append(Curve(at[parent], at[node], 1 + 5 * share[node]))
    shapes += [Dot(at[node], radius[node], _colour(depths[node])) for node in range(ROOT, len(tree))]
    shapes.append(Text((at[ROOT][0], at[ROOT][1] - radius[ROOT] - 9), "text", 11, INK, "m", halo=True))
    for node, parent in enumerate(tree.parents):
        (x, own), rank = at[node], tree.children[parent + 1].index(node)
        if tree.children[node + 1]:
            above = own - radius[node] - 8
            shapes.append(Text((x, above), f"{rank}", 11, INK, "m", halo=True))
            shapes.append(Text((x + 7, above), f"{share[node]:.1%}", 9, SOFT, halo=True))
        else:
            x += radius[node] + 6
            shapes.append(Text((x, own), f"{rank}", 11))
            shapes.append(Text((x + 7 * len(str(rank)) + 5, own), f"{share[node]:.1%}", 9, SOFT))
    height = TOP + rows * ROW + BOTTOM
    legend = "number: the candidate's rank; area of a dot: the share of rounds that accept it"
    shapes.append(Text((LEFT - 24, height - 20), legend, 10, SOFT))
    widest = max(LEFT + 0.58 * s.size * len(s.words) for s in shapes if isinstance(s, Text) and s.anchor == "l")
    if tree.depth < 3:  # the words at the top and bottom need more room than the tree
        width = max(width, widest)
    return Scene(width, height, shapes)


def _colour(depth: int) -> str:
    return BY_DEPTH[depth % len(BY_DEPTH)]


def svg(scene: Scene) -> str:
    """Return a scene as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width:g}" height="{scene.height:g}" '
        f'viewBox="0 0 {scene.width:g} {scene.height:g}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for shape in scene.shapes:
        if isinstance(shape, Curve):
            (x0, y0), (x1, y1) = shape.start, shape.end
            middle = (x0 + x1) / 2
            curve = f"M {x0:.1f} {y0:.1f} C {middle:.1f} {y0:.1f}, {middle:.1f} {y1:.1f}, {x1:.1f} {y1:.1f}"
            lines.append(f'<path d="{curve}" fill="none" stroke="{LINE}" stroke-width="{shape.width:.2f}"/>')
        elif isinstance(shape, Dot):
            (x, y), r = shape.centre, shape.radius
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.2f}" fill="{shape.colour}"/>')
        else:
            (x, y), words = shape.place, escape(shape.words)
            form = f'font-size="{shape.size:g}" text-anchor="{ANCHORS[shape.anchor]}"'
            start = f'<text x="{x:.1f}" y="{y + 0.35 * shape.size:.1f}" {form}'
            if shape.halo:  # a text of its own: not every viewer knows paint-order
                lines.append(f'{start} fill="white" stroke="white" stroke-width="3">{words}</text>')
            lines.append(f'{start} fill="{shape.colour}">{words}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def write_png(scene: Scene, path: Path, scale: float = 2.0) -> None:
    """Write a scene as PNG, `scale` pixels a unit."""
    k = scale * SHARPNESS
    image = Image.new("RGB", (round(scene.width * k), round(scene.height * k)), "white")
    draw = ImageDraw.Draw(image)
    for shape in scene.shapes:
        if isinstance(shape, Curve):
            points = [(x * k, y * k) for x, y in shape.points()]
            draw.line(points, fill=LINE, width=max(round(shape.width * k), 1), joint="curve")
        elif isinstance(shape, Dot):
            (x, y), r = shape.centre, shape.radius
            draw.ellipse([(x - r) * k, (y - r) * k, (x + r) * k, (y + r) * k], fill=shape.colour)
        else:
            (x, y), font = shape.place, ImageFont.load_default(shape.size * k)
            halo = round(1.5 * k) if shape.halo else 0
            where = (x * k, y * k)
            draw.text(
                where, shape.words, shape.colour, font, f"{shape.anchor}m", stroke_width=halo, stroke_fill="white"
            )
    image.resize((round(scene.width * scale), round(scene.height * scale)), Image.Resampling.LANCZOS).save(path)
