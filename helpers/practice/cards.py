"""Flashcards: the course's questions, and the reader's own mistakes, repeated until all are known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import date, timedelta
from html import escape

from three_axes.files import rows_of

from ..live import live
from . import passed

SPACING = 1, 3, 7, 21  # days until a card is asked again, after it was known once, twice, …


@dataclass(frozen=True)
class Card:
    """A question, its answer, and the place that teaches it: a drop ('01' to '14', or 'b2' beyond them) and a
    section.
    """

    drop: str
    section: str
    front: str
    back: str


def load(*drops: int | str) -> list[Card]:
    """The cards of some drops; without arguments, of all. Raises ValueError for an unknown drop."""
    cards = [Card(**row) for row in rows_of("flashcards.csv")]
    known = list(dict.fromkeys(c.drop for c in cards))
    if unknown := [d for d in drops if str(d).zfill(2) not in known]:
        raise ValueError(f"there is no drop {unknown[0]}; they are {', '.join(known)}")
    return [c for c in cards if not drops or c.drop in {str(d).zfill(2) for d in drops}]


class Deck:
    """Cards in turn. `know()` removes the top card, `not_yet()` puts it three places further down.

    A card that the reader knows is asked again after 1, 3, 7 and then every 21 days; a card that the reader
    does not know yet is asked again in the same session. In a notebook the deck has buttons; without a kernel
    it is a list of questions, each with its answer folded.
    """

    def __init__(self, cards: list[Card]):
        self.all, self.left, self.shown = cards, deque(cards), False

    @property
    def top(self) -> Card | None:
        """The next card; None if none is left."""
        return self.left[0] if self.left else None

    def show(self) -> None:
        """Show the answer of the top card."""
        self.shown = True

    def know(self) -> None:
        """Remove the top card. The progress file keeps the day on which it is asked again."""
        if self.left:
            card = self.left.popleft()
            with passed.changing() as done:
                times, day = done.cards.get(card.front, (0, ""))
                if day <= str(date.today()):  # a card that is not due yet keeps its day
                    done.cards[card.front] = times + 1, _in_days(SPACING[min(times, len(SPACING) - 1)])
        self.shown = False

    def not_yet(self) -> None:
        """Put the top card three places down. It is due today, and its intervals begin anew."""
        if self.left:
            card = self.left.popleft()
            self.left.insert(min(3, len(self.left)), card)
            with passed.changing() as done:
                done.cards[card.front] = 0, _in_days(0)
        self.shown = False

    def again(self) -> None:
        """Begin again with all cards."""
        self.left, self.shown = deque(self.all), False

    def __repr__(self) -> str:
        return f"{len(self.all)} cards, {len(self.left)} left\n" + "\n".join(
            f"  {c.drop}  {c.front}" for c in self.all
        )

    def _face(self) -> str:
        if self.top is None:
            return f"<b>{'All known.' if self.all else 'No card is due today.'}</b>"
        back = "<p>&nbsp;</p>"
        if self.shown:
            where = f"<small>drop {self.top.drop}, {escape(self.top.section)}</small>"
            back = f"<p>{escape(self.top.back)}<br>{where}</p>"
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

        def update() -> None:
            face.value = self._face()
            for button in buttons[1:3]:  # "I know" and "not yet", which are enabled beside the answer only
                button.disabled = not self.shown

        def press(action):
            return lambda _: (action(), update())

        for button, action in zip(buttons, (self.show, self.know, self.not_yet, self.again)):
            button.on_click(press(action))
        update()
        box = widgets.VBox([face, widgets.HBox(buttons)])
        folded = "".join(
            f"<details><summary>{c.drop} · {escape(c.front)}</summary>{escape(c.back)}</details>"
            for c in self.all
        )
        return {"text/plain": repr(self), "text/html": folded, **live(box)}


def _in_days(days: int) -> str:
    """The date after so many days, YYYY-MM-DD."""
    return str(date.today() + timedelta(days))


def due(done: passed.Done) -> list[Card]:
    """The cards to ask today, of the drops that were read: first cards that were not known, then known cards,
    those first that have been due for longest, then new cards, those first whose drop was read last.
    """
    today = str(date.today())

    def order(card: Card):
        times, day = done.cards.get(card.front, (1, today))
        return times > 0, card.front not in done.cards, day, -done.left.index(card.drop)

    read = [c for c in load() if c.drop in done.left]
    return sorted((c for c in read if done.cards.get(c.front, (0, today))[1] <= today), key=order)


def beginning(day: str) -> Deck:
    """Up to three of the cards that are due, for the beginning of a drop. day: today, YYYY-MM-DD. Another
    drop on the same day gets other cards.
    """
    with passed.changing() as done:
        asked = [card for card in due(done) if done.asked.get(card.front) != day][:3]
        done.asked |= {card.front: day for card in asked}
    return Deck(asked)


def deck(*drops: int | str) -> Deck:
    """`deck()` has the cards that are due today or, if no drop was read yet, those of the fourteen drops;
    `deck(1, "b2")` has all cards of two drops.
    """
    done = passed.mine()
    if done.left and not drops:
        return Deck(due(done))
    return Deck(load(*drops) if drops else [c for c in load() if c.drop.isdigit()])
