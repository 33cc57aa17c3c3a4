"""Real ranks beside the kernel: start, call, fail, explain."""

from three_axes.doors import door

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
