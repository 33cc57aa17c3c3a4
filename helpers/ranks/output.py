"""What the ranks print: whole lines, in rank order, equal output printed once."""

from __future__ import annotations

import os
import re
import sys
import time

from three_axes.table import human, ranks

KEEP = 32_000  # bytes that are kept of the start of a rank's output in a call, and as many of its end
LEFT_OUT = re.compile(r"… .* in ([\d,]+) lines? left out …")  # in place of omitted lines; group 1: how many
LINES = 100  # lines that are printed of the start of a rank's text, and as many of its end
PATIENCE = 10  # seconds after which a call that prints nothing shows its seconds and its time limit


def say(text: str) -> None:
    """Print, even where the output's encoding lacks some of the characters."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.replace("│", "|").encode(encoding, "backslashreplace").decode(encoding), flush=True)


class Captured:
    """The output of one rank in one call. Its start and its end are kept; the bytes between them are counted
    and dropped.
    """

    def __init__(self):
        self.head, self.tail = bytearray(), bytearray()
        self.dropped, self.ends = 0, 0  # dropped bytes, and line ends among them

    def add(self, data: bytes) -> None:
        """Add output. Bytes that fit neither into the start nor into the end are counted and dropped."""
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
    """Read the bytes that wait at `fd`, which does not block, at most 4 MiB. Returns False when the other end
    is closed.
    """
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
    printed_by: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text := text.rstrip("\n"):
            printed_by.setdefault(text, []).append(rank)
    parts = []
    width = max((len(ranks(members)) for text, members in printed_by.items() if "\n" not in text), default=0)
    for text, members in printed_by.items():
        body = text.split("\n")
        if (surplus := len(body) - 2 * LINES) > 1:
            # If `Captured` has dropped output in L lines, it dropped L - 1 line ends. The notice about that
            # added two, so `body` has L - 3 lines fewer than the rank printed.
            dropped = [int(found[1].replace(",", "")) - 3 for found in map(LEFT_OUT.fullmatch, body) if found]
            body[LINES:-LINES] = [f"… {surplus + sum(dropped):,} lines left out …"]
        if len(body) == 1:
            parts.append(f"{ranks(members):{width}} │ {text}")
        else:
            parts.append("\n".join([f"{ranks(members)}", *("  │ " + line for line in body)]))
    return "\n".join(parts)


class PrintedStream:
    """The output of a long call while it runs: whole new lines, rank by rank."""

    def __init__(self, captured: list[Captured]):
        self.captured = captured
        self.printed = [0] * len(captured)  # bytes of each rank's head that are printed already

    def new(self) -> str:
        """The whole lines that have arrived since the last call of `new`, folded like the final text.

        Of a rank that has printed more than KEEP bytes, the rest is printed when the call ends.
        """
        fresh = []
        for rank, c in enumerate(self.captured):
            end = c.head.rfind(b"\n") + 1
            fresh.append(c.head[self.printed[rank] : end].decode("utf-8", "replace"))
            self.printed[rank] = max(end, self.printed[rank])
        return fold(fresh)

    def rest(self) -> str:
        """When the call has ended: the output that `new` has not returned."""
        texts = []
        for rank, c in enumerate(self.captured):
            rest = Captured()
            rest.head, rest.tail = c.head[self.printed[rank] :], c.tail
            rest.dropped, rest.ends = c.dropped, c.ends
            texts.append(str(rest))
        return fold(texts)


class View:
    """What the reader sees of a call: its output at its end and, if it takes longer than `after` seconds,
    also while it runs. While a call prints nothing, a line shows for how many seconds it has run, and its
    `timeout` in seconds. The same line shows where the ranks are if none of them moves.
    """

    def __init__(self, captured: list[Captured], after: float, timeout: float | None):
        self.stream, self.after, self.timeout = PrintedStream(captured), after, timeout
        self.started = self.updated = time.monotonic()
        self.bar = self.line = None
        self.has_printed, self.places = False, ""

    def set_places(self, places: str) -> None:
        """Set where the ranks are if none has moved for some seconds, and what was measured; '' when one
        has moved.
        """
        # Set to "", the variable keeps such lines out of stored outputs.
        if os.environ.get("THREE_AXES_PROGRESS") != "":
            self.places = places

    def tick(self, progress: dict[int, tuple[int, int | None]], n: int) -> None:
        """After `after` seconds, print new output, at most every 0.2 s. progress: rank -> (steps done, their
        number or None). n: number of ranks; when all have reported progress, a bar shows that of the slowest.
        """
        now = time.monotonic()
        if now - self.started < self.after or now - self.updated < 0.2:
            return
        self.updated = now
        text, seconds = self.stream.new(), now - self.started
        self.has_printed = self.has_printed or bool(text or progress)
        if text or self.has_printed and not self.places:
            self._remove_line()
        if text:
            say(text)
        if self.places or not self.has_printed and seconds > max(self.after, PATIENCE):
            self._show_line(seconds)
        if len(progress) == n:
            from tqdm.auto import tqdm

            done, total = min(progress.values(), key=lambda p: p[0])
            self.bar = self.bar or tqdm(total=total, leave=False)
            self.bar.update(done - self.bar.n)

    def end(self) -> None:
        """The call is over: print the output that is left."""
        self._remove_line()
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

    def _remove_line(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None
