"""Ranks in processes of their own, beside a notebook's: `World` starts them, calls functions on them, and
explains errors.
"""

from three_axes.doors import door

# module -> its public names. A module is loaded when one of its names is first used.
__getattr__, __dir__ = door(
    __name__,
    current=[
        "around",
        "count_from_here",
        "counted_so_far",
        "finish_collectives",
        "open_collectives",
        "peak_memory",
        "rank",
        "rank_state",
        "span",
        "spans_so_far",
    ],
    failure=["RankError", "RankStatus", "RanksInterrupted"],
    flight=["PREFIX"],
    launched=["join", "owning", "together"],
    memory=["by_kind", "saved_activations", "storages"],
    output=["LEFT_OUT"],
    ports=["free_port"],
    server=["undisturbed", "warm"],
    world=["World", "open_worlds"],
)
