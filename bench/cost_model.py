"""How well the cost model does on published runs, and how long the planner takes: `python
bench/cost_model.py`. The sets are in helpers/theory/validation.py.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace

from report import save

from helpers.theory import CLUSTERS, MODELS, Job, plan, validation
from helpers.theory.frameworks import TEXTBOOK
from helpers.theory.pipelines import SCHEDULES

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
