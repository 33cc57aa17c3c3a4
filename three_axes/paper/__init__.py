"""Formulas that can be redone by hand: collectives, schedules, placement of ranks. Needs NumPy at most."""

from ..doors import door

__getattr__, __dir__ = door(
    __name__,
    by_hand=["all_reduce_bytes", "bubble", "layer_activation_bytes", "states_bytes"],
    collectives=["algorithmic_bytes", "hop_by_hop", "seconds"],
    hardware=["Network"],
    pipelines=["SCHEDULES"],
    placement=["Placement", "crosses"],
    schedules=["Op", "Schedule"],
    simulation=["Stuck", "Timeline", "Times", "paper", "simulate"],
)
