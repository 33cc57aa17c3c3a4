"""b1's third practice: `init_device_mesh` and `fully_shard`, for two nodes of two."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .... import toy
from ....runtime import current
from ....runtime.failure import RankError
from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong
from .facts import mistake, shown_by
from .shown import LAYERS, mine, model


def shard_model(model):
    """Put FSDP on the model in place: each part of it, then the whole. Ranks 0 and 1 are a node, 2 and 3 too.

    Weights are cut over the two ranks of a node, and each node holds all of them.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _on_rank(attempt) -> dict:
    twin, wrapped = model(), model()
    whole = toy.make_batch(4, 16)
    toy.twin_step(twin, *whole)
    attempt(wrapped)
    current.count_from_here()
    tokens, targets = mine(1)
    toy.loss_of(wrapped(tokens), targets).backward()
    rows = current.counted_so_far()
    over = lambda op: next((row.members for row in rows if row.op == op), ())
    facts = {"gather": over("all_gather"), "scatter": over("reduce_scatter"), "sum": over("all_reduce")}
    facts["gathers"] = sum(row.calls for row in rows if row.op == "all_gather")
    facts["cut"] = all(isinstance(p, DTensor) for p in wrapped.parameters())
    full = lambda g: g.full_tensor() if isinstance(g, DTensor) else g
    pairs = zip(wrapped.parameters(), twin.parameters())
    facts["right"] = all(
        p.grad is not None and torch.allclose(full(p.grad), t.grad, rtol=1e-4, atol=1e-6) for p, t in pairs
    )
    facts["rank"] = dist.get_rank()
    return facts


node = lambda rank: (rank // 2 * 2, rank // 2 * 2 + 1)
across = lambda rank: (rank % 2, rank % 2 + 2)
# In this order: what comes first explains more.
MISTAKES = (
    mistake(
        "nothing is cut",
        "Not one all-gather: every rank holds all weights. Dimension 0 of the mesh replicates, dimension 1"
        " shards. Is yours of size 2, and have you called fully_shard?",
        lambda f: not f["gathers"],
    ),
    mistake(
        "sharding over the wrong mesh axis",
        "Each rank gathers from the other node, rank 0 from rank 2. A mesh's last dimension is innermost: its"
        " ranks are neighbours, in a node. Shard over that one. fully_shard goes by the order of dimensions,"
        " replicate then shard, not by their names.",
        lambda f: f["gather"] == across(f["rank"]),
    ),
    mistake(
        "cut over all four ranks",
        "That is FSDP over all: every gather crosses nodes. Give a mesh of (2, 2).",
        lambda f: len(f["gather"]) == 4,
    ),
    mistake(
        "one unit: the whole model at once",
        "One gather brings the whole model. fully_shard takes the parameters that no earlier call has taken:"
        " call it for each part first, then for the model.",
        lambda f: f["gathers"] == 1,
    ),
    mistake(
        "gathered weights kept",
        "One gather for each part, so weights stay from forward to backward. reshard_after_forward=False does"
        " that; and so does a missing last line: without fully_shard(model) each part is a root, and a root"
        " keeps its weights.",
        lambda f: f["gathers"] == LAYERS,
    ),
    mistake(
        "replicas that never meet",
        "Weights are cut in the node, but no all-reduce follows: the two nodes train two models. Give"
        " fully_shard the whole mesh of two dimensions, not mesh['shard'] alone.",
        lambda f: f["gather"] == node(f["rank"]) and not f["sum"],
    ),
    mistake(
        "parts left out",
        "Some parameters are no DTensors: fully_shard(model), after its parts, takes what is left.",
        lambda f: not f["cut"],
    ),
    mistake(
        "several parts in one unit",
        "Some gathers bring several blocks at once: nothing hides them, and these blocks are whole together."
        " Call fully_shard for each part of the model.",
        lambda f: f["gathers"] < 2 * (LAYERS - 2) + 1,
    ),
)


TAKEN = (
    "fully_shard(model) takes all parameters that are left, so a part that comes after it has none."
    " Call it for each part first, and for the model last. (model.modules() begins with the model itself.)"
)


def _judge(attempt) -> Answer:
    with World(4, timeout=15) as world:
        try:
            facts = world.run(_on_rank, attempt)
        except RankError as e:
            if any("overlapping meshes" in s.error.message for s in e.seen if s.error):
                return Answer("crashed", f"{TAKEN}\n\n{e.report}", "the model before its parts")
            raise
    figures = [
        ("rank 0 gathers weights with ranks", str(list(facts[0]["gather"])), "[0, 1]"),
        ("and sums gradients' shards with", str(list(facts[0]["sum"])), "[0, 2]"),
    ]
    if mistaken := shown_by(facts, MISTAKES):
        return wrong(mistaken.name, mistaken.text, *figures)
    if not all(f["right"] for f in facts):
        return wrong("other gradients than the twin's", "Look at the mesh: who averages with whom?", *figures)
    return right(
        "Weights are gathered in the node. Between the nodes go gradients alone, and only their shards.",
        *figures,
    )


mesh = Exercise(
    "a mesh, and fully_shard",
    shard_model,
    _judge,
    minutes=8,
    hints=[
        'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")). The last dimension is'
        " innermost: neighbours.",
        "for part in model: fully_shard(part, mesh=mesh). Then fully_shard(model, mesh=mesh).",
    ],
)
