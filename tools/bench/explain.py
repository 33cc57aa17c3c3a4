"""Explaining traces: `python tools/bench/explain.py [TRACE …]`.

How long a large trace takes and how much memory; and, where HolisticTraceAnalysis is installed and traces of
GPUs are given, its figures beside ours on the same files: idle and computing time of the GPU, and the share
of communication that computation hides.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile

from report import save, timed

from three_axes.explain.reading import read
from three_axes.explain.split import split

MEGABYTES = 100


def large(path: str) -> None:
    """A trace of MEGABYTES, of kernels as an A100 wrote them."""
    draw, size, at, i = random.Random(0), 0, 0.0, 0
    with open(path, "w") as f:
        f.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": [\n')
        while size < MEGABYTES * 1e6:
            i, at = i + 1, at + draw.uniform(5, 50)
            name = "void cutlass::Kernel<gemm>" * 3 if i % 20 else "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
            both = {"correlation": i, "External id": i}
            kernel = {"queued": 0, "device": 0, "stream": 7, "grid": [64, 1, 1], "block": [128, 1, 1]} | both
            for cat, ts, args in (("cuda_runtime", at - 30, both), ("kernel", at, kernel)):
                event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts}
                text = json.dumps(event | {"dur": draw.uniform(2, 40), "args": args}, indent=2)
                size += f.write(text + ",\n")
        f.write('{"ph": "i", "name": "end", "ts": 0}], "traceName": "x"}')


def ours(path: str) -> tuple[float, float, float]:
    """Percent: GPU idle, computing; communication hidden."""
    one = split(read(path))
    idle = sum(one.parts[part] for part in ("waiting for data", "waiting for Python", "idle"))
    computing = one.parts["compute"] + one.parts["optimizer"]
    return 100 * idle / one.seconds, 100 * computing / one.seconds, 100 * one.hidden


def theirs(path: str, rank: int) -> tuple[float, float, float]:
    from hta.trace_analysis import TraceAnalysis

    folder = os.path.dirname(os.path.abspath(path))
    made = TraceAnalysis(trace_files={rank: path}, trace_dir=folder, include_last_profiler_step=True)
    split_up = made.get_temporal_breakdown(visualize=False).iloc[0]
    hidden = made.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    return split_up["idle_time_pctg"], split_up["compute_time_pctg"], hidden


def main(traces: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        large(path := os.path.join(folder, "large.json"))
        command = [sys.executable, "-m", "three_axes", "explain", path]
        seconds = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    note = (
        f"A trace of {MEGABYTES} MB: {seconds:.1f} s ({used.ru_utime + used.ru_stime:.1f} s of the"
        f" processor), {used.ru_maxrss / 1e3:,.0f} MB of memory."
    )
    rows = []
    for path in traces:
        mine, rank = ours(path), read(path).rank or 0
        try:
            other = theirs(path, rank)
        except ImportError:
            other = None
        for i, what in enumerate(("GPU idle", "GPU computes", "communication hidden")):
            cells = ["", ""] if other is None else [f"{other[i]:.2f} %", f"{mine[i] - other[i]:+.2f}"]
            rows.append([os.path.basename(path), what, f"{mine[i]:.2f} %", *cells])
    columns = ["trace", "", "helpers explain", "HolisticTraceAnalysis", "points apart"]
    save("explain", "Explaining traces", columns, rows, note, packages=("HolisticTraceAnalysis",))


if __name__ == "__main__":
    main(sys.argv[1:])
