"""Asked to stop: a run that gets SIGTERM, or Ctrl-C, saves and ends after a step that all ranks agree on.

A launcher passes a signal on to its own ranks only, and each rank learns of it at another moment. So a rank
notes that it was asked, and says so in the all-reduce that every step has; whoever hears it stops there.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 20.0  # seconds for the others to hear of it; torchrun kills after 30


class Stop:
    """What the system asked of this rank. signal: the number of the first that came, 0 if none did.

    leave: called with a sentence where the rank ends at once, and does not return: before `joined` is set,
    when the others do not hear of it within PATIENCE, and at a second Ctrl-C. A second SIGTERM changes
    nothing, for many a system sends it to the launcher and to the ranks, and the launcher passes it on.
    """

    def __init__(self, leave: Callable[[str], None] = lambda why: None):
        self.signal, self.joined, self._came, self._leave = 0, False, 0.0, leave
        self._agreed = threading.Event()

    @property
    def name(self) -> str:
        """'SIGTERM', or 'A signal to another rank' where none came to this one."""
        return signal.Signals(self.signal).name if self.signal else "A signal to another rank"

    @property
    def status(self) -> int:
        """What this process exits with, as shells have it."""
        return 128 + (self.signal or signal.SIGTERM)

    def agreed(self) -> None:
        """All ranks stop after this step; saving may take as long as it takes."""
        self._agreed.set()

    def listen(self, signals: socket.socket) -> None:
        """Until the other end closes. On a thread, since the main one may be in a collective, which no signal
        ends.
        """
        while number := signals.recv(1):
            if not self.signal:
                self.signal, self._came = number[0], time.monotonic()
                if not self.joined:
                    self._leave(f"{self.name} came before the ranks had met, so nothing was trained")
                threading.Thread(target=self._wait, daemon=True).start()
            elif number[0] == signal.SIGINT and time.monotonic() > self._came + 1:
                self._leave("Ctrl-C came again, so this rank ends without saving")

    def _wait(self) -> None:
        if not self._agreed.wait(PATIENCE):
            self._leave(f"{self.name} came, and the others have not heard of it within {PATIENCE:g} s")


@contextmanager
def listening(leave: Callable[[str], None]) -> Iterator[Stop]:
    """Inside, signals are noted in a Stop. Only the main thread can listen; on another nothing is noted."""
    stop = Stop(leave)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals, to_thread = socket.socketpair()
    to_thread.setblocking(False)
    threading.Thread(target=stop.listen, args=(signals,), daemon=True).start()
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]  # as nohup does
    earlier = {number: signal.signal(number, lambda *_: None) for number in SIGNALS if number not in ignored}
    earlier_descriptor = signal.set_wakeup_fd(to_thread.fileno(), warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(earlier_descriptor)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        to_thread.close()
        stop.agreed()


def command() -> str:
    """What started this run, so that it can be started again: torchrun's command line, or our own."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return shlex.join(psutil.Process(os.getppid()).cmdline() if under_torchrun else sys.orig_argv)
