"""What the ranks print: whole lines, in rank order, equal output printed once."""

from __future__ import annotations

import os
import re
import sys
import time

from three_axes.table import human, ranks

KEEP = 32_000  # bytes of one rank's output in one call that are kept: so many at the start, and at the end
LEFT_OUT = re.compile(r"… .* in ([\d,]+) lines? left out …")
LINES = 100  # lines of a rank's text that are printed: so many at its start, and at its end
PATIENCE = 10  # seconds after which a call that prints nothing shows how long it may still take


def say(text: str) -> None:
    """Print, even where the output's encoding lacks some of the characters."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.replace("│", "|").encode(encoding, "backslashreplace").decode(encoding), flush=True)


class Captured:
    """The output of one rank in one call. The beginning and the end are kept; what lies between is counted
    and dropped.
    """

    def __init__(self):
        self.head, self.tail = bytearray(), bytearray()
        self.dropped, self.ends = 0, 0  # bytes, and how many of them end a line

    def add(self, data: bytes) -> None:
        """Add output. Bytes that fit neither the beginning nor the end are counted and dropped."""
        room = KEEP - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if (extra := len(self.tail) - KEEP) > 0:
            self.dropped += extra
            self.ends += self.tail.count(b"\n", 0, extra)
            del self.tail[:extra]

    def __str__(self) -> str:
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        if not self.dropped:
            return head + tail
        lines = f"{self.ends + 1:,} line{'s' * (self.ends > 0)}"
        return f"{head}\n… {human(self.dropped)} in {lines} left out …\n{tail}"


def drain(fd: int, into: Captured) -> bool:
    """Read what is waiting at `fd`, at most 4 MiB. Returns False when the other end is closed."""
    for _ in range(64):
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        into.add(data)
    return True


def fold(texts: list[str]) -> str:
    """Make one text from the ranks' texts. A rank that printed nothing is left out; ranks that printed the
    same share one copy.

    A single line is printed behind the rank's name, several lines below it.
    """
    saying: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text := text.rstrip("\n"):
            saying.setdefault(text, []).append(rank)
    parts = []
    for text, members in saying.items():
        body = text.split("\n")
        if (many := len(body) - 2 * LINES) > 1:
            # A rank may have dropped lines already, and its text then has a line that says how many. These
            # count as left out; the line that says so does not.
            cut = [int(found[1].replace(",", "")) - 3 for found in map(LEFT_OUT.fullmatch, body) if found]
            body[LINES:-LINES] = [f"… {many + sum(cut):,} lines left out …"]
        if len(body) == 1:
            parts.append(f"{ranks(members)} │ {text}")
        else:
            parts.append("\n".join([f"{ranks(members)}", *("  │ " + line for line in body)]))
    return "\n".join(parts)


class PrintedStream:
    """The output of a long call while it runs: whole new lines, rank by rank."""

    def __init__(self, captured: list[Captured]):
        self.captured = captured
        self.shown = [0] * len(captured)

    def new(self) -> str:
        """The whole lines that have arrived since the last call of `new`, folded like the final text.

        Of a rank that has printed more than KEEP bytes, the rest is printed when the call ends.
        """
        fresh = []
        for rank, c in enumerate(self.captured):
            end = c.head.rfind(b"\n") + 1
            fresh.append(c.head[self.shown[rank] : end].decode("utf-8", "replace"))
            self.shown[rank] = max(end, self.shown[rank])
        return fold(fresh)

    def rest(self) -> str:
        """When the call has ended: the output that `new` has not returned."""
        texts = []
        for rank, c in enumerate(self.captured):
            unseen = Captured()
            unseen.head, unseen.tail = c.head[self.shown[rank] :], c.tail
            unseen.dropped, unseen.ends = c.dropped, c.ends
            texts.append(str(unseen))
        return fold(texts)


class View:
    """What the reader sees of a call: its output at the end, and already while it runs if it takes longer
    than `after` seconds. While a call prints nothing, a line shows for how many seconds it has run, and the
    limit, `timeout` in seconds.
    """

    def __init__(self, captured: list[Captured], after: float, timeout: float | None):
        self.stream, self.after, self.timeout = PrintedStream(captured), after, timeout
        self.started = self.shown = time.monotonic()
        self.bar = self.line = None
        self.has_printed, self.places = False, ""

    def stands(self, places: str) -> None:
        """Set where the ranks are if none has moved for some seconds, and what was measured; '' when one
        has moved.
        """
        if os.environ.get("THREE_AXES_PROGRESS") != "":  # nothing of it in stored output
            self.places = places  # the variable keeps such lines out of stored outputs

    def tick(self, progress: dict[int, tuple[int, int | None]], n: int) -> None:
        """Print what is new, at most every 0.2 s. progress: rank -> (done, total)."""
        now = time.monotonic()
        if now - self.started < self.after or now - self.shown < 0.2:
            return
        self.shown = now
        text, seconds = self.stream.new(), now - self.started
        self.has_printed = self.has_printed or bool(text or progress)
        if text or self.has_printed and not self.places:
            self._take_line_away()
        if text:
            say(text)
        if self.places or not self.has_printed and seconds > max(self.after, PATIENCE):
            self._show_line(seconds)
        if len(progress) == n:  # the slowest rank is how far the call is
            from tqdm.auto import tqdm

            done, total = min(progress.values(), key=lambda p: p[0])
            self.bar = self.bar or tqdm(total=total, leave=False)
            self.bar.update(done - self.bar.n)

    def end(self) -> None:
        """The call is over: print the output that is left."""
        self._take_line_away()
        if self.bar is not None:
            self.bar.close()
        if text := self.stream.rest():
            say(text)

    def _show_line(self, seconds: float) -> None:
        from tqdm.auto import tqdm

        if self.line is None:
            self.line = tqdm(bar_format="{desc}", leave=False)
        until = "" if self.timeout is None else f" of {self.timeout:g} s at most"
        text = f"The ranks are still running: {seconds:.0f} s{until}. The stop button ends this."
        if self.places:
            text = f"{seconds:.0f} s{until}; {self.places}"
        if self.line.desc != text:
            self.line.set_description_str(text)

    def _take_line_away(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None
