"""Beyond, b1: FSDP in time: when each layer's weights are gathered, used and freed."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

from drops.b1.steps import LAYERS, ONE_NODE, mine, model, order_timeline
from helpers import toy
from helpers.practice import Answer, Asked, OnRanks, Run, alike, facts_so_far, first, right
from helpers.ranks import World, current

# -- practice: gather, compute, free --------------------------------------------------------------


def fsdp_layer(shard, x, layer, rank, world_size):
    """One layer, forward and backward. Returns dx, and this rank's shard of the mean gradient.

    shard: (n/d,), this rank's part of the weights; the layer needs all n. layer.forward(w, x) -> y;
    layer.rest(y) -> dy: all later layers, forward and backward; layer.backward(w, x, dy) -> dx, dw.
    """

    def gather():
        parts = [torch.empty_like(shard) for _ in range(world_size)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)

    w = gather()
    y = layer.forward(w, x)
    # While later layers run, this layer's weights are not whole on any rank.
    del w
    dy = layer.rest(y)
    dx, dw = layer.backward(gather(), x, dy)
    mine = torch.empty_like(shard)
    dist.reduce_scatter(mine, list(dw.chunk(world_size)))
    return dx, mine / world_size


# x is (B, H), the weights are (H, H). If B were 2, dx alone could be unpacked like a pair.
B, H = 3, 64


class _Layer:
    """tanh(x · W). It records which parts are called, and whether W is held while later layers run."""

    def __init__(self, dy: torch.Tensor):
        self.dy, self.facts, self._before = dy, facts_so_far(), current.rank.budget.now
        self.facts |= {"called": set(), "kept": False}

    def _whole(self, w, when: str) -> torch.Tensor:
        self.facts["called"].add(when)
        if not torch.is_tensor(w) or w.numel() != H * H:
            got = f"{w.numel()} numbers" if torch.is_tensor(w) else f"a {type(w).__name__}"
            raise ValueError(f"the layer got {got} for w, and has {H * H} weights")
        has_memory = w.untyped_storage().nbytes() >= w.nbytes
        return w.detach().reshape(H, H) if has_memory else torch.zeros(H, H)

    def forward(self, w, x):
        return torch.tanh(x @ self._whole(w, "forward"))

    def rest(self, y):
        self.facts["called"].add("rest")
        until = time.monotonic() + 1  # a collective's own thread may hold its tensors a moment longer
        while (kept := current.rank.budget.now - self._before > 4 * H * H / 2) and time.monotonic() < until:
            time.sleep(0.01)
        self.facts["kept"] = kept
        return self.dy.clone()

    def backward(self, w, x, dy):
        w = self._whole(w, "backward")
        dz = dy * (1 - torch.tanh(x @ w) ** 2)
        return dz @ w.T, (x.T @ dz).flatten()


def _to_layer(rank: int, d: int) -> list[tuple]:
    chance = torch.Generator().manual_seed(0)
    shard = (torch.randn(H * H, generator=chance) / H**0.5).chunk(d)[rank].clone()
    x, dy = torch.randn(2, d, B, H, generator=chance)[:, rank].clone()
    return [(shard, x, _Layer(dy), rank, d)]


def _pair(answer) -> tuple[torch.Tensor, torch.Tensor]:
    dx, gradient = answer
    return dx.detach(), gradient.detach().flatten()


def _found_in_layer(run: Run, truth: Run) -> tuple[str, str] | None:
    """The first mistake that the run has, because it explains the later ones."""
    if run.error:
        return None
    every = lambda test: all(test(facts) for facts in run.ranks)
    pairs = [(a["values"][0], b["values"][0]) for a, b in zip(run.ranks, truth.ranks)]
    gradient = all(alike(a[1], b[1]) for a, b in pairs)
    faults = {
        "a part left out": not every(lambda f: len(f["called"]) == 3),
        "nothing is gathered": every(lambda f: "all_gather" not in f["forward"]),
        "dx and the gradient exchanged": all(alike(a[1], b[0].flatten()) for a, b in pairs),
        "backward without a second gather": every(lambda f: f["forward"].count("all_gather") == 1),
        "gathered weights kept": every(lambda f: f["kept"]),
        "dx reduced as well": gradient and all(alike(a[0], pairs[0][0][0]) for a, _ in pairs),
        "gradients reduced twice": every(lambda f: _reductions(f) > 1),
        "an all-reduce where a reduce-scatter is enough": (
            gradient and every(lambda f: "all_reduce" in f["forward"])
        ),
        "the whole gradient kept": every(lambda f: f["values"][0][1].numel() == H * H),
    }
    return first(faults)


_reductions = lambda facts: sum(facts["forward"].count(op) for op in ("reduce_scatter", "all_reduce"))

one_layer = OnRanks(
    "gather, compute, free",
    fsdp_layer,
    minutes=12,
    hints=[
        "A gather: parts = [torch.empty_like(shard) for _ in range(world_size)], then"
        " dist.all_gather(parts, shard), then torch.cat(parts).",
        "Free before layer.rest: `del w`, and the parts too, where a name still holds them. Backward then"
        " needs a gather of its own.",
        "dist.reduce_scatter(mine, list(dw.chunk(world_size))) sums dw over the ranks, and leaves each its"
        " shard in `mine`, torch.empty_like(shard). Then the mean.",
    ],
    tries=((4,), (2,)),
    inputs=_to_layer,
    world={"memory": 1e9},
    reads=_pair,
    praise="dx and the gradient's shard are the twin's on 4 and on 2 ranks, and nothing whole was left while"
    " the later layers ran.",
    figures=lambda run, truth: [
        ("all-gathers", *(str(one.ranks[0]["forward"].count("all_gather")) for one in (run, truth))),
        ("reduce-scatters and all-reduces", *(str(_reductions(one.ranks[0])) for one in (run, truth))),
    ],
    finds=_found_in_layer,
)


# -- practice: the order of a step ----------------------------------------------------------------


def step_order(n):
    """One step of n layers: a list of ("gather", i), ("F", i), ("free", i), ("B", i), ("reduce", i).

    A gather or a reduction only begins; F and B wait for their layer's weights.
    """
    # Each gather stands one compute before the one that needs it.
    order = [("gather", 0)]
    for i in range(n):
        order += [("gather", i + 1)] * (i + 1 < n) + [("F", i), ("free", i)]
    order += [("gather", n - 1)]
    for i in reversed(range(n)):
        order += [("gather", i - 1)] * (i > 0) + [("B", i), ("free", i), ("reduce", i)]
    return order


SIZES = (3, LAYERS, 9)
WORDS = ("gather", "F", "free", "B", "reduce")


def whole_at_once(order) -> int:
    """The most layers whose weights are whole, or on their way, at one time."""
    now, most = set(), 0
    for what, i, *_ in order:
        now = now | {i} if what == "gather" else now - {i} if what == "free" else now
        most = max(most, len(now))
    return most


def _faults(order: list[tuple[str, int]], n: int) -> dict[str, bool | str]:
    """Mistake -> whether an order has it, or a text that shows it. An earlier mistake explains later ones."""
    strange = [line for line in order if line[0] not in WORDS or not 0 <= line[1] < n]
    computed = [line for line in order if line[0] in ("F", "B")]
    right_ones = [("F", i) for i in range(n)] + [("B", i) for i in reversed(range(n))]
    whole, gathered, lacking, again, early, late, kept = set(), set(), None, False, False, False, 0
    for at, (what, i) in enumerate(order):
        if what == "gather":
            again |= i in whole
            whole, gathered = whole | {i}, gathered | {i}
        elif what == "free":
            whole = whole - {i}
        elif what == "reduce":
            early |= ("B", i) not in order[:at]
        elif what in ("F", "B"):
            if i not in whole and not lacking:
                lacking = "freed" if i in gathered else what
            gathered = gathered - {i}
            after = next((j for word, j in order[at + 1 :] if word in ("F", "B")), i)
            late |= after != i and after not in whole
        kept = len(whole) if (what, i) == ("F", n - 1) else kept  # at the end of forward
    reduced = [order.count(("reduce", i)) for i in range(n)]
    begun = lambda word, at: sum(line[0] == word for line in order[:at])
    waiting = max((begun("B", at) - begun("reduce", at) for at in range(len(order) + 1)), default=0)
    return {
        "a step that does not exist": strange and f"{strange[0]} is none.",
        "layers in the wrong order": computed != right_ones,
        "freed before it is used": lacking == "freed",
        "a B without its weights": lacking == "B",
        "weights that are not there": lacking == "F",
        "not reduced exactly once": reduced != [1] * n
        and next(f"With {n} layers, {i} is reduced {k} times." for i, k in enumerate(reduced) if k != 1),
        "reduced before backward": early,
        "gathered weights kept": bool(whole) or kept > 2,
        "gradients reduced only at the end": waiting > 2,
        "gathered twice over": again,
        "prefetch so early that nothing is saved": whole_at_once(order) > 2,
        "gathered only when needed": late,
    }


def _found_in_order(run: Run, _) -> tuple[str, str] | None:
    """The first mistake that the orders for all numbers of layers share, otherwise the first of any."""
    faults = [{name: x for name, x in _faults(o, n).items() if x} for o, n in zip(run.values, SIZES)]
    if of_all := [name for name in faults[0] if all(name in others for others in faults)]:
        return first({of_all[0]: faults[0][of_all[0]]})
    return next(((name, f"With {n} layers:") for n, found in zip(SIZES, faults) for name in found), None)


_most = lambda order: str(whole_at_once(order))


def _on_real_ranks(run: Run) -> Answer:
    with World(4, fabric=ONE_NODE, timeout=20) as world:
        timeline = order_timeline(world, [(*line, 0) for line in run.values[1]])
    from helpers.draw import gantt  # ranks import this module, and need no matplotlib

    answer = right(
        "Two layers whole at a time, and gathers run under compute. Below: on real ranks.",
        ("layers whole at once, of 9", _most(run.values[-1]), _most(step_order(9))),
    )
    answer.picture = gantt.timeline(timeline, "Your order, on four ranks")
    return answer


order = Asked(
    "the order of a step",
    step_order,
    without=("fsdp_order",),
    minutes=6,
    hints=[
        "Forward of layer i needs gather i before it and free i after it. Where must gather i + 1 stand, to"
        " run while F i computes?",
        "Begin with gather 0. Then for each layer: gather i + 1, F i, free i. Backward is the same, down.",
        "Backward begins with gather n − 1. After B i: free i, reduce i.",
    ],
    cases=[(n,) for n in SIZES],
    reads=lambda order: [(str(what), int(i)) for what, i in order],
    compares=False,  # more than one order is right
    praise=_on_real_ranks,
    finds=_found_in_order,
)


# -- practice: a mesh, and fully_shard ------------------------------------------------------------


def shard_model(model):
    """Put FSDP on the model in place: each part of it, then the whole. Ranks 0 and 1 are a node, 2 and 3 too.

    Weights are cut over the two ranks of a node, and each node holds all of them.
    """
    # The last dimension has neighbours, which share a node. Parts first: what is left goes to the whole.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _watch_mesh(attempt, facts: dict) -> None:
    wrapped = model()
    attempt(wrapped)
    current.count_from_here()
    tokens, targets = mine(1)
    toy.loss_of(wrapped(tokens), targets).backward()
    over = {row.op: row.members for row in reversed(current.counted_so_far())}
    facts |= {"gathers": over.get("all_gather", ()), "sums": over.get("all_reduce", ())}
    facts["times"] = sum(row.calls for row in current.counted_so_far() if row.op == "all_gather")
    facts["cut"] = all(isinstance(p, DTensor) for p in wrapped.parameters())
    whole = lambda g: g.full_tensor() if isinstance(g, DTensor) else g
    gradients = [torch.zeros(p.shape) if p.grad is None else whole(p.grad) for p in wrapped.parameters()]
    facts["values"] = [parameters_to_vector(gradients)]
    current.count_from_here()  # the last collectives were the check's own


def _found_in_mesh(run: Run, truth: Run) -> tuple[str, str] | None:
    if run.error:
        return None
    every = lambda test: all(test(facts) for facts in run.ranks)
    faults = {
        "nothing is cut": every(lambda f: not f["times"]),
        "sharding over the wrong mesh axis": every(lambda f: f["gathers"] in ((0, 2), (1, 3))),
        "cut over all four ranks": every(lambda f: len(f["gathers"]) == 4),
        "one unit: the whole model at once": every(lambda f: f["times"] == 1),
        "gathered weights kept": every(lambda f: f["times"] == LAYERS),
        "replicas that never meet": every(lambda f: len(f["gathers"]) == 2 and not f["sums"]),
        "parts left out": every(lambda f: not f["cut"]),
        "several parts in one unit": every(lambda f: f["times"] < 2 * (LAYERS - 2) + 1),
        "other gradients than the twin's": run.off is not None,
    }
    return first(faults)


mesh = OnRanks(
    "a mesh, and fully_shard",
    shard_model,
    minutes=8,
    hints=[
        "Draw the four ranks as a table of two rows, a row for each node. Along which direction are weights"
        " cut, and along which are they copied?",
        "init_device_mesh takes the table's shape, and a name for each dimension. The last dimension is"
        " innermost: neighbours. fully_shard copies along the first dimension of a mesh, and cuts along the"
        " second.",
        "fully_shard(…, mesh=mesh) makes one unit of what it is given, without what was given before. Which"
        " comes first, the parts or the whole?",
    ],
    tries=((4,),),
    watch=_watch_mesh,
    praise="Weights are gathered in the node. Between the nodes go gradients alone, and only their shards.",
    figures=lambda run, truth: [
        ("rank 0 gathers weights with ranks", *(str(list(one.ranks[0]["gathers"])) for one in (run, truth))),
        ("and sums gradients' shards with", *(str(list(one.ranks[0]["sums"])) for one in (run, truth))),
    ],
    finds=_found_in_mesh,
)
