"""Pipelines: our simulator against real ranks, published bubble rates, PyTorch's own orders, and the clock:
`python tools/bench/schedules.py`.

On the ranks compute is a timed wait, so that all stages can work at once on any machine; messages are real.
Each row of four ranks is the shortest of a few runs (`clock.shortest`). Drop 12's orders on eight run once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from report import median_seconds, save

from drops import d07, d12
from helpers import World
from three_axes.paper import schedules
from three_axes.paper.simulation import simulate
from three_axes.plan.validation import bubble_rates

ROOT = Path(__file__).resolve().parents[2]


def on_ranks() -> None:
    rows, worst = [], 0.0
    with World(4) as world:
        for name, make in (("GPipe", schedules.gpipe), ("1F1B", schedules.one_f_one_b)):
            for m in (4, 8, 16):
                paper, real = simulate(make(4, m)), d07.on_ranks(world, make(4, m))
                held = [real.in_flight(r) for r in range(4)]
                same = "yes" if held == [paper.in_flight(r) for r in range(4)] else f"no: {held}"
                off = real.bubble - paper.bubble
                worst = max(worst, abs(off))
                rates = [f"{rate:.1%}" for rate in (3 / (m + 3), paper.bubble, real.bubble)]
                rows.append([name, str(m), *rates, f"{100 * off:+.1f}", same])
    save(
        "pipelines",
        "Pipelines on four real ranks against paper",
        ["schedule", "m", "(p-1)/(m+p-1)", "simulated", "measured", "points off", "in flight as simulated"],
        rows,
        f"Forward {1e3 * d07.UNIT:.0f} ms, backward {2e3 * d07.UNIT:.0f} ms. Largest difference"
        f" {100 * worst:.1f} percentage points.",
    )
    with World(8) as world:
        table = d12.side_by_side(d12.run_all(world, unit=d07.UNIT))
    save("remedies", "Drop 12's orders on eight real ranks", table.columns, table.rows)


def published() -> dict[str, list[float]]:
    """How far the simulated bubble rates are from Zero Bubble's printed ones, by schedule."""
    off: dict[str, list[float]] = {}
    for r, rate in bubble_rates():
        off.setdefault(r["schedule"], []).append(abs(rate - float(r["computed_bubble_rate"])))
    return off


def of_pytorch() -> list[str]:
    """The schedules of torch.distributed.pipelining whose orders are ours, operation by operation."""
    sys.path.insert(0, str(ROOT / "tests" / "paper"))
    from test_schedules import CHUNKS, PYTORCHS, pytorchs

    return [
        name
        for name, ours in PYTORCHS.items()
        if pytorchs(name, 4, 16, CHUNKS.get(name, 2)) == ours(4, 16, CHUNKS.get(name, 2)).ops
    ]


def clock(p: int, m: int, v: int) -> tuple[int, float]:
    """(operations, seconds to simulate them), median of five."""
    made = schedules.interleaved(p, m, v)
    return sum(map(len, made.ops)), median_seconds(lambda: simulate(made).makespan, 5)


def main() -> None:
    on_ranks()
    rows = [
        [f"published bubble rates, {name}, {len(off)} rows", f"largest difference {max(off):.4f}"]
        for name, off in published().items()
    ]
    rows.append(["orders equal to torch.distributed.pipelining's", ", ".join(of_pytorch())])
    for p, m, v in ((8, 64, 2), (64, 1024, 8)):
        n, seconds = clock(p, m, v)
        told = f"{n:,} operations in {seconds:.3f} s, {n / seconds / 1e6:.1f} million a second"
        rows.append([f"simulated: interleaved, p = {p}, m = {m}, v = {v}", told])
    save("schedules", "Schedules on paper", ["", ""], rows)


if __name__ == "__main__":
    main()
