"""How well the cost model does on published runs, and how long the planner takes: `python
tools/bench/cost_model.py`. The sets are in three_axes/plan/validation.py.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import replace

from report import median_seconds, save, timed

from three_axes.paper.pipelines import SCHEDULES
from three_axes.plan import CLUSTERS, MODELS, Job, plan, validation
from three_axes.plan.frameworks import TEXTBOOK

COMMAND = ("-m", "three_axes", "plan", "llama-3-70b", "--gpus", "64")
SPACES = (("llama-3-70b", 64, 128, 8192), ("llama-3-405b", 16384, 2048, 8192))


def planning() -> list[list[str]]:
    """How long the planner takes for each job, under the framework's schedules and under all: rows."""
    rows = []
    for model, gpus, batch, seq_len in SPACES:
        for schedules in (TEXTBOOK.schedules, tuple(SCHEDULES)):
            framework = replace(TEXTBOOK, schedules=schedules)
            job = Job(MODELS[model], CLUSTERS["dgx-h100"], batch, seq_len, framework)
            layouts, seconds = plan(job, gpus=gpus).looked_at, median_seconds(lambda: plan(job, gpus=gpus), 9)
            name = f"{model} on {gpus:,} GPUs, {len(schedules)} schedules"
            each = f"{1e6 * seconds / layouts:.0f} µs"
            rows.append([name, f"{layouts:,}", f"{1e3 * seconds:.0f} ms", each])
    return rows


def start_up(pairs: int = 15) -> list[str]:
    """The whole command beside a Python that imports NumPy and nothing else, in turns: a row."""

    def took(*arguments: str) -> float:
        command = [sys.executable, *arguments]
        return timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))

    both = [(took(*COMMAND), took("-c", "import numpy")) for _ in range(pairs)]
    ratio = statistics.median(command / alone for command, alone in both)
    command, alone = (statistics.median(times) for times in zip(*both))
    return [" ".join(COMMAND[1:]), f"{1e3 * command:.0f} ms", f"{1e3 * alone:.0f} ms", f"{ratio:.1f}"]


if __name__ == "__main__":
    errors = validation.table()
    save("cost_model", "The cost model against published runs, seconds per step", errors.columns, errors.rows)
    save("planner", "The planner", ["", "layouts", "all of them", "each"], planning())
    columns = ["command", "whole", "python -c 'import numpy'", "ratio, median of pairs"]
    note = "Compiled anew in each run: PYTHONDONTWRITEBYTECODE is set." * sys.dont_write_bytecode
    save("start_up", "How soon the planner answers", columns, [start_up()], note)
