"""Explorers: the reader moves a slider, and a picture shows what the theory predicts. Without a kernel, the
picture of the first setting is displayed.

`orders()` and `schedules()` are for pipelines, `memory()` for what fits, `plans()` for what is fastest. Every
explorer is an `Explorer`: named controls, and a function from their values to a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from three_axes.paper import SCHEDULES, simulation
from three_axes.plan import CLUSTERS, MODELS, Job, Layout, estimate, find_model, plan

from ..live import live
from . import gantt, memory_by_stage, ranking
from .picture import Picture

CONTROLS = 0.65  # inches of two rows of controls; a picture is lower by this, so that both fit on a screen
UNTIL = "until unit"  # label of the control `until` (see `Explorer`)


class Explorer:
    """Controls above a picture. draw(**values) returns a `Picture`, or raises ValueError, whose message is
    then displayed.

    controls: name -> (label, possible values, first value). `set(**values)` moves them. `picture` is the last
    picture that could be drawn; `refusal` is the reason why the present values could not be drawn, or "".
    ends: for a timeline that can be drawn up to a moment. ends(**values) returns the last moment, in units of
    time. The explorer then has one more control, `until`, from 1 to the last moment, and a button that plays:
    it moves `until` from 1 on. At first `until` is the last moment.
    """

    def __init__(
        self,
        draw: Callable[..., Picture],
        controls: dict[str, tuple[str, list, object]],
        ends: Callable[..., int] | None = None,
    ):
        self.draw, self.controls, self.ends = draw, controls, ends
        self.values = {name: first for name, (_, _, first) in controls.items()}
        if ends:
            self.values["until"] = self._end()
        self.refusal = ""
        self.picture = draw(**self.values)
        self._widgets: dict = {}

    def _end(self) -> int:
        """The last moment, for the present values of the other controls."""
        return self.ends(**{name: self.values[name] for name in self.controls}) if self.ends else 0

    def _possible(self, name: str) -> list:
        return list(range(1, self._end() + 1)) if name == "until" else self.controls[name][1]

    def set(self, **values) -> None:
        """Move controls, and draw again. Raises ValueError for a control or a value that does not exist."""
        for name, value in values.items():
            if name not in self.values:
                raise ValueError(f"{name}={value!r}: choose from the controls {', '.join(self.values)}")
            if value not in (possible := self._possible(name)):
                raise ValueError(f"{name}={value!r}: choose from {', '.join(map(str, possible))}")
        was_at_end = self.ends and self.values["until"] == self._end()
        self.values |= values
        if self.ends and "until" not in values:
            self.values["until"] = self._end() if was_at_end else min(self.values["until"], self._end())
        try:
            self.picture, self.refusal = self.draw(**self.values), ""
        except ValueError as e:
            self.refusal = str(e)  # the last picture stays, with the reason why this one cannot be drawn

    def __repr__(self) -> str:
        labels = {name: label for name, (label, *_) in self.controls.items()} | {"until": UNTIL}
        at = ", ".join(f"{labels[name]} {value}" for name, value in self.values.items())
        return f"{at}\n{self.picture!r}"

    def _repr_mimebundle_(self, **_):
        """Sliders where a kernel runs; the picture where none does."""
        import ipywidgets as widgets

        whole = widgets.Layout(max_width="100%", align_self="flex-start")  # its own size, if there is room
        image = widgets.Image(value=self.picture.png(), format="png", layout=whole)
        image.add_class("three-axes-explorer")
        words = widgets.HTML()
        for name, (label, options, _) in self.controls.items():
            how = {"options": options, "value": self.values[name], "description": label + "\u2002"}
            if isinstance(self.values[name], int):
                control = widgets.SelectionSlider(continuous_update=False, **how)
            else:
                control = widgets.Dropdown(**how)
            self._widgets[name] = control
        playing = []
        if self.ends:
            span = {"min": 1, "max": self._end(), "value": self.values["until"]}
            # Not continuous: such a slider writes a value of its own when the kernel changes its range.
            how = {"description": UNTIL + "\u2002", "continuous_update": False}
            self._widgets["until"] = widgets.IntSlider(**how, **span)
            playing = [self._widgets["until"], widgets.Play(interval=500, **span)]
            # The page links button and slider, and copies the button's value first: both start with `span`.
            widgets.jslink((playing[1], "value"), (playing[0], "value"))

        def moved(name: str, value) -> None:
            if value == self.values[name]:
                return
            self.set(**{name: value})
            # Another setting has another last unit. It is sent before the picture, so that the button works
            # when the picture appears. The link gives the button its value.
            if playing and name != "until":
                slider, button = playing
                with slider.hold_sync():
                    slider.max, slider.value = self._end(), self.values["until"]
                button.max = self._end()
            image.value, words.value = self.picture.png(), f"<b>{escape(self.refusal)}</b>"
            image.layout.display = "none" if self.refusal else None  # no old picture beside a refusal

        for name, control in self._widgets.items():
            control.style.description_width = "initial"
            control.observe(lambda change, name=name: moved(name, change["new"]), names="value")
        beside = widgets.Layout(flex_flow="row wrap", grid_gap="0 2em")
        rows = widgets.HBox([*self._widgets.values(), *playing[1:]], layout=beside)
        box = widgets.VBox([rows, words, image])
        bundle, metadata = self.picture._repr_mimebundle_()
        return {**bundle, "text/plain": repr(self), **live(box)}, metadata


class _Until:
    """The start of a simulated timeline, up to `until`, with the time axis of the whole timeline."""

    def __init__(self, whole: simulation.Timeline, until: float):
        self.unit, self.level_unit, self.makespan = whole.unit, whole.level_unit, whole.makespan
        self.schedule, self.until = whole.schedule, until
        self.rows = [
            [(*what, start, min(stop, until)) for *what, start, stop in row if start < until]
            for row in whole.rows
        ]
        self.levels = [[level for level in row if level[0] < until] for row in whole.levels]

    def peak(self, rank: int) -> int:
        """The most microbatches that the rank has held until then."""
        return max((held for _, held in self.levels[rank]), default=0)


def _timelines(p: int, m: int) -> list[simulation.Timeline]:
    """Timelines of GPipe and 1F1B by theory. Forward takes 1 unit, backward 2."""
    return [simulation.paper(SCHEDULES[name].make(p, m, 1)) for name in ("GPipe", "1F1B")]


def draw_orders(p: int, m: int, until: int) -> Picture:
    """GPipe above 1F1B on one axis, up to the unit `until`. The title of a timeline that has ended by then
    has its length.
    """
    panels = {
        line.schedule.name + f": {line.makespan:.0f} units" * (until >= line.makespan): _Until(line, until)
        for line in _timelines(p, m)
    }
    return gantt.timeline(panels, memory=True, high=gantt.SCREEN - CONTROLS)


def orders(p: int = 4, m: int = 8) -> Explorer:
    """GPipe and 1F1B, one above the other, unit by unit."""
    return Explorer(
        draw_orders,
        {"m": ("microbatches m", [1, 2, 4, 8, 16], m), "p": ("stages p", [2, 4], p)},
        ends=lambda p, m: math.ceil(max(line.makespan for line in _timelines(p, m))),
    )


def draw_schedule(schedule: str, p: int, m: int, v: int) -> Picture:
    """A schedule by theory: forward takes 1 unit, backward 2. With v chunks, each chunk takes 1/v of that.

    Raises ValueError.
    """
    timeline = simulation.paper(SCHEDULES[schedule].make(p, m, v))
    high = gantt.SCREEN - CONTROLS
    return gantt.timeline(timeline, schedule_title(timeline), memory=True, high=high)


def schedule_title(timeline: simulation.Timeline) -> str:
    """The length and memory of a simulated schedule, in a line."""
    schedule = timeline.schedule
    return (
        f"{schedule.name}, p = {schedule.p}, m = {schedule.m}"
        + (f", v = {schedule.v}" if schedule.v > 1 else "")
        + f": {timeline.makespan:.4g} units, bubble {timeline.bubble:.1%}, at most"
        f" {timeline.held:.3g} microbatches in flight"
    )


def schedules(schedule: str = "1F1B", p: int = 4, m: int = 8, v: int = 2) -> Explorer:
    """Choose a schedule, stages, microbatches and chunks. v counts for the interleaved one only."""
    return Explorer(
        draw_schedule,
        {
            "schedule": ("schedule", list(SCHEDULES), schedule),
            "p": ("stages p", [2, 4, 8], p),
            "m": ("microbatches m", list(range(1, 33)), m),
            "v": ("chunks v", [2, 3, 4], v),
        },
    )


def draw_memory(model: str, d: int, t: int, p: int, b: int, zero: int, recompute: str) -> Picture:
    """The bytes on a GPU of each stage, as `stages_of` computes them. Raises ValueError."""
    layout, stages, capacity = stages_of(model, d, t, p, b, zero, recompute)
    return memory_by_stage(stages, capacity, f"{model} on {layout.ranks} GPUs: {layout}")


def stages_of(
    model: str, d: int, t: int, p: int, b: int, zero: int, recompute: str
) -> tuple[Layout, list[dict[str, float]], float]:
    """(layout, bytes by kind on a GPU of each stage, bytes of an H100's memory). A step has 64 sequences for
    each pipeline, of 8192 tokens for Llama 3 and 4096 for other models. Raises ValueError.
    """
    job = Job(find_model(model), global_batch=64 * d, seq_len=8192 if "llama-3" in model else 4096)
    layout = Layout(dp=d, tp=t, pp=p, microbatch=b, zero=zero, recompute=recompute)
    return layout, estimate(job, layout).stages, job.cluster.device.memory


def memory(model: str = "llama-3-70b") -> Explorer:
    """Choose a layout; the picture has a bar of bytes for each pipeline stage, and the memory of an H100."""
    return Explorer(
        draw_memory,
        {
            "model": ("model", ["llama-2-7b", "llama-2-13b", "llama-3-70b", "llama-3-405b"], model),
            "d": ("DP d", [1, 2, 4, 8, 16, 64], 4),
            "t": ("TP t", [1, 2, 4, 8], 8),
            "p": ("PP p", [1, 2, 4, 8], 2),
            "b": ("microbatch b", [1, 2, 4], 1),
            "zero": ("ZeRO", [0, 1, 2, 3], 1),
            "recompute": ("recompute", ["none", "full"], "none"),
        },
    )


def draw_plan(model: str, gpus: int, batch: int, cluster: str) -> Picture:
    """The best layouts by theory, for sequences of 4096 tokens. Raises ValueError where nothing fits."""
    planned = plan(Job(find_model(model), CLUSTERS[cluster], batch, 4096), gpus=gpus)
    planned.best  # raises ValueError, with the reason, if nothing fits
    return ranking(planned, rows=4)


def plans(model: str = "llama-2-13b", gpus: int = 32) -> Explorer:
    """Choose a model and a cluster; the picture has the best (DP, TP, PP), and the parts of their steps."""
    return Explorer(
        draw_plan,
        {
            "model": ("model", [name for name in MODELS if name != "toy"], model),
            "gpus": ("GPUs", [8, 16, 32, 64, 128, 256], gpus),
            "batch": ("batch", [64, 128, 256, 512, 1024], 256),
            "cluster": ("cluster", list(CLUSTERS), "dgx-a100"),
        },
    )
