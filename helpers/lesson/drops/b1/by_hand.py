"""b1's first practice: one layer under FSDP, forward and backward: gather, compute, free."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ....runtime import current
from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong
from .facts import mistake, shown_by


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


B, H = 2, 64  # the weights are (H, H), and by far the largest thing here


class _Layer:
    """tanh(x · W), which notes what it is given, and what the rank holds while later layers run."""

    def __init__(self, dy: torch.Tensor):
        self.dy, self.facts = dy, {"kept": None, "forward": None, "backward": None}
        self._before = current.rank.budget.now

    def _whole(self, w, when: str) -> torch.Tensor:
        there = w.untyped_storage().nbytes() >= w.nbytes
        self.facts[when] = "freed" if not there else "whole" if w.numel() == H * H else f"{w.numel()}"
        return w.detach().reshape(H, H) if self.facts[when] == "whole" else torch.zeros(H, H)

    def forward(self, w, x):
        return torch.tanh(x @ self._whole(w, "forward"))

    def rest(self, y):
        until = time.monotonic() + 1  # a collective's own thread may hold its tensors a moment longer
        while (kept := current.rank.budget.now - self._before > 4 * H * H / 2) and time.monotonic() < until:
            time.sleep(0.01)
        self.facts["kept"] = kept
        return self.dy.clone()

    def backward(self, w, x, dy):
        w = self._whole(w, "backward")
        dz = dy * (1 - torch.tanh(x @ w) ** 2)
        return dz @ w.T, (x.T @ dz).flatten()


def _case(rank: int, d: int) -> tuple:
    """(shard, x, dy, dx, what the gradient may be, by name): as one process finds them from all examples."""
    chance = torch.Generator().manual_seed(0)
    weights = torch.randn(H, H, generator=chance) / H**0.5
    xs, dys = (torch.randn(d, B, H, generator=chance).unbind() for _ in range(2))
    by_rank = []
    for x, dy in zip(xs, dys):
        x, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        torch.tanh(x @ w).backward(dy)
        by_rank.append((x.grad, w.grad.flatten()))
    chunk = lambda whole, r=rank: whole.flatten().chunk(d)[r].clone()
    total, alone = sum(dw for _, dw in by_rank), chunk(by_rank[rank][1])
    known = {
        "mean": chunk(total) / d,
        "sum": chunk(total),
        "divided twice": chunk(total) / d**2,
        "this rank's alone": alone,
        "this rank's, divided": alone / d,
        "whole": total / d,
        **{f"shard {r}": chunk(total / d, r) for r in range(d)},
    }
    return chunk(weights), xs[rank], dys[rank], by_rank[rank][0], known


def _on_rank(attempt) -> dict:
    rank, d = dist.get_rank(), dist.get_world_size()
    shard, x, dy, truth, known = _case(rank, d)
    layer = _Layer(dy)
    answer = attempt(shard, x.clone(), layer, rank, d)
    rows = current.counted_so_far()
    calls = lambda op: sum(row.calls for row in rows if row.op == op)
    facts = layer.facts | {"gathers": calls("all_gather"), "all_reduces": calls("all_reduce"), "pair": False}
    facts["reductions"] = calls("reduce_scatter") + calls("all_reduce")
    if not isinstance(answer, (tuple, list)) or len(answer) != 2 or not all(map(torch.is_tensor, answer)):
        return facts
    dx, gradient = answer
    near = lambda a, b: a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    otherwise = "whole" if gradient.numel() == H * H else "another"
    name = next((name for name, value in known.items() if near(gradient.flatten(), value)), otherwise)
    return facts | {"pair": True, "dx": near(dx, truth), "gradient": name, "exchanged": near(gradient, truth)}


KEPT = (
    "While the later layers run, the whole weights are still in memory. With every layer kept so, the model"
    " is whole on every rank. `del` each name that holds them, or give their memory back, before layer.rest."
)
AGAIN = (
    "Backward needs the weights too: dx = dy · Wᵀ. They were freed after forward, so gather them again, right"
    " before layer.backward. (Who keeps them instead has chosen reshard_after_forward=False: fewer bytes on"
    " the wire, and the whole model in memory.)"
)
TWICE = (
    "A reduce-scatter does both: it sums over the ranks, and leaves each rank its shard. A second reduction"
    " sums sums, or sends the bytes twice."
)
# In this order: what comes first explains more.
MISTAKES = (
    mistake(
        "nothing is gathered",
        "Not one all-gather: each rank has its shard, and whatever its empty tensors held."
        " dist.all_gather(parts, shard) fills them.",
        lambda f: f["gathers"] == 0,
    ),
    mistake(
        "dx and the gradient exchanged",
        "The second of the two is dx. Return dx first, then this rank's shard of the gradient.",
        lambda f: f["exchanged"],
    ),
    mistake(
        "backward without a second gather", AGAIN, lambda f: f["gathers"] == 1 or f["backward"] == "freed"
    ),
    mistake("gathered weights kept", KEPT, lambda f: f["kept"]),
    mistake("gradients reduced twice", TWICE, lambda f: f["reductions"] > 1),
    mistake(
        "an all-reduce where a reduce-scatter is enough",
        "The values are right. An all-reduce brings every rank the whole sum, and you throw all but a shard"
        " away: twice the bytes.",
        lambda f: f["all_reduces"] == 1 and f["gradient"] == "mean",
    ),
    mistake(
        "gradients of this rank alone",
        "Every rank saw other examples. Sum the gradients over the ranks; each keeps its shard of the sum.",
        lambda f: f["gradient"] == "this rank's alone",
    ),
    mistake(
        "gradients of this rank alone",
        "You divide, but nobody has added: each rank's gradient is from its own examples.",
        lambda f: f["gradient"] == "this rank's, divided",
    ),
    mistake(
        "the sum where the mean was meant",
        "The reduce-scatter sums. Divide by the number of ranks, as data parallelism does.",
        lambda f: f["gradient"] == "sum",
    ),
    mistake(
        "divided twice",
        "The gradients are the mean, divided by the ranks once more.",
        lambda f: f["gradient"] == "divided twice",
    ),
    mistake(
        "the whole gradient kept",
        "Return your shard of the gradient. The optimizer needs no more, since it holds that shard's state.",
        lambda f: f["gradient"] == "whole",
    ),
)


def _judge(attempt) -> Answer:
    for d in (4, 2):
        with World(d, timeout=8, memory=1e9) as world:
            facts = world.run(_on_rank, attempt)
        first = facts[0]
        if not all(f["pair"] for f in facts):
            return wrong("no pair of tensors", "Return dx, and this rank's shard of the gradient.")
        if any(f["forward"] is None or f["kept"] is None or f["backward"] is None for f in facts):
            return wrong(
                "a part left out", "Call layer.forward, then layer.rest, then layer.backward, each once."
            )
        for when in ("forward", "backward"):
            if first[when] == str(H * H // d):
                return wrong(
                    "a shard where the whole layer is needed",
                    f"layer.{when} got {first[when]} of the layer's {H * H} weights. Gather them first.",
                )
            if first[when] not in ("whole", "freed"):
                return wrong(
                    "other weights than the layer's",
                    f"layer.{when} got {first[when]} numbers for w, and the layer has {H * H} weights. Its"
                    " arguments are w and x, and for backward also dy.",
                )
        figures = [
            ("all-gathers", str(first["gathers"]), "2"),
            ("reduce-scatters and all-reduces", str(first["reductions"]), "1"),
        ]
        if mistaken := shown_by(facts, MISTAKES):
            return wrong(mistaken.name, mistaken.text, *figures)
        if any(f["gradient"].startswith("shard") for f in facts):
            return wrong(
                "a shard of another rank",
                "The gradient is the mean, but of another rank's weights: rank r keeps chunk number r.",
            )
        if not all(f["dx"] for f in facts):
            return wrong(
                "another dx", "dx is what layer.backward gives, from the gathered weights.", *figures
            )
        if not all(f["gradient"] == "mean" for f in facts):
            return wrong("another gradient", "It is chunk number `rank` of the ranks' mean of dw.", *figures)
    return right(
        "dx and the gradient's shard are the twin's on 4 and on 2 ranks, and nothing whole was left while the"
        " later layers ran.",
        *figures,
    )


one_layer = Exercise(
    "gather, compute, free",
    fsdp_layer,
    _judge,
    minutes=12,
    hints=[
        "A gather: parts = [torch.empty_like(shard) for _ in range(world_size)], then"
        " dist.all_gather(parts, shard), then torch.cat(parts).",
        "Free before layer.rest: `del w`, and the parts too, where a name still holds them. Backward then"
        " needs a gather of its own.",
        "dist.reduce_scatter(mine, list(dw.chunk(world_size))) sums dw over the ranks, and leaves each its"
        " shard in `mine`, torch.empty_like(shard). Then the mean.",
    ],
)
