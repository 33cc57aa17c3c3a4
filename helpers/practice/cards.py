"""Flashcards: the course's questions, and the reader's own mistakes, to be gone through until all
are known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from html import escape

from three_axes.files import rows_of

from ..live import live


@dataclass(frozen=True)
class Card:
    """A question, its answer, and the drop that shows it: '01' to '14', or beyond them 'b2'."""

    drop: str
    front: str
    back: str


def load(*drops: int | str) -> list[Card]:
    """The cards of some drops, or all. Raises ValueError for a drop that does not exist."""
    cards = [Card(**row) for row in rows_of("flashcards.csv")]
    known = list(dict.fromkeys(c.drop for c in cards))
    if unknown := [d for d in drops if str(d).zfill(2) not in known]:
        raise ValueError(f"there is no drop {unknown[0]}; they are {', '.join(known)}")
    return [c for c in cards if not drops or c.drop in {str(d).zfill(2) for d in drops}]


class Deck:
    """Cards in turn. `know()` puts the top one away, `not_yet()` puts it back three places further down.

    In a notebook it has buttons; without a kernel the questions stay, each with its answer folded.
    """

    def __init__(self, cards: list[Card]):
        self.all, self.left, self.shown = cards, deque(cards), False

    @property
    def top(self) -> Card | None:
        return self.left[0] if self.left else None

    def show(self) -> None:
        """Turn the top card."""
        self.shown = True

    def know(self) -> None:
        if self.left:
            self.left.popleft()
        self.shown = False

    def not_yet(self) -> None:
        if self.left:
            card = self.left.popleft()
            self.left.insert(min(3, len(self.left)), card)
        self.shown = False

    def again(self) -> None:
        """All of them, from the first."""
        self.left, self.shown = deque(self.all), False

    def __repr__(self) -> str:
        return f"{len(self.all)} cards, {len(self.left)} left\n" + "\n".join(
            f"  {c.drop}  {c.front}" for c in self.all
        )

    def _face(self) -> str:
        if self.top is None:
            return "<b>All known.</b>"
        back = f"<p>{escape(self.top.back)}</p>" if self.shown else "<p>&nbsp;</p>"
        return (
            '<div style="border:1px solid #999;border-radius:6px;padding:.8em'
            f' 1.2em;min-height:7em;max-width:46em;font-size:115%"><small>drop {self.top.drop} ·'
            f" {len(self.left)} left</small><p><b>{escape(self.top.front)}</b></p>{back}</div>"
        )

    def _repr_mimebundle_(self, **_):
        import ipywidgets as widgets

        face = widgets.HTML(self._face())
        face.add_class("three-axes-card")
        buttons = [widgets.Button(description=text) for text in ("show", "I know", "not yet", "again")]

        def press(action):
            def pressed(_) -> None:
                action()
                face.value = self._face()

            return pressed

        for button, action in zip(buttons, (self.show, self.know, self.not_yet, self.again)):
            button.on_click(press(action))
        box = widgets.VBox([face, widgets.HBox(buttons)])
        folded = "".join(
            f"<details><summary>{c.drop} · {escape(c.front)}</summary>{escape(c.back)}</details>"
            for c in self.all
        )
        return {"text/plain": repr(self), "text/html": folded, **live(box)}


def deck(*drops: int | str) -> Deck:
    """`deck()` has the cards of the fourteen drops, `deck(1, "b2")` those of two that you name."""
    return Deck(load(*drops) if drops else [c for c in load() if c.drop.isdigit()])
