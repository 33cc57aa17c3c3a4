"""Drop 08: three axes on eight ranks; who shares a group, which groups leave a node, and bytes by axis."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from drops.measured import Step
from helpers import toy
from helpers.emulate import networks
from helpers.practice.engine import Asked
from helpers.practice.exercise import Answer, right
from helpers.practice.runs import Run
from helpers.ranks import current, memory
from helpers.ranks.world import World
from three_axes.count.clock import shortest
from three_axes.count.traffic import Traffic
from three_axes.paper import placement
from three_axes.paper.placement import Sizes
from three_axes.paper.schedules import one_f_one_b
from three_axes.plan import MODELS, Job, Layout
from three_axes.plan.frameworks import TOY
from three_axes.plan.models import find_model
from three_axes.plan.traffic import sent
from three_axes.table import Table, human

AXES = ("pp", "dp", "tp")


def _layouts(texts: str) -> list[Sizes]:
    """'pp2 tp4, …' -> [{"pp": 2, "tp": 4}, …]"""
    return [{part[:2]: int(part[2:]) for part in text.split()} for text in texts.split(", ")]


def _named(sizes: Sizes) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items()) + ", outermost first,"


# -- practice: the groups of a rank ---------------------------------------------------------------


def groups(rank, sizes):
    """The ranks that `rank` shares a group with along each axis, itself among them, in rising order.

    sizes: axis -> size from the outermost axis to the innermost, such as {"pp": 2, "dp": 2, "tp": 2}. Return
    a list of ranks for each axis, {"pp": [...], "dp": [...], "tp": [...]}.
    """
    # From the innermost axis outwards: neighbours along an axis are as far apart as all inner sizes' product.
    ranks, stride = {}, 1
    for axis, size in reversed(sizes.items()):
        first = rank - rank // stride % size * stride
        ranks[axis] = [first + i * stride for i in range(size)]
        stride *= size
    return ranks


# Megatron-LM's order, Llama 3's, and sizes that are not alike.
GRIDS = _layouts("pp2 dp2 tp2, dp2 pp2 tp2, pp2 dp1 tp4, pp1 dp4 tp2, dp2 pp4 tp1, pp1 dp1 tp8, pp4 dp2 tp1")


def _first_wrong(run: Run, truth: Run) -> tuple[str, str] | None:
    """What is wrong in the first grid where something is, and what shows it."""
    off = [i for i, answer in enumerate(run.values) if answer != truth.values[i]]
    if not off:
        return None
    sizes, first = GRIDS[off[0] // 8], off[0] // 8 * 8
    mine, wanted = run.values[first : first + 8], truth.values[first : first + 8]
    says = lambda rank, axis: (
        f"With {_named(sizes)} you put rank {rank} into the {axis} group {mine[rank][axis]}."
    )
    for axis, size in sizes.items():
        for rank, g in enumerate(mine):
            if len(g[axis]) != size:
                return "groups of another size", f"{says(rank, axis)} It holds {size}."
    for rank, g in enumerate(mine):
        if any(b - a != 1 for a, b in itertools.pairwise(g["tp"])):
            return "TP's ranks are no neighbours", says(rank, "tp")
    for axis in sizes:
        for rank, ranks in enumerate(g[axis] for g in mine):
            alone = [r for r in range(8) if mine[r][axis] == ranks] != ranks
            if alone and ranks != wanted[rank][axis]:
                return "groups that do not partition the ranks", says(rank, axis)
    rank = off[0] - first
    axis = next(axis for axis in sizes if mine[rank][axis] != wanted[rank][axis])
    stranger = next((r for r in mine[rank][axis] if r not in wanted[rank][axis]), None)
    if stranger is None:
        return "other groups", f"{says(rank, axis)} A rank is missing."
    both = (placement.coordinates(r, sizes) for r in (rank, stranger))
    at = " and ".join(", ".join(f"{name} {place}" for name, place in one.items()) for one in both)
    return "other groups", f"{says(rank, axis)} Ranks {rank} and {stranger} stand at {at}."


def met(groups_of: list[dict[str, list[int]]]) -> list[int]:
    """Make the groups of each rank on real ranks, sum a one in each: the ranks that rank 0 met, by axis."""

    def meet():
        sums = []
        for axis in groups_of[0]:
            groups = sorted({tuple(mine[axis]) for mine in groups_of})
            mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
            ones = torch.ones(1)
            dist.all_reduce(ones, group=mine)
            sums.append(int(ones))
        return sums

    with World(len(groups_of), timeout=8) as world:
        return world.run(meet)[0]


def _praised(run: Run) -> Answer:
    return right(
        "Every rank is in one group along each axis, whatever the order, and on eight real ranks every"
        " group of 2 × 2 × 2 met.",
        ("grids of eight ranks", str(len(GRIDS)), str(len(GRIDS))),
        (f"ranks that met along {', '.join(GRIDS[0])}", str(met(run.values[:8])), "[2, 2, 2]"),
    )


members = Asked(
    "the groups of a rank",
    groups,
    minutes=9,
    hints=[
        "Begin with the innermost axis, the last in `sizes`: its neighbours are 1 rank apart. How far apart"
        " are the next one's?",
        "Neighbours along an axis are `stride` apart, the product of the sizes further in. The coordinate is"
        " rank // stride % size.",
        "The group's first rank is rank − coordinate · stride; the others follow, one stride apart.",
    ],
    without=("placement",),
    cases=[(rank, dict(grid)) for grid in GRIDS for rank in range(8)],
    reads=lambda answer: {axis: sorted(int(r) for r in answer[axis]) for axis in AXES},
    praise=_praised,
    finds=_first_wrong,
    mistakes="""
        not a group along each axis
            Return a dictionary with pp, dp and tp, each a list of ranks.
            ~ form
        TP outermost
            You let the first axis change fastest. The last one does: TP talks most, so it is last, and its
            ranks are neighbours.
            - reversed(sizes.items()) => sizes.items()
        one order for all
            Frameworks differ: read the axes of `sizes` in the order they come.
            - reversed(sizes.items()) => [(a, sizes[a]) for a in ("tp", "dp", "pp")]
            - reversed(sizes.items()) => [(a, sizes[a]) for a in ("tp", "pp", "dp")]
        a coordinate taken for a distance
            You take the coordinate from the rank to find the group's first rank. Each step along an axis is
            `stride` ranks: take coordinate · stride.
            - rank // stride % size * stride => rank // stride % size
        a wrong stride
            The stride of an axis is the product of the sizes further in: 1 for the last axis.
            - stride *= size => stride = size
            - stride *= size => stride *= 2
            - first = rank => stride *= size; first = rank & stride *= size⏎ => ⏎
        a place beyond the axis
            rank // stride goes on beyond the axis' size: the coordinate is rank // stride % size.
            - rank // stride % size * stride => rank // stride * stride
        sizes added to a distance
            The distance along an axis is the product of all sizes further in.
            - stride *= size => stride = size if stride == 1 else stride + size
        the rank itself left out
            A group holds all of its ranks, the one that asks among them.
            - [first + i * stride for i in range(size)] => [first + i * stride for i in range(size) if first
              + i * stride != rank]
        coordinates, not ranks
            You return places along the axis, 0 to its size − 1. Asked are the numbers of the ranks that
            stand there.
            - [first + i * stride for i in range(size)] => list(range(size))
        blocks of neighbours along every axis
            Only the innermost axis has neighbours 1 apart. Along the others they are `stride` apart.
            - rank // stride % size * stride => rank % size & first + i * stride => first + i
        a group that begins at the rank
            All members name the same group, which begins at the rank whose coordinate along this axis is 0.
            - [first + i * stride for i in range(size)] => sorted((rank + i * stride) %
              __import__("math").prod(sizes.values()) for i in range(size))
        groups of another size
            A group along an axis has as many ranks as `sizes` says.
        TP's ranks are no neighbours
            TP talks most, so its ranks must be neighbours. See where it stands in `sizes`.
        groups that do not partition the ranks
            Along each axis every rank, 0 to 7, is in one group, its own, of as many ranks as `sizes` says.
            All of these say the same of it.
        other groups
            A group has the ranks whose other two coordinates are the same.
    """,
)


# -- practice: which axes leave the node ----------------------------------------------------------


def crossing(sizes, node):
    """Which axes have groups that leave a node of `node` ranks: a list of names out of `sizes`.

    sizes: the outermost axis first, the innermost last. The sizes divide the node, or the node them.
    """
    # A group spans its own size times all sizes inside it.
    axes, span = [], 1
    for axis, size in reversed(sizes.items()):
        span *= size
        if size > 1 and span > node:
            axes.append(axis)
    return axes


CASES: list[tuple[Sizes, int]] = [
    (sizes, node)
    for node, texts in (
        (4, "pp2 dp2 tp2, pp2 dp1 tp4, pp1 dp4 tp2, dp2 pp4 tp1, pp1 dp1 tp8"),
        (8, "pp1 dp2 tp4, dp16 pp4 tp8, pp2 dp4 tp8, pp4 dp2 tp2, dp4 pp2 tp2, pp8 dp1 tp8, pp1 dp8 tp1"),
    )
    for sizes in _layouts(texts)
]


def _axes(answer) -> list[str]:
    if not isinstance(answer, (list, tuple, set)) or not set(answer) <= set(AXES):
        raise TypeError
    return sorted(answer)


def _first_off(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    """The first layout that is answered otherwise; of none, how many there were."""
    for (sizes, node), mine, wanted in zip(CASES, run.values, truth.values):
        if mine != wanted:
            return [(f"{_named(sizes)} nodes of {node}", str(mine), str(wanted))]
    return [("layouts", str(len(CASES)), str(len(CASES)))]


def _same(run: Run, _) -> bool:
    """Whether some axes are named wherever they have more than one rank, and the others nowhere: by their
    names, or by their places.
    """
    if run.error or not any(run.values):
        return False
    answers = [(list(sizes), sizes, mine) for (sizes, _), mine in zip(CASES, run.values)]
    by_name = [{axis in mine for _, sizes, mine in answers if sizes[axis] > 1} for axis in AXES]
    by_place = [{a[i] in mine for a, sizes, mine in answers if sizes[a[i]] > 1} for i in range(len(AXES))]
    return any(all(len(said) == 1 for said in by) for by in (by_name, by_place))


across = Asked(
    "which axes leave the node",
    crossing,
    minutes=6,
    hints=[
        "How far apart are neighbours along an axis? The product of the sizes that come after it in `sizes`.",
        "A group reaches over its size times that distance. It leaves the node if that is more than the node"
        " holds.",
        "A group of one rank sends nothing.",
    ],
    without=("placement",),
    cases=CASES,
    reads=_axes,
    praise="Also for 512 GPUs: TP 8 stays in its node, PP 4 and DP 16 leave it.",
    figures=_first_off,
    shows={"the same axes for every layout": _same},
    mistakes="""
        no list of axes
            Return a list of names out of `sizes`, which may be empty.
            ~ form
        size where reach was meant
            You compare a group's size with the node. But its ranks may stand apart: along the outermost
            axis neighbours are all other sizes' product apart, and two of them can be on two nodes.
            - span > node => size > node
        TP outermost
            You count from the first axis outwards. The last is innermost: its ranks are neighbours.
            - reversed(sizes.items()) => sizes.items()
            - reversed(sizes.items()) => sizes.items() & size > 1 and span => span
        the axes that stay
            You name the axes whose groups stay inside a node. Which ones leave it?
            - return axes => return [a for a in sizes if a not in axes]
            - span > node => span <= node
            - size > 1 and span > node => size > 1 and span <= node
        one order for all
            Read the axes of `sizes` in the order they come.
            - reversed(sizes.items()) => [(a, sizes[a]) for a in ("tp", "dp", "pp")]
            - reversed(sizes.items()) => [(a, sizes[a]) for a in ("tp", "pp", "dp")]
        a group of one
            A group of one rank sends nothing, wherever it stands.
            - size > 1 and span => span
        a full node is not left
            A group that reaches over as many ranks as a node has fills it, and stays inside.
            - span > node => span >= node
            - size > 1 and span > node => span >= node
        the far end is one rank further
            First and last are (size − 1) · distance apart. They are on two nodes as soon as that is the
            node's size, not only when it is more.
            - span > node => span - span // size > node
        node taken for the number of nodes
            `node` is how many ranks a node has.
            - axes, span = [], 1 => node = __import__("math").prod(sizes.values()) // node; axes, span = [], 1
        neighbours only
            You ask whether neighbours are on two nodes. They may share one while the ends of the group do
            not.
            - span > node => span // size >= node
            - span > node => span // size > node
            - size > 1 and span > node => span // size >= node
        the same axes for every layout
            You name the axes by their names or places alone. Whether a group leaves the node depends on the
            sizes, and on the node.
    """,
)


# -- what the cells show --------------------------------------------------------------------------

# Emulated: two nodes of four, with ports out of a node that are 20 times slower than links inside.
NODES = networks.nodes("two nodes of four", 4, 20e6, 1e6)


def expected_bytes(
    hidden: int, b: int, s: int, d: int, p: int, t: int, rank: int = 0, layers: int = 4
) -> dict[str, float]:
    """Bytes that a rank sends along each axis in one step of the toy, in float32: the theory's list of
    operations, read for what is sent.
    """
    layout = Layout(dp=d, tp=t, pp=p, sequence_parallel=False)
    model = replace(MODELS["toy"], hidden=hidden, layers=layers, ffn=4 * hidden, head_dim=hidden // 4)
    stage = placement.coordinates(rank, layout.sizes)["pp"]
    return sent(Job(model, global_batch=b, seq_len=s, framework=TOY), layout, stage)


def by_axis(traffic: Traffic, sizes: Sizes, predicted: dict[str, float], rank: int = 0) -> Table:
    """Bytes that `rank` sent along each axis, three ways.

    Two ranks share one axis at most, so who sent to whom tells the axis.
    """
    rows = []
    for axis in reversed(sizes):
        counted = sum(row.algorithmic for row in traffic.ranks[rank] if row.axis == axis)
        along = [r for r in range(len(traffic.ranks)) if placement.axis_between(rank, r, sizes) == axis]
        wire = sum(traffic.matrix[rank][r] for r in along) if traffic.matrix else None
        ratio = "n/a" if wire is None or not predicted[axis] else f"{wire / predicted[axis]:.2f}"
        rows.append([axis, *map(human, (predicted[axis], counted, wire)), ratio])
    columns = ["axis", "predicted", "counted", "on the wire", "wire ÷ predicted"]
    return Table(columns, rows, title=f"bytes sent by rank {rank}, along each axis")


def one_step(world: World, sizes: Sizes) -> Step:
    """A step of the toy on the grid, in two microbatches: what it moved, and what each rank keeps."""

    def run():
        grid = toy.grid_groups(sizes["dp"], sizes["pp"], sizes["tp"], tuple(sizes))
        stage = toy.on_grid(toy.ToyTransformer(hidden=256), grid)
        optimizer = torch.optim.AdamW(stage.parameters())
        ops = one_f_one_b(sizes["pp"], 2).ops[grid["pp"].get_local_rank()]
        current.count_from_here()  # making the groups is not counted
        with memory.saved_activations(stage) as held:
            toy.grid_step(stage, *toy.make_batch(b=8, s=32), ops, 2, grid)
        optimizer.step()
        return memory.by_kind(stage, optimizer, held.peak)

    kept = world.run(run)
    return Step(sizes, world.traffic, kept)


def compare_with_twin(world: World, d: int, p: int, t: int) -> str:
    """Three steps of SGD on the grid and in one process, in float64: whether the weights are the same."""

    def run():
        grid = toy.grid_groups(d, p, t)
        twin, model = (toy.ToyTransformer(hidden=32).double() for _ in range(2))
        stage = toy.on_grid(model, grid)
        ops = one_f_one_b(p, 2).ops[grid["pp"].get_local_rank()]
        for i in range(3):
            batch = toy.make_batch(8, 16, seed=i)
            stage.zero_grad(), twin.zero_grad()
            toy.grid_step(stage, *batch, ops, 2, grid)
            toy.twin_step(twin, *batch)
            with torch.no_grad():
                for q in [*stage.parameters(), *twin.parameters()]:
                    q -= 0.1 * q.grad
        mine = toy.split_depth(toy.split_width(twin, grid["tp"].get_group()), grid["pp"].get_group())
        pairs = zip(stage.parameters(), mine.parameters())
        return all((a - b).norm() < 1e-12 * b.norm() for a, b in pairs)

    return f"after 3 steps every weight of every rank is the twin's: {all(world.run(run))}"


def of_the_70b() -> str:
    """What a GPU of the 70B's layout of drop 14 sends in a step, along each axis."""
    job = Job(find_model("llama-3-70b"), global_batch=128, seq_len=8192)
    moved = sent(job, Layout(dp=4, tp=8, pp=2, zero=1))
    return ", ".join(f"{axis} {human(moved[axis])}" for axis in sorted(moved, key=moved.get, reverse=True))


def step_seconds(world: World, order: tuple[str, ...]) -> float:
    """One step of 2 × 2 × 2 on the world's fabric with the axes placed in this order, outermost first.

    The shortest of a few.
    """

    def run():
        grid = toy.grid_groups(2, 2, 2, order)
        stage = toy.on_grid(toy.ToyTransformer(hidden=64, seq_len=128), grid)
        ops = one_f_one_b(2, 2).ops[grid["pp"].get_local_rank()]
        batch = toy.make_batch(8, 128)
        dist.barrier()
        start = time.monotonic()
        toy.grid_step(stage, *batch, ops, 2, grid)
        return time.monotonic() - start

    return shortest(lambda: max(world.run(run)), float)
