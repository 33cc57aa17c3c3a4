"""Computes the frames of the site's three explorers, pictures with sliders that work without a kernel.

A frame is the picture for one setting of the sliders, as text. All frames of `explore.orders`,
`explore.schedules` and `explore.memory` are written as three scripts of at most some hundred kB, which
data/site/site.js draws.

A frame of a schedule is its title and a text for each rank. The text lists the operations in order: 'F3' is
microbatch 3 forward, F3' the same in the rank's second chunk. '.2' before an operation is idle time, in units
of a chunk's forward; every operation takes one unit, but B takes two. A frame of memory has two letters for
each part on each stage: a number in base 64, the index in a list of all sizes in GB.
"""

from __future__ import annotations

import json
import string
from functools import cache
from itertools import product

from helpers.draw import PARTS, Explorer, explore
from three_axes.paper import SCHEDULES, Timeline, paper

LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


def _controls(explorer: Explorer) -> dict:
    keys = ("label", "options", "first")
    return {name: dict(zip(keys, control)) for name, control in explorer.controls.items()}


def ranks_text(timeline: Timeline) -> list[str]:
    """For each rank the text of its operations, as described at the top of this module."""
    chunks = timeline.schedule.v
    texts = []
    for row in timeline.rows:
        text, free = "", 0
        for kind, label, start, end in row:
            begin = round(start * chunks)
            if begin > free:
                text += f".{begin - free}"
            text += kind + label
            free = round(end * chunks)
        texts.append(text)
    return texts


@cache
def schedule_frames() -> dict[str, object]:
    """'1F1B 4 8 1' -> [title, a text for each rank], or a sentence on why this setting is impossible.

    The last number is v, which only the interleaved schedule uses; for others it is 1.
    """
    controls = explore.schedules().controls
    frames: dict[str, object] = {}
    for name, p, m in product(*(controls[c][1] for c in ("schedule", "p", "m"))):
        for v in controls["v"][1] if SCHEDULES[name].chunks == 0 else [1]:
            try:
                timeline = paper(SCHEDULES[name].make(p, m, v))
                frame = [explore.schedule_title(timeline), *ranks_text(timeline)]
            except ValueError as e:
                frame = str(e)
            frames[f"{name} {p} {m} {v}"] = frame
    return frames


@cache
def order_frames() -> dict[str, object]:
    """'8 4', m and p -> GPipe and 1F1B: [name, a text for each rank] of each. The page draws them up to any
    unit of time.
    """
    controls = explore.orders().controls
    drawn = lambda name, p, m: [name, *ranks_text(paper(SCHEDULES[name].make(p, m)))]
    return {
        f"{m} {p}": [drawn(name, p, m) for name in ("GPipe", "1F1B")]
        for m, p in product(*(controls[name][1] for name in ("m", "p")))
    }


@cache
def memory_frames() -> dict[str, object]:
    """parts: their names. gigabytes: all sizes that occur. frames: a text for each setting, in the order of
    `itertools.product` over the controls; a text that starts with '!' is the reason why a setting is
    impossible. holds: GB of the device.
    """
    options = [values for _, values, _ in explore.memory().controls.values()]
    places: dict[float, int] = {}
    frames = []
    for values in product(*options):
        try:
            _, stages, capacity = explore.stages_of(*values)
        except ValueError as e:
            frames.append(f"!{e}")
            continue
        sizes = [round(stage.get(part, 0.0) / 1e9, 2) for stage in stages for part in PARTS]
        numbers = [places.setdefault(size, len(places)) for size in sizes]
        frames.append("".join(LETTERS[number // 64] + LETTERS[number % 64] for number in numbers))
    return {"parts": list(PARTS), "gigabytes": list(places), "frames": frames, "holds": capacity / 1e9}


FRAMES = {
    "orders": lambda: {"frames": order_frames()},
    "schedules": lambda: {"frames": schedule_frames()},
    "memory": memory_frames,
}


@cache
def script(name: str) -> str:
    """frames-orders.js and so on: `FRAMES.orders`, with the explorer's controls and frames."""
    controls = _controls(getattr(explore, name)())
    data = json.dumps({"controls": controls, **FRAMES[name]()}, separators=(",", ":"))
    return f"(window.FRAMES ??= {{}}).{name} = {data};\n"
