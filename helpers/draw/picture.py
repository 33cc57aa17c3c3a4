"""`Picture`, a figure with a text that describes it, and the colours of all pictures of the course.

A rank has its own colour and its number in every picture. Forward is light, backward dark, communication
hatched, idle time empty. The eight colours are those of Okabe and Ito, which differ for every kind of colour
vision; each coloured shape also has its name in the picture.
"""

from __future__ import annotations

import functools
import threading
from base64 import b64encode
from contextlib import contextmanager
from html import escape
from io import BytesIO

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patheffects import withStroke

RANKS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]
INK, PAPER, FAINT = "#222222", "#FFFFFF", "#D8D8D8"
HATCH = "////"  # communication

STYLE = {
    "text.hinting": "no_hinting",
    "figure.dpi": 110,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    # A margin of paper around the drawing: on a dark page nothing lies at its edge.
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys("axes.edgecolor axes.labelcolor text.color xtick.color ytick.color".split(), INK),
    "hatch.linewidth": 0.7,
}

_drawing = threading.RLock()


@contextmanager
def _style(**settings):
    """In this block matplotlib has the course's style, with these settings changed, and no other thread
    draws: the settings belong to the whole process, and JupyterLab calls the callbacks of widgets in another
    thread than the cells.
    """
    with _drawing, mpl.rc_context(STYLE | settings):
        yield


def rank_colour(rank: int) -> str:
    """'#0072B2' for rank 0. From rank 8 on the colours repeat."""
    return RANKS[rank % len(RANKS)]


class Picture:
    """A figure, matplotlib's, and `alt`, a text for readers who cannot see it. A notebook displays both."""

    def __init__(self, figure: plt.Figure, alt: str):
        self.figure, self.alt = figure, alt
        plt.close(figure)  # if pyplot knows the figure, the inline backend would display it again

    def __repr__(self) -> str:
        return f"[picture: {self.alt}]"

    def png(self) -> bytes:
        """The bytes of a PNG file, in the figure's own dots per inch."""
        out = BytesIO()
        # The figure's layout has been computed already.
        with _style(**{"figure.constrained_layout.use": False}):
            # savefig would draw the figure twice.
            FigureCanvasAgg(self.figure).print_png(out, pil_kwargs={"compress_level": 1})
        return out.getvalue()

    def html(self) -> str:
        """The picture as HTML, to be put into another text."""
        return f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{b64encode(self.png()).decode()}">'

    def _repr_mimebundle_(self, **_):
        width, height = (self.figure.get_size_inches() * 110).round().astype(int).tolist()
        return (
            {"image/png": self.png(), "text/plain": repr(self)},
            {"image/png": {"alt": self.alt, "width": width, "height": height}},
        )


def styled(picture):
    """Decorate a function, so that it draws in the course's style, whatever style the notebook has set, and
    while no other thread draws.
    """

    @functools.wraps(picture)
    def draw(*args, **kwargs):
        with _style():
            return picture(*args, **kwargs)

    return draw


def fix(figure, left: float, right: float, top: float, bottom: float) -> None:
    """Set the margins of the figure's first axes, in inches, for pictures that are redrawn at each move of a
    slider: computing the margins takes as long as drawing.
    """
    width, height = figure.get_size_inches()
    figure.set_layout_engine("none")
    figure.axes[0].set_position(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )


def box(ax, x: float, y: float, width: float, height: float, **look) -> None:
    """Draw a rectangle from (x, y) to (x + width, y + height), in data units. look: for plt.Rectangle."""
    ax.add_patch(plt.Rectangle((x, y), width, height, **look))


def write_rank(ax, x: float, y: float, rank: int, size: float, outline: float = 2, **how) -> None:
    """Write a rank's number, readable on every rank's colour: paper, with an outline of ink."""
    how = {"ha": "center", "va": "center", "fontweight": "bold", "color": PAPER} | how
    edge = [withStroke(linewidth=outline, foreground=INK)]
    ax.text(x, y, str(rank), fontsize=size, path_effects=edge, **how)


def row_of_panels(columns: int, width: float, height: float):
    """(figure, axes of shape (1, columns)): a row of panels. width, height: inches of the figure."""
    return plt.subplots(1, columns, figsize=(width, height), squeeze=False)
