"""Formats byte counts, lists of ranks, and tables, which print as text and are displayed in a notebook."""

from __future__ import annotations

import re
import textwrap
from itertools import zip_longest

from .terminal import columns, fold

NARROWEST = 24  # smallest width, in characters, of a column of sentences


def _lines(cell: str, width: int) -> list[str]:
    """The lines of a cell, folded to a width. 'DP 8 · TP 4' is folded beside the dot, not inside 'DP 8'."""
    if len(cell) <= width:
        return [cell]
    kept = re.sub(r"(?<=\w) (?=\w)", "\N{NO-BREAK SPACE}", cell) if " · " in cell else cell
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in textwrap.wrap(kept, width)]


def human(n: float | None) -> str:
    """Bytes to three significant digits, in powers of 1000: 18874368 -> '18.9 MB'. None -> 'n/a'."""
    if n is None:
        return "n/a"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5 or unit == "TB":
            break
        n /= 1000
    if unit == "B":
        return f"{n:.0f} B"
    return f"{n:.{max(0, 2 - (abs(n) >= 9.995) - (abs(n) >= 99.95))}f} {unit}"


class Table:
    """Rows under named columns. `total` is a last row below a line. `note` is a sentence below the table.

    Cells are strings: the caller chooses the digits. The first column and columns with sentences are aligned
    left, the others right.
    """

    def __init__(
        self, columns: list[str], rows: list[list[str]], total: list[str] | None = None, title: str = ""
    ):
        self.columns, self.rows, self.total, self.title, self.note = columns, rows, total, title, ""
        self._left = [i == 0 or any(len(row[i]) > 32 for row in rows) for i in range(len(columns))]

    def __repr__(self) -> str:
        body = [self.columns, *self.rows] + ([self.total] if self.total else [])
        widths = [max(len(r[i]) for r in body) for i in range(len(self.columns))]
        whole = lambda: sum(widths) + 2 * (len(widths) - 1)
        most = columns() or whole()
        below = self._left[-1] and whole() - widths[-1] + NARROWEST > most
        if below:  # sentences of the last column, for which there is no room beside the numbers, go below
            widths.pop()
        foldable = [i for i in range(len(widths)) if self._left[i]]
        while whole() > most and max(widths[i] for i in foldable) > NARROWEST:
            widths[max(foldable, key=lambda i: widths[i])] -= 1
        rows = []
        for row in body:
            lines = [
                "  ".join(c.ljust(w) if left else c.rjust(w) for left, c, w in zip(self._left, parts, widths))
                for parts in zip_longest(*map(_lines, row, widths), fillvalue="")
            ]
            if below and row is not self.columns:
                lines += textwrap.wrap(row[-1], most, initial_indent="    ", subsequent_indent="    ")
            rows.append("\n".join(line.rstrip() for line in lines))
        rule = "─" * whole()
        rows.insert(1, rule)
        if self.total:
            rows.insert(-1, rule)
        return "\n".join([*filter(None, [fold(self.title)]), *rows, *filter(None, [fold(self.note)])])

    def _repr_html_(self) -> str:
        from html import escape

        def row(cells, tag, style=""):
            html = (
                f'<{tag} style="text-align:{"left" if left else "right;white-space:nowrap"};padding:.15em'
                f' .9em">{escape(c)}</{tag}>'
                for left, c in zip(self._left, cells)
            )
            return f'<tr style="{style}">{"".join(html)}</tr>'

        body = "".join(row(r, "td") for r in self.rows)
        if self.total:
            body += row(self.total, "td", "border-top:1px solid currentColor;font-weight:600")
        caption = f'<caption style="text-align:left;padding:.3em .9em">{escape(self.title)}</caption>'
        return (
            f'<table style="font-variant-numeric:tabular-nums">{caption if self.title else ""}'
            f"<thead>{row(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"
            f"{f'<p>{escape(self.note)}</p>' if self.note else ''}"
        )


def ranks(members: list[int], of: int | None = None) -> str:
    """'rank 2', 'ranks 0–3', 'ranks 0, 2 and 3', 'ranks 0–2 and 4–7'. of: the number of all ranks; if
    `members` has so many, 'all 4 ranks' or 'both ranks'.
    """
    members = sorted(members)
    if of is not None and len(members) == of > 1:
        return f"all {of} ranks" if of > 2 else "both ranks"
    if len(members) == 1:
        return f"rank {members[0]}"
    runs: list[list[int]] = []
    for rank in members:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"ranks {parts[0]}"
