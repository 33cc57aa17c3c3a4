"""Lists the axes. An axis's record has its name, what it splits, where its ranks lie, and how often they
communicate.

Layouts, tables, the command line, JSON and the planner loop over this list. The bytes and FLOPs that an axis
adds to a layer are in `plan`.
"""

from __future__ import annotations

from typing import NamedTuple


class Axis(NamedTuple):
    """An axis of parallelism.

    name: the short name, which its size and its flag have. called: the name in prose. splits: what its ranks
    share. talks: how often they send, 'layer', 'microbatch' or once a 'step'. part: the term of a step's
    seconds to which its communication counts. formula: the formula of these seconds. letter: stands for its
    size in formulas; if empty, the name does.

    beside: the axis next to which it lies, on the outer side; if empty, a layout's order decides. folds:
    whether it has no ranks of its own, but regroups those of other axes, as expert parallelism does.
    replicates: whether ranks along it hold the same weights.
    """

    name: str
    called: str
    splits: str
    talks: str
    part: str
    formula: str = ""
    letter: str = ""
    beside: str = ""
    folds: bool = False
    replicates: bool = False

    @property
    def help(self) -> str:
        """The text of the axis's flag in --help."""
        return f"ranks that share {self.splits}"


AXES = (
    Axis(
        "dp",
        "data parallel",
        "the batch",
        "step",
        "data parallel",
        "gradients (and weights with ZeRO) around the ring, less what hides; ZeRO-3's copies, FSDP's ends",
        letter="d",
        replicates=True,
    ),
    Axis(
        "tp",
        "tensor parallel",
        "every matrix",
        "layer",
        "tensor parallel",
        "m · L/p · 4 all-reduces of 2·s·b·h bytes, or gathers and scatters; what shows",
        letter="t",
    ),
    Axis(
        "pp",
        "pipeline",
        "the layers",
        "microbatch",
        "pipeline sends",
        "2·(m·v + p - 1) sends of 2·s·b·h/t bytes, v = 2 for ZB-V; of chunks what shows",
        letter="p",
    ),
    Axis(
        "cp",
        "context parallel",
        "each sequence",
        "layer",
        "context parallel",
        "m · L/p · a rank's keys and values, cp - 1 times, and twice backward; what shows",
        beside="tp",
        replicates=True,
    ),
    Axis(
        "ep",
        "expert parallel",
        "a layer's experts",
        "layer",
        "expert parallel",
        "m · L/p · 4 all-to-alls of 2·s·b·h·k/t bytes; what shows",
        folds=True,
    ),
    Axis("etp", "experts' tensor parallel", "each expert", "layer", "expert parallel", folds=True),
)
# Groups that follow from these sizes: replicas of experts, and groups over which ZeRO shards its state.
GROUPS = (
    Axis("edp", "experts' data parallel", "the batch", "step", "data parallel"),
    Axis("shard", "data parallel, inside a shard", "the batch", "step", "data parallel"),
    Axis("replicate", "data parallel, over shards", "the batch", "step", "data parallel"),
    Axis("eshard", "experts' data parallel, inside a shard", "the batch", "step", "data parallel"),
    Axis("ereplicate", "experts' data parallel, over shards", "the batch", "step", "data parallel"),
)
NAMED = {axis.name: axis for axis in (*AXES, *GROUPS)}
ALWAYS = tuple(axis.name for axis in AXES if not axis.beside and not axis.folds)  # named even at size 1
FOLDED = tuple(axis.name for axis in AXES if axis.folds)
REPLICATING = tuple(axis.name for axis in AXES if axis.replicates)
