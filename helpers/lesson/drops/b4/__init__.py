from .drawn import reached
from .reading import look_twice, verdict, watchdog_logs, who_waits
from .runs import RUNS, stop
