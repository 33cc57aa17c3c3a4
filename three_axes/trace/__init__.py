"""Real models on fake ranks: what one rank computes, holds and sends."""

from ..doors import door

__getattr__, __dir__ = door(
    __name__, run=["Trace", "trace"], tensor_plan=["merged_plan", "usual_plan"], traced_model=["FeedForward"]
)
