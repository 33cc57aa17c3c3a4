"""How long a slider takes to redraw its picture: the median over the settings of each explorer, in this process without a browser."""

import statistics
import time

from helpers.lesson import explore


def latency(make) -> float:
    """Seconds from a new setting to the picture's bytes, median over each value of each control."""
    explorer = make()
    explorer.picture.png()
    took = []
    for name, (_, options, first) in explorer.controls.items():
        for option in (o for o in options if o != first):
            start = time.perf_counter()
            explorer.set(**{name: option})
            explorer.picture.png()
            took.append(time.perf_counter() - start)
        explorer.set(**{name: first})
    return statistics.median(took)


if __name__ == "__main__":
    for make in (explore.schedules, explore.memory, explore.plans):
        print(f"{make.__name__:10} {1e3 * latency(make):4.0f} ms from a setting to its picture (median)")
