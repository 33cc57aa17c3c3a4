"""The live view of a widget, as a part of an output. Beside it stands what is seen where no kernel runs."""

from __future__ import annotations

LIVE = "application/vnd.jupyter.widget-view+json"


def live(widget) -> dict[str, dict]:
    """The widget's view by its MIME type, alike for ipywidgets 8 and for 7, which Colab has."""
    return {LIVE: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}
