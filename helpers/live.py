"""What the course's widgets share: `live`, so that a notebook displays a widget, and `question`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

LIVE = "application/vnd.jupyter.widget-view+json"


def live(widget) -> dict[str, dict]:
    """The widget's view by its MIME type, for ipywidgets 8 and for 7, which Colab has."""
    return {LIVE: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def question(text: str, options: Sequence[str], chosen: str | None, choose: Callable[[str], None]) -> list:
    """Widgets: a question, and its options as buttons, of which the reader chooses one."""
    import ipywidgets as widgets

    width = widgets.Layout(width="max-content")
    buttons = widgets.RadioButtons(options=list(options), value=chosen, layout=width)
    buttons.observe(lambda change: change["new"] and choose(change["new"]), names="value")
    return [widgets.HTML(f"<b>{escape(text)}</b>"), buttons]
