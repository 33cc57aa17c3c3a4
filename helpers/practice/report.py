"""The reader's page for the meeting: the planner's, with the reader's layout, pictures and six answers."""

from __future__ import annotations

from html import escape

from three_axes.plan.meeting import alternatives, assumptions, changes, cost, verdict
from three_axes.plan.page import document, recommendation, taken_for_granted

__all__ = ["alternatives", "assumptions", "changes", "cost", "page", "verdict"]


def page(defence, tokens: float | None) -> str:
    """The page, complete in itself: a browser shows it and prints it."""
    e, of = defence.estimate, defence.of
    answers = "".join(f"<dt>{escape(q)}</dt><dd>{escape(a)}</dd>" for q, a in defence.answers.items())
    pictures = (defence.time_picture(), defence.memory_picture())
    return document(
        e,
        of,
        {
            "Recommendation": recommendation(e, of, tokens),
            "Alternatives": alternatives(e, of, defence.pure)._repr_html_(),
            "What would change this choice": changes(e, of)._repr_html_(),
            "Where the time goes, and the memory": "".join(
                f"<figure>{picture.html()}</figure>" for picture in pictures
            ),
            "Six questions": f"<dl>{answers}</dl>",
            "Assumptions": taken_for_granted(e),
        },
    )
