"""Beyond, b1: FSDP in time: when each layer's weights come, are used, and go."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

from helpers import toy
from helpers.emulate import networks
from helpers.practice.engine import Asked, OnRanks
from helpers.practice.exercise import Answer, right
from helpers.practice.runs import Run, alike
from helpers.ranks import current
from helpers.ranks.world import World
from three_axes.count import clock
from three_axes.count.clock import Span, Timeline
from three_axes.count.traffic import Traffic
from three_axes.table import Table, human


def _first(found: dict[str, bool]) -> tuple[str, bool] | None:
    """The first mistake that was found. In this order: what comes first explains more."""
    return next(((name, True) for name, it in found.items() if it), None)


def _calls(op: str) -> int:
    return sum(row.calls for row in current.counted_so_far() if row.op == op)


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
    del w
    dy = layer.rest(y)
    dx, dw = layer.backward(gather(), x, dy)
    mine = torch.empty_like(shard)
    dist.reduce_scatter(mine, list(dw.chunk(world_size)))
    return dx, mine / world_size


B, H = 3, 64  # the weights are (H, H), and by far the largest thing here. A dx alone is not read as a pair


class _Layer:
    """tanh(x · W), which notes what is called, and whether W is held while later layers run."""

    def __init__(self, dy: torch.Tensor, facts: dict):
        self.dy, self.facts, self._before = dy, facts, current.rank.budget.now

    def _whole(self, w, when: str) -> torch.Tensor:
        self.facts["called"].add(when)
        if not torch.is_tensor(w) or w.numel() != H * H:
            given = f"{w.numel()} numbers" if torch.is_tensor(w) else f"a {type(w).__name__}"
            raise ValueError(f"the layer got {given} for w, and has {H * H} weights")
        there = w.untyped_storage().nbytes() >= w.nbytes
        return w.detach().reshape(H, H) if there else torch.zeros(H, H)

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


def _watch_layer(attempt, facts: dict) -> None:
    rank, d = dist.get_rank(), dist.get_world_size()
    chance = torch.Generator().manual_seed(0)
    shard = (torch.randn(H * H, generator=chance) / H**0.5).chunk(d)[rank].clone()
    x, dy = torch.randn(2, d, B, H, generator=chance)[:, rank].clone()
    facts |= {"called": set(), "kept": False}
    current.count_from_here()
    answer = attempt(shard, x, _Layer(dy, facts), rank, d)
    facts["values"] = [answer]
    with suppress(TypeError, ValueError, AttributeError):  # what is no pair is told later
        facts["values"] = [_pair(answer)]
    facts |= {op: _calls(op) for op in ("all_gather", "reduce_scatter", "all_reduce")}


def _pair(answer) -> tuple[torch.Tensor, torch.Tensor]:
    dx, gradient = answer
    return dx.detach(), gradient.detach().flatten()


def _found_in_layer(run: Run, truth: Run) -> tuple[str, bool] | None:
    every = lambda test: all(test(facts) for facts in run.ranks)
    pairs = [(a["values"][0], b["values"][0]) for a, b in zip(run.ranks, truth.ranks)]
    dx, gradient = (all(alike(a[place], b[place]) for a, b in pairs) for place in (0, 1))
    return _first(
        {
            "a part left out": not every(lambda f: len(f["called"]) == 3),
            "nothing is gathered": every(lambda f: not f["all_gather"]),
            "dx and the gradient exchanged": all(alike(a[1], b[0].flatten()) for a, b in pairs),
            "backward without a second gather": every(lambda f: f["all_gather"] == 1),
            "gathered weights kept": every(lambda f: f["kept"]),
            "gradients reduced twice": every(lambda f: _reductions(f) > 1),
            "an all-reduce where a reduce-scatter is enough": gradient and every(lambda f: f["all_reduce"]),
            "the whole gradient kept": every(lambda f: f["values"][0][1].numel() == H * H),
            "another dx": not dx,
            "another gradient": not gradient,
        }
    )


_reductions = lambda facts: facts["reduce_scatter"] + facts["all_reduce"]

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
    watch=_watch_layer,
    world={"timeout": 8, "memory": 1e9},
    reads=_pair,
    praise="dx and the gradient's shard are the twin's on 4 and on 2 ranks, and nothing whole was left while"
    " the later layers ran.",
    figures=lambda run, truth: [
        ("all-gathers", *(str(one.ranks[0]["all_gather"]) for one in (run, truth))),
        ("reduce-scatters and all-reduces", *(str(_reductions(one.ranks[0])) for one in (run, truth))),
    ],
    finds=_found_in_layer,
    mistakes="""
        no pair of tensors
            Return dx, and this rank's shard of the gradient.
            ~ form
        a part left out
            Call layer.forward, then layer.rest, then layer.backward, each once.
        a shard where the whole layer is needed
            The layer was given one rank's shard. Gather all weights first.
            ! got 1024 numbers for w
        other weights than the layer's
            The layer's arguments are w and x, and for backward also dy. w is one tensor of all weights.
            ! for w, and has
        nothing is gathered
            Each rank has only its shard. dist.all_gather(parts, shard) fills the empty tensors.
        dx and the gradient exchanged
            The second of the two is dx. Return dx first, then this rank's shard of the gradient.
        backward without a second gather
            Backward needs the weights too: dx = dy · Wᵀ. Free them after forward, and gather them again
            right before layer.backward. (Who keeps them has chosen reshard_after_forward=False: fewer bytes
            sent, and the whole model in memory.)
        gathered weights kept
            While the later layers run, the whole weights are still in memory. Kept so in every layer, they
            are the whole model. `del` each name that holds them, or give their memory back, before
            layer.rest.
        gradients reduced twice
            A reduce-scatter sums over the ranks, and leaves each rank its shard. A second reduction sums
            sums, or sends the bytes twice.
        an all-reduce where a reduce-scatter is enough
            The values are right. An all-reduce brings the whole sum, of which you keep a shard: twice the
            bytes.
        gradients of this rank alone
            Every rank saw other examples. Sum the gradients over the ranks; each keeps its shard of the
            sum.
            - dist.reduce_scatter(mine, list(dw.chunk(world_size))) => mine = dw.chunk(world_size)[rank]
            - dist.reduce_scatter(mine, list(dw.chunk(world_size))) => mine = dw.chunk(world_size)[rank] &
              mine / world_size => mine
        the sum where the mean was meant
            The reduce-scatter sums. Divide by the number of ranks, as data parallelism does.
            - mine / world_size => mine
        divided twice
            The gradients are the mean, divided by the ranks once more.
            - mine / world_size => mine / world_size**2
        the whole gradient kept
            Return your shard of the gradient. The optimizer has that shard's state, and needs no more.
        a shard of another rank
            The gradient is the mean, but of another rank's weights: rank r keeps chunk number r.
            - list(dw.chunk(world_size)) => list(dw.chunk(world_size))[::-1]
            - list(dw.chunk => list(dw.roll(len(shard)).chunk
            - list(dw.chunk => list(dw.roll(-len(shard)).chunk
            - list(dw.chunk(world_size)) => [dw.chunk(world_size)[0]] * world_size
        another dx
            dx is what layer.backward gives, from the gathered weights.
        another gradient
            It is chunk number `rank` of the ranks' mean of dw.
    """,
)


# -- practice: the order of a step ----------------------------------------------------------------


def step_order(n):
    """One step of n layers: a list of ("gather", i), ("F", i), ("free", i), ("B", i), ("reduce", i).

    A gather or a reduction only begins; F and B wait for their layer's weights.
    """
    order = [("gather", 0)]
    for i in range(n):
        order += [("gather", i + 1)] * (i + 1 < n) + [("F", i), ("free", i)]
    order += [("gather", n - 1)]
    for i in reversed(range(n)):
        order += [("gather", i - 1)] * (i > 0) + [("B", i), ("free", i), ("reduce", i)]
    return order


S = 16
model = lambda: toy.ToyTransformer(hidden=64, seq_len=S)
LAYERS = len(model())
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
    """What is wrong with an order, on paper. What comes first explains more."""
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
    return {
        "a step that does not exist": strange and f"{strange[0]} is none.",
        "layers in the wrong order": computed != right_ones,
        "freed before it is used": lacking == "freed",
        "backward without a second gather": lacking == "B",
        "weights that are not there": lacking == "F",
        "gradients reduced twice": max(reduced) > 1,
        "gradients not reduced": min(reduced) == 0,
        "reduced before backward": early,
        "gathered weights kept": bool(whole) or kept > 2,
        "gathered twice over": again,
        "prefetch so early that nothing is saved": whole_at_once(order) > 2,
        "gathered only when needed": late,
    }


def _found_in_order(run: Run, _) -> tuple[str, bool | str] | None:
    """The first fault with all numbers of layers, or else with one of them."""
    faults = [{name: it for name, it in _faults(o, n).items() if it} for o, n in zip(run.values, SIZES)]
    if of_all := [name for name in faults[0] if all(name in others for others in faults)]:
        return of_all[0], faults[0][of_all[0]]
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
    mistakes="""
        no list of steps
            Return a list such as [("gather", 0), ("F", 0)].
            ~ form
        a step that does not exist
            There are gather, F, free, B and reduce, of layers 0 to n − 1.
        layers in the wrong order
            Forward runs layers 0 to n−1, backward n−1 to 0, each once.
        freed before it is used
            The weights were gathered, and freed before their layer computed. F i comes before free i, and
            so does B i.
        backward without a second gather
            B needs the whole weights too, and they were freed after F. Gather each layer again in backward.
        weights that are not there
            F needs its layer's weights: its gather must have begun, and nothing freed them since.
        gradients reduced twice
            One reduction for each layer, after its B. A second one sums sums.
        gradients not reduced
            After its B, every layer's gradients are reduced.
        reduced before backward
            There are no gradients before B.
        gathered weights kept
            Weights that are not freed after their forward add up: at its end the whole model is here. That
            is reshard_after_forward=False. Free each layer after F, and after B.
        gathered twice over
            A gather of weights that are whole sends bytes for nothing.
        prefetch so early that nothing is saved
            More than two layers are whole at once: the memory that FSDP saves is gone, and the step is no
            shorter. One layer ahead is enough to hide a gather under the compute before it.
        gathered only when needed
            While a layer computes, nothing is on its way, and the next one must wait. Begin the next
            layer's gather before F or B of this one.
    """,
)


# -- practice: a mesh, and fully_shard ------------------------------------------------------------


def shard_model(model):
    """Put FSDP on the model in place: each part of it, then the whole. Ranks 0 and 1 are a node, 2 and 3 too.

    Weights are cut over the two ranks of a node, and each node holds all of them.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def mine(m: int) -> list[torch.Tensor]:
    """This rank's tokens and targets: as many in each of m microbatches as there are for one."""
    return [toy.my_share(t, dist.get_rank(), dist.get_world_size()) for t in toy.make_batch(4 * m, S)]


def _watch_mesh(attempt, facts: dict) -> None:
    wrapped = model()
    attempt(wrapped)
    current.count_from_here()
    tokens, targets = mine(1)
    toy.loss_of(wrapped(tokens), targets).backward()
    over = {row.op: row.members for row in reversed(current.counted_so_far())}
    facts |= {"gathers": over.get("all_gather", ()), "sums": over.get("all_reduce", ())}
    facts |= {"calls": _calls("all_gather"), "cut": all(isinstance(p, DTensor) for p in wrapped.parameters())}
    whole = lambda g: g.full_tensor() if isinstance(g, DTensor) else g
    gradients = [torch.zeros(p.shape) if p.grad is None else whole(p.grad) for p in wrapped.parameters()]
    facts["values"] = [parameters_to_vector(gradients)]
    current.count_from_here()  # what was called since is the check's own


def _found_in_mesh(run: Run, truth: Run) -> tuple[str, bool] | None:
    every = lambda test: all(test(facts) for facts in run.ranks)
    return _first(
        {
            "nothing is cut": every(lambda f: not f["calls"]),
            "sharding over the wrong mesh axis": every(lambda f: f["gathers"] in ((0, 2), (1, 3))),
            "cut over all four ranks": every(lambda f: len(f["gathers"]) == 4),
            "one unit: the whole model at once": every(lambda f: f["calls"] == 1),
            "gathered weights kept": every(lambda f: f["calls"] == LAYERS),
            "replicas that never meet": every(lambda f: len(f["gathers"]) == 2 and not f["sums"]),
            "parts left out": every(lambda f: not f["cut"]),
            "several parts in one unit": every(lambda f: f["calls"] < 2 * (LAYERS - 2) + 1),
            "other gradients than the twin's": run.parts_from(truth, alike) is not None,
        }
    )


mesh = OnRanks(
    "a mesh, and fully_shard",
    shard_model,
    minutes=8,
    hints=[
        'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")). The last dimension is'
        " innermost: neighbours.",
        "for part in model: fully_shard(part, mesh=mesh). Then fully_shard(model, mesh=mesh).",
    ],
    tries=((4,),),
    watch=_watch_mesh,
    world={"timeout": 15},
    praise="Weights are gathered in the node. Between the nodes go gradients alone, and only their shards.",
    figures=lambda run, truth: [
        ("rank 0 gathers weights with ranks", *(str(list(one.ranks[0]["gathers"])) for one in (run, truth))),
        ("and sums gradients' shards with", *(str(list(one.ranks[0]["sums"])) for one in (run, truth))),
    ],
    finds=_found_in_mesh,
    mistakes="""
        the model before its parts
            fully_shard(model) takes all parameters that are left, so a part that comes after it has none.
            Call it for the model last. (model.modules() begins with the model itself.)
            ! overlapping meshes
        nothing is cut
            Not one all-gather: every rank holds all weights. Have you called fully_shard? Dimension 1 of
            the mesh shards: is yours of size 2?
        sharding over the wrong mesh axis
            Rank 0 gathers from rank 2, in the other node. A mesh's last dimension is innermost: its ranks
            are neighbours. Shard over that one. fully_shard goes by the order of dimensions, replicate then
            shard, not by their names.
        cut over all four ranks
            That is FSDP over all: every gather crosses nodes. Give a mesh of (2, 2).
        one unit: the whole model at once
            One gather brings the whole model. fully_shard takes the parameters that no earlier call has
            taken: call it for each part first, then for the model.
        gathered weights kept
            One gather for each part, so weights stay from forward to backward. reshard_after_forward=False
            does that; and so does a missing last line: without fully_shard(model) each part is a root, and
            a root keeps its weights.
        replicas that never meet
            Weights are cut in the node, but no all-reduce follows: the two nodes train two models. Give
            fully_shard the whole mesh of two dimensions, not mesh['shard'] alone.
        parts left out
            Some parameters are no DTensors: fully_shard(model), after its parts, takes what is left.
        several parts in one unit
            Some gathers bring several blocks at once: nothing hides them, and these blocks are whole
            together. Call fully_shard for each part of the model.
        other gradients than the twin's
            Look at the mesh: who averages with whom?
    """,
)


# -- what the cells show --------------------------------------------------------------------------

# Emulated, as in drop 06: ports out of a node are 10 times slower than links inside.
ONE_NODE, TWO_NODES = networks.four_ranks(12e6)
SECONDS = {"F": 3e-7, "B": 6e-7}  # of one parameter, emulated: a block is 15 ms forward and 30 ms backward
WEIGHTS = 4 * sum(p.numel() for p in model().parameters())  # bytes of all of them
BLOCK = 4 * sum(p.numel() for p in model().blocks[0].parameters())


def groups(mesh_shape: tuple[int, ...] | None) -> tuple:
    """(shard, replicate): the groups of a mesh (replicate, shard), or all ranks and none."""
    if mesh_shape is None:
        return None, None
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    return mesh["shard"].get_group(), mesh["replicate"].get_group()


def step_traffic(world: World, mesh: tuple[int, ...] | None = None, m: int = 1, **how) -> Traffic:
    """The bytes of one step. mesh: (replicate, shard) for HSDP. how: as `toy.fsdp_order` takes it."""

    def run():
        layers = toy.shard_layers(model(), *groups(mesh))
        toy.run_order(layers, toy.fsdp_order(LAYERS, m, **how), *mine(m))

    world.run(run)
    return world.traffic


def step_by_pytorch(world: World, m: int = 1, reshard: bool = True, hold: bool = False) -> Traffic:
    """The same step with `fully_shard`."""

    def run():
        wrapped = model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for part in wrapped:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(wrapped, mesh=mesh)
        for k, (tokens, targets) in enumerate(zip(*(t.chunk(m) for t in mine(m)))):
            last = k == m - 1 or not hold
            wrapped.set_is_last_backward(last)
            wrapped.set_reshard_after_backward(last)
            wrapped.set_requires_gradient_sync(last)
            (toy.loss_of(wrapped(tokens), targets) / m).backward()

    world.run(run)
    return world.traffic


def side_by_side(runs: dict[str, tuple[Traffic, Traffic]]) -> Table:
    """Calls and bytes of rank 0, by hand and by PyTorch. runs: name -> (by hand, by `fully_shard`)."""
    rows = [
        [
            name if way == "by hand" else "",
            way,
            str(traffic.calls("all_gather")),
            str(traffic.calls("reduce_scatter")),
            human(traffic.counted[0]),
        ]
        for name, both in runs.items()
        for way, traffic in zip(("by hand", "fully_shard"), both)
    ]
    return Table(["one step", "", "all-gathers", "reduce-scatters", "counted"], rows)


def _watching(layers: list[toy.Layer], streams: list[Span]):
    """Compute takes its time, memory and what is under way go on the clock."""

    @contextmanager
    def around(what: str, i: int, k: int):
        start = time.monotonic()
        if what in SECONDS:
            with current.span(what, i):
                time.sleep(SECONDS[what] * layers[i].n)
                yield
            return
        yield
        current.rank.recorder.levels.append((start, sum(layer.bytes_whole for layer in layers)))
        work = {"gather": layers[i].arriving, "reduce": layers[i].reducing}.get(what)
        if work:
            work.get_future().add_done_callback(
                lambda _: streams.append(Span(what, str(i), start, time.monotonic()))
            )

    return around


def run_on_clock(order, mesh: tuple[int, ...] | None = None) -> tuple[float, list, list, list[Span]]:
    """On a rank: run an order, compute emulated. Returns seconds, spans, levels, and what was under way when.

    Collectives of a group follow one another: each is shown from when it began, or the one before it ended.
    """
    m = 1 + max(k for *_, k in order)
    layers, streams = toy.shard_layers(model(), *groups(mesh)), []
    toy.run_order(layers, [("gather", 0, 0), ("F", 0, 0), ("free", 0, 0)], *mine(1))  # to warm up
    dist.barrier()
    current.count_from_here()
    start = time.monotonic()
    toy.run_order(layers, order, *mine(m), around=_watching(layers, streams))
    seconds = time.monotonic() - start
    while len(streams) < sum(what in ("gather", "reduce") for what, *_ in order):
        time.sleep(1e-3)  # the last ones' ends are noted by another thread
    shown, until = [], 0.0
    for s in sorted(streams, key=lambda s: s.end):
        shown.append(s._replace(start=max(s.start, until)))
        until = s.end
    recorder = current.rank.recorder
    return seconds, list(recorder.spans), list(recorder.levels), shown


def order_timeline(world: World, order: list[tuple], ranks: int = 4) -> Timeline:
    """A step on the clock, in this order: compute, gathers and reductions, bytes of whole weights. The world
    has an emulated network. ranks: the first so many are in it; all do the same. The shortest of a few runs.
    """
    once = lambda: Timeline(*list(zip(*world.run(run_on_clock, order)[:ranks]))[1:])
    return clock.shortest(once, lambda timeline: timeline.makespan)


def hybrid(meshes: dict[str, tuple[int, ...] | None]) -> tuple[dict[str, float], dict[str, Traffic]]:
    """Seconds and traffic of a step on two emulated nodes of two, for each mesh of (replicate, shard)."""
    seconds, traffic, order = {}, {}, toy.fsdp_order(LAYERS)
    with World(4, fabric=TWO_NODES) as world:
        for name, mesh in meshes.items():
            once = lambda mesh=mesh: max(rank[0] for rank in world.run(run_on_clock, order, mesh))
            seconds[name] = clock.shortest(once, float)
            traffic[name] = world.traffic
    return seconds, traffic


def between_nodes(traffic: Traffic) -> float | None:
    """Bytes that ranks 0 and 1 sent to ranks 2 and 3, and back. None where the system does not say."""
    if traffic.matrix is None:
        return None
    return sum(traffic.matrix[a][b] for a in range(4) for b in range(4) if a // 2 != b // 2)
