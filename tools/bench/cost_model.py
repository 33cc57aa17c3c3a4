"""How well the cost model does on published runs, and how long the planner takes: `python
tools/bench/cost_model.py`. The sets are in three_axes/plan/validation.py.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from dataclasses import replace

from report import save

from three_axes.paper.pipelines import SCHEDULES
from three_axes.plan import CLUSTERS, MODELS, Job, plan, validation
from three_axes.plan.frameworks import TEXTBOOK

COMMAND = ("-m", "three_axes", "plan", "llama-3-70b", "--gpus", "64")
SPACES = (("llama-3-70b", 64, 128, 8192), ("llama-3-405b", 16384, 2048, 8192))


def planning(
    model: str, gpus: int, batch: int, seq_len: int, schedules: tuple[str, ...]
) -> tuple[int, float]:
    """(layouts looked at, seconds), median of nine."""
    framework = replace(TEXTBOOK, schedules=schedules)
    job, took = Job(MODELS[model], CLUSTERS["dgx-h100"], batch, seq_len, framework), []
    for _ in range(9):
        start = time.perf_counter()
        planned = plan(job, gpus=gpus)
        took.append(time.perf_counter() - start)
    return planned.looked_at, statistics.median(took)


def start_up(pairs: int = 15) -> list[str]:
    """The whole command beside a Python that imports NumPy and nothing else, in turns: a row."""

    def took(*arguments: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start

    both = [(took(*COMMAND), took("-c", "import numpy")) for _ in range(pairs)]
    ratio = statistics.median(command / alone for command, alone in both)
    command, alone = (statistics.median(times) for times in zip(*both))
    return [" ".join(COMMAND[1:]), f"{1e3 * command:.0f} ms", f"{1e3 * alone:.0f} ms", f"{ratio:.1f}"]


if __name__ == "__main__":
    errors = validation.table()
    save("cost_model", "The cost model against published runs, seconds per step", errors.columns, errors.rows)
    rows = []
    for (model, gpus, batch, seq_len), schedules in itertools.product(
        SPACES, (TEXTBOOK.schedules, tuple(SCHEDULES))
    ):
        layouts, seconds = planning(model, gpus, batch, seq_len, schedules)
        rows.append(
            [
                f"{model} on {gpus:,} GPUs, {len(schedules)} schedules",
                f"{layouts:,}",
                f"{1e3 * seconds:.0f} ms",
                f"{1e6 * seconds / layouts:.0f} µs",
            ]
        )
    save("planner", "The planner", ["", "layouts", "all of them", "each"], rows)
    columns = ["command", "whole", "python -c 'import numpy'", "ratio, median of pairs"]
    note = "Compiled anew in each run: PYTHONDONTWRITEBYTECODE is set." * sys.dont_write_bytecode
    save("start_up", "How soon the planner answers", columns, [start_up()], note)
