"""Beyond, b4: jobs that stand still. Who never came, on which line, and why."""

from .diagnosing import CAUSES, clinic, deal, diagnoses, truth, ward
from .mending import mended, train
from .never_came import never, who_never_came
from .reading import look_twice, verdict, watchdog_logs
from .runs import RUNS, stop
