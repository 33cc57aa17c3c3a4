"""Beyond, b4: jobs that stand still. Who never came, on which line, and why."""

from .clinic import CAUSES, clinic, diagnoses, truth, ward
from .mending import mended, train
from .never_came import never, who_never_came
from .reading import look_twice, verdict, watchdog_logs
from .runs import RUNS, stop
