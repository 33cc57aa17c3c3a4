"""The pictures of the course's notebooks. Timelines are in `gantt`, pictures with sliders in `explore`."""

from three_axes.doors import door

__getattr__, __dir__ = door(
    __name__,
    comparing=["decision_tree", "layouts", "loss_curves", "ranking", "scaling", "waterfall"],
    cutting=["cuts", "matrix_cuts"],
    explore=["Explorer", "memory", "orders", "schedule_title", "schedules", "stages_of"],
    gantt=["timeline"],
    holding=["PARTS", "memory_by_stage", "memory_traces", "segments", "states"],
    picture=["Picture"],
    sending=["placement", "reached", "ring", "waiting", "who_to_whom"],
    splitting=["splits"],
)
