"""Pipelines on four real ranks against paper: the bubble, and what is in flight. `python bench/schedules.py`

Compute is a timed wait, so that four stages can work at once on any machine; messages are real.
Each row is the best of three runs, since other programs can only add to a bubble.
"""

from helpers import World
from helpers.lesson.drops import d07
from helpers.table import Table
from helpers.theory import schedules


def main() -> None:
    rows, worst = [], 0.0
    with World(4) as world:
        for name, make in (("GPipe", schedules.gpipe), ("1F1B", schedules.one_f_one_b)):
            for m in (4, 8, 16):
                paper, real = schedules.simulate(make(4, m)), d07.on_ranks(world, make(4, m), tries=3)
                held = [real.in_flight(r) for r in range(4)]
                off = real.bubble - paper.bubble
                worst = max(worst, abs(off))
                rows.append([name, str(m), f"{3 / (m + 3):.1%}", f"{paper.bubble:.1%}", f"{real.bubble:.1%}", f"{100 * off:+.1f}",
                             str(held), str(held == [paper.in_flight(r) for r in range(4)])])
    print(Table(["schedule", "m", "(p-1)/(m+p-1)", "simulated", "measured", "points off", "in flight, measured", "as simulated"], rows,
                title=f"four stages, forward {1e3 * d07.UNIT:.0f} ms, backward {2e3 * d07.UNIT:.0f} ms (stand-ins)"))
    print(f"\nlargest difference {100 * worst:.1f} percentage points (to reach: 2)")


if __name__ == "__main__":
    main()
