"""Beyond, b4: jobs that stand still. Who never came, on which line, and why."""

from .reading import look_twice, verdict, watchdog_logs, who_waits
from .runs import RUNS, stop
