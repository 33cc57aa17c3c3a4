"""What the ranks print: whole lines, in rank order, equal output told once."""

from __future__ import annotations

import os
import re
import sys
import time

from three_axes.table import human, ranks

KEEP = 32_000  # bytes kept of the beginning, and as many of the end, of one rank's output in one call
LEFT_OUT = re.compile(r"… .* in ([\d,]+) lines? left out …")
LINES = 100  # shown of the beginning, and as many of the end, of what one rank prints at once
PATIENCE = 10  # seconds after which a silent call says how long it will wait


def say(text: str) -> None:
    """Print, also where the output cannot take every character."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.replace("│", "|").encode(encoding, "backslashreplace").decode(encoding), flush=True)


class Captured:
    """The output of one rank in one call: beginning and end kept, the middle of a flood counted and
    dropped.
    """

    def __init__(self):
        self.head, self.tail = bytearray(), bytearray()
        self.dropped, self.ends = 0, 0  # bytes, and how many of them end a line

    def add(self, data: bytes) -> None:
        """More output, as it comes. What has no room at either end is counted, not kept."""
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
    """Read what is waiting at `fd`, at most some megabytes. Returns False when the other end is closed."""
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
    """One text from one per rank. Silent ranks are left out, ranks that say the same share one copy.

    A single line stands behind the rank's name, several stand below it.
    """
    saying: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text := text.rstrip("\n"):
            saying.setdefault(text, []).append(rank)
    parts = []
    for text, members in saying.items():
        body = text.split("\n")
        if (many := len(body) - 2 * LINES) > 1:
            # A rank may have dropped some already. The lines cut there count once, and the one that says so
            # is none.
            cut = [int(found[1].replace(",", "")) - 3 for found in map(LEFT_OUT.fullmatch, body) if found]
            body[LINES:-LINES] = [f"… {many + sum(cut):,} lines left out …"]
        if len(body) == 1:
            parts.append(f"{ranks(members)} │ {text}")
        else:
            parts.append("\n".join([f"{ranks(members)}", *("  │ " + line for line in body)]))
    return "\n".join(parts)


class Stream:
    """What a long call shows while it runs: whole new lines, rank by rank."""

    def __init__(self, captured: list[Captured]):
        self.captured = captured
        self.shown = [0] * len(captured)

    def new(self) -> str:
        """The whole lines that have come since the last time, folded as the final text would be.

        Once a rank is past what is kept of its beginning it is told at the end only.
        """
        fresh = []
        for rank, c in enumerate(self.captured):
            end = c.head.rfind(b"\n") + 1
            fresh.append(c.head[self.shown[rank] : end].decode("utf-8", "replace"))
            self.shown[rank] = max(end, self.shown[rank])
        return fold(fresh)

    def rest(self) -> str:
        """What `new` has not shown when the call has ended."""
        texts = []
        for rank, c in enumerate(self.captured):
            unseen = Captured()
            unseen.head, unseen.tail = c.head[self.shown[rank] :], c.tail
            unseen.dropped, unseen.ends = c.dropped, c.ends
            texts.append(str(unseen))
        return fold(texts)


class View:
    """What the reader sees of a call: its output at the end, and on the way if it takes longer than `after`
    seconds. For a call that prints nothing there is a line while it runs: for how long by now, and for how
    long at most, which is `timeout`, in seconds.
    """

    def __init__(self, captured: list[Captured], after: float, timeout: float | None):
        self.stream, self.after, self.timeout = Stream(captured), after, timeout
        self.started = self.shown = time.monotonic()
        self.bar = self.line = None
        self.told, self.places = False, ""

    def stands(self, places: str) -> None:
        """Where the ranks are that have not moved for some seconds; '' when one has moved."""
        if os.environ.get("THREE_AXES_PROGRESS") != "":  # nothing of it in stored output
            self.places = places

    def tick(self, progress: dict[int, tuple[int, int | None]], n: int) -> None:
        """The call goes on: print what is new, every 0.2 s at most. progress: rank -> (done, total)."""
        now = time.monotonic()
        if now - self.started < self.after or now - self.shown < 0.2:
            return
        self.shown = now
        text, seconds = self.stream.new(), now - self.started
        self.told = self.told or bool(text or progress)
        if text or self.told and not self.places:
            self._take_line_away()
        if text:
            say(text)
        if self.places or not self.told and seconds > max(self.after, PATIENCE):
            self._show_line(seconds)
        if len(progress) == n:  # the slowest rank is how far the call is
            from tqdm.auto import tqdm

            done, total = min(progress.values(), key=lambda p: p[0])
            self.bar = self.bar or tqdm(total=total, leave=False)
            self.bar.update(done - self.bar.n)

    def end(self) -> None:
        """The call is over: print what has not been shown."""
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
        said = f"The ranks are still running: {seconds:.0f} s{until}. The stop button ends this."
        if self.places:
            said = f"{seconds:.0f} s{until}; nothing moves. {self.places}"
        if self.line.desc != said:
            self.line.set_description_str(said)

    def _take_line_away(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None
