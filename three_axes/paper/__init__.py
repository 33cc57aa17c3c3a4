"""What can be redone by hand: collectives, schedules, where ranks stand. NumPy at most."""

from ..doors import door

__getattr__, __dir__ = door(
    __name__,
    axes=["BUSIEST"],
    collectives=["algorithmic_bytes", "hop_by_hop", "seconds"],
    hardware=["Network"],
    pipelines=["SCHEDULES"],
    placement=["axis_between", "coordinates", "crosses", "group", "groups", "stride"],
    schedules=["Op", "Schedule", "gpipe", "interleaved", "one_f_one_b", "zb_h1", "zb_h2", "zb_v"],
    simulation=["Stuck", "Timeline", "Times", "paper", "simulate"],
)
