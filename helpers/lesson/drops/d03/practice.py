"""Drop 03's practice: split the MLP over ranks, forward and backward."""

from __future__ import annotations

import itertools
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from .... import toy
from ....runtime import current
from ....runtime.failure import RankError
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....theory.collectives import book
from ...practice import Answer, Exercise, Mistake, proven, right, wrong


def split_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down, with each rank doing its share of the work.

    x: (tokens, h), the same on every rank. up: (h, 4h), down: (4h, h), whole: take your part of them.
    Return the whole output on every rank. Its backward must give every rank the whole gradient of x.
    """
    x = toy.Enter.apply(x, None)
    inside = F.gelu(x @ up.chunk(world_size, dim=1)[rank])
    return toy.Leave.apply(inside @ down.chunk(world_size, dim=0)[rank], None)


TOKENS, HIDDEN = 32, 64


def _numbers() -> tuple[torch.Tensor, ...]:
    """x, up, down and dy, the same on all ranks and here."""
    g = torch.Generator().manual_seed(7)
    x, up, down, dy = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((TOKENS, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (TOKENS, HIDDEN))
    )
    return x, up / 8, down / 16, dy


def _on_rank(attempt) -> dict:
    """One rank's part: the attempt's output and gradient of x, its FLOPs, and its all-reduces forward."""
    # Of a plain all_reduce PyTorch warns in ten lines; what it leads to is judged below.
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
    x, up, down, dy = _numbers()
    x.requires_grad_()
    with FlopCounterMode(display=False) as flops:
        got = attempt(x, up, down, dist.get_rank(), dist.get_world_size())
    sums = sum(row.calls for row in current.counted_so_far() if row.op == "all_reduce")
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
    measured = {"shape": shape, "sums": sums, "flops": flops.get_total_flops(), "cut": True, "dx": None}
    if shape != (TOKENS, HIDDEN):
        return measured
    measured["y"] = got.detach().clone()
    if got.requires_grad:
        with FlopCounterMode(display=False) as back:
            got.backward(dy)
        measured |= {"cut": False, "dx": x.grad, "flops": measured["flops"] + back.get_total_flops()}
    return measured


COLUMNS = (
    "After a column split the ranks hold different columns. To add them up mixes columns that do not belong"
    " together. They need no exchange at all if a row split follows."
)
SUMMED = "x is whole on every rank already, and you sum it over them before it is used."
WHY = {
    "partial outputs never summed": "Each rank holds a partial sum. A row split ends with one"
    " all-reduce: toy.Leave.",
    "the non-linearity of partial sums": "You sum gelu of the parts, where gelu of the sum was meant. Split"
    " `up` by columns: then each rank has whole numbers to bend, only fewer of them.",
    "the mean where the sum was meant": "The output is that of one process, divided by the number of ranks."
    " The ranks hold partial sums: nothing is to be divided.",
    "summed where it is whole": "The output is that of one process, times the number of ranks: what you sum"
    " is whole on every rank.",
    "Enter and Leave swapped": f"{SUMMED} The output is not summed. toy.Enter stands before the column cut,"
    " toy.Leave after the row cut.",
    "x summed before the cut": f"{SUMMED} toy.Leave belongs after the row cut; before the column cut stands"
    " toy.Enter.",
    "an all-reduce after the column split": COLUMNS,
    "the non-linearity is left out": "There is no gelu between the two products.",
    "another non-linearity": "The output is that of relu, or of gelu by tanh. Use F.gelu as it is.",
    "gelu in another place": "gelu stands after `down`; it belongs between the two products.",
    "one rank's part on all": "Every rank takes part 0 of both matrices. Take number `rank`.",
    "rows of another rank": "A rank's columns of `up` meet the rows of `down` with the same number; yours"
    " meet another rank's.",
    "a fixed number of parts": "You cut into more parts than there are ranks, and some parts nobody takes."
    " Cut into world_size.",
}


MEET = (
    "Two matrices do not meet: as many columns are needed on the left as rows on the right. x has all h"
    " columns, so it meets columns of `up`, each whole; a rank's columns of `up` meet as many rows of `down`."
)


INSIDE = (
    "The output is right, the gradient of x is not. You sum gradients inside the pair, between `up` and"
    " `down`. There each rank has gradients of its own columns, which must not be added. toy.Enter stands"
    " before `up`, once."
)
APPLY = (
    "Write `toy.Enter.apply(x, None)`, and so with toy.Leave: `.apply`, the tensor, and the group. None means"
    " all ranks."
)
# What an error says, how the mistake is called, what to do.
CRASHES = (
    ("shapes cannot be multiplied", "matrices that do not meet", MEET),
    ("'Enter'", "Enter or Leave without .apply", APPLY),
    ("'Leave'", "Enter or Leave without .apply", APPLY),
    ("positional argument: 'group'", "the group is missing", APPLY),
)


class _Paper:
    """What t ranks hold, by hand: the right output and gradient, and what mistakes give."""

    def __init__(self, t: int):
        self.t, (self.x, self.up, self.down, self.dy) = t, _numbers()
        x = self.x.clone().requires_grad_()
        self.y = F.gelu(x @ self.up) @ self.down
        self.y.backward(self.dy)
        self.y, self.dx = self.y.detach(), x.grad
        self.ranks = range(t)

    def inside(self, r: int, x=None, pieces: int | None = None) -> torch.Tensor:
        """A rank's columns, before the non-linearity."""
        return (self.x if x is None else x) @ self.up.chunk(pieces or self.t, 1)[r]

    def part(self, r: int, rows: int | None = None, bend=F.gelu, x=None, pieces: int | None = None):
        """A rank's share of the output, if it takes the rows of rank `rows`."""
        down = self.down.chunk(pieces or self.t, 0)[r if rows is None else rows]
        return bend(self.inside(r, x, pieces)) @ down

    def dx_inside(self, r: int, bent: bool, twice: bool) -> torch.Tensor:
        """The same where the gradient is summed inside the pair: of what gelu gives (bent), or of what it is
        given. twice: and that of x too.
        """
        columns = [self.inside(i).requires_grad_() for i in self.ranks]
        backs = [self.dy @ down.T for down in self.down.chunk(self.t, 0)]
        if bent:
            backs = [sum(backs)] * self.t
        backs = [torch.autograd.grad(F.gelu(c), c, back)[0] for c, back in zip(columns, backs)]
        if not bent:
            backs = [sum(backs)] * self.t
        dx = [back @ up.T for back, up in zip(backs, self.up.chunk(self.t, 1))]
        return sum(dx) if twice else dx[r]

    def sum(self, **how) -> torch.Tensor:
        return sum(self.part(r, **how) for r in self.ranks)

    def own_dx(self, r: int) -> torch.Tensor:
        """What comes back to x through a rank's own columns."""
        x = self.x.clone().requires_grad_()
        self.part(r, x=x).backward(self.dy)
        return x.grad

    def mistakes(self) -> list[Mistake]:
        """Wrong outputs that have a name; `answers` takes a rank."""
        t, ranks, rows = self.t, self.ranks, self.down.chunk(self.t, 0)
        plain, tanh = lambda x: x, lambda x: F.gelu(x, approximate="tanh")
        columns = sum(self.inside(r) for r in ranks)
        bent = sum(F.gelu(self.inside(r)) for r in ranks)
        in_rows = [a @ b for a, b in zip(self.x.chunk(t, 1), self.up.chunk(t, 0))]
        return [
            Mistake(name, WHY[name], answers)
            for name, answers in (
                ("partial outputs never summed", self.part),
                ("the non-linearity of partial sums", lambda r: sum(map(F.gelu, in_rows)) @ self.down),
                ("the mean where the sum was meant", lambda r: self.y / t),
                ("summed where it is whole", lambda r: self.y * t),
                ("Enter and Leave swapped", lambda r: self.part(r, x=t * self.x)),
                ("x summed before the cut", lambda r: self.sum(x=t * self.x)),
                ("an all-reduce after the column split", lambda r: sum(F.gelu(columns) @ d for d in rows)),
                ("an all-reduce after the column split", lambda r: F.gelu(columns) @ rows[r]),
                ("an all-reduce after the column split", lambda r: sum(bent @ d for d in rows)),
                ("an all-reduce after the column split", lambda r: bent @ rows[r]),
                ("the non-linearity is left out", lambda r: self.sum(bend=plain)),
                ("the non-linearity is left out", lambda r: self.part(r, bend=plain)),
                ("another non-linearity", lambda r: self.sum(bend=F.relu)),
                ("another non-linearity", lambda r: self.sum(bend=tanh)),
                ("gelu in another place", lambda r: F.gelu(self.sum(bend=plain))),
                ("gelu in another place", lambda r: sum(F.gelu(self.part(i, bend=plain)) for i in ranks)),
                ("one rank's part on all", lambda r: t * self.part(0)),
                *(("rows of another rank", lambda r, k=k: self.sum_of_rows(k)) for k in range(1, t)),
                *(("a fixed number of parts", lambda r, k=k: self.sum(pieces=k)) for k in (3, 4, 8) if k > t),
            )
        ]

    def sum_of_rows(self, k: int) -> torch.Tensor:
        return sum(self.part(r, rows=(r + k) % self.t) for r in self.ranks)


def judge(attempt) -> Answer:
    for t in (2, 4):
        with World(t, timeout=5) as world:
            try:
                results = world.run(_on_rank, attempt)
            except RankError as e:
                messages = [s.error.message for s in e.seen if s.error]
                for part, name, advice in CRASHES:
                    if any(part in message for message in messages):
                        return Answer("crashed", f"{advice}\n\n{e.report}", name)
                raise
            traffic = world.traffic
        if answer := _judged(results, traffic, t):
            return answer
    return right(
        "The output and the gradient of x are the twin's, with one all-reduce forward and one backward.",
        ("share of the work on the busiest of 4 ranks", f"{_work(results):.2f}", "0.25"),
    )


def _work(results: list[dict]) -> float:
    """The busiest rank's share of two products forward and two backward."""
    return max(r["flops"] for r in results) / (2 * (2 * TOKENS * HIDDEN * 4 * HIDDEN * 2))


def _judged(results: list[dict], traffic: Traffic, t: int) -> Answer | None:
    """What is wrong on t ranks; None if nothing is."""
    if any(r["shape"] == "NoneType" for r in results):
        return wrong(
            "nothing returned",
            "Your function returned None; the output is wanted. dist.all_reduce returns None too: it writes"
            " the sum into the tensor that you give it.",
        )
    if any(r["shape"] in ("Enter", "Leave") for r in results):
        return wrong("Enter or Leave without .apply", APPLY)
    if any(r["shape"] != (TOKENS, HIDDEN) for r in results):
        return wrong(
            "another shape than the output's",
            f"On {t} ranks you return {results[0]['shape']}; the output is {(TOKENS, HIDDEN)} on every rank.",
        )
    if any(r["y"].dtype != torch.float64 for r in results):
        return wrong("another dtype", f"x is float64, and you return {results[0]['y'].dtype}. Keep x's.")
    near = lambda a, b: torch.allclose(a, b, rtol=1e-7, atol=1e-9)
    paper, ranks = _Paper(t), [(r,) for r in range(t)]
    figures = [(f"share of the work on the busiest of {t} ranks", f"{_work(results):.2f}", f"{1 / t:.2f}")]
    if not all(near(r["y"], paper.y) for r in results):
        mistake = proven([r["y"] for r in results], ranks, paper.mistakes(), near)
        if mistake and mistake.name == "partial outputs never summed" and results[0]["sums"]:
            return wrong(
                "a sum that is not used",
                "Each rank returns its partial sum of the output, though there was an all-reduce. toy.Leave"
                " leaves its argument alone: use what it returns.",
            )
        if mistake:
            return wrong(mistake.name, f"On {t} ranks: {mistake.text}")
        alike = [r for r in range(t) if near(results[r]["y"], results[0]["y"])]
        return wrong(
            "another output",
            f"On {t} ranks the output is not that of one process"
            f" ({'the same on all' if len(alike) == t else 'and differs between ranks'}; its length is"
            f" {(results[0]['y'].norm() / paper.y.norm()).item():.2f} times the twin's on rank 0;"
            f" {results[0]['sums']} all-reduces forward). Which part of `up` and of `down` does a rank take?",
        )
    if _work(results) > 1.01 / t:
        return wrong(
            "every rank did more than its share",
            "The output is right, but a rank multiplied more than its part. Cut both matrices before you"
            " multiply.",
            *figures,
        )
    if any(r["cut"] or r["dx"] is None for r in results):
        return wrong(
            "an output cut off from x",
            "The output is right, but autograd cannot get from it back to x: it follows neither a detach()"
            " nor a tensor that dist.all_gather has filled. Nothing needs gathering here: a rank's columns of"
            " `up` meet its rows of `down`.",
        )
    if not all(near(r["dx"], paper.dx) for r in results):
        back = [
            Mistake(
                "the backward all-reduce is missing",
                "The output is right, the gradient of x is not: each rank has only what came back through its"
                " own columns. Forward, x goes to every rank unchanged; backward, the ranks' gradients must"
                " be added. toy.Enter does that, if you go on with the tensor that it returns.",
                paper.own_dx,
            ),
            Mistake(
                "a gradient summed once too often",
                f"The gradient of x is {t} times too large: it is added over the ranks where it is whole"
                " already. Each of toy.Enter and toy.Leave belongs in one place.",
                lambda r: t * paper.dx,
            ),
            Mistake(
                "a gradient that is divided",
                f"The gradient of x is the twin's divided by {t}. The ranks hold partial sums: add them,"
                " and divide by nothing.",
                lambda r: paper.dx / t,
            ),
            *(
                Mistake("toy.Enter inside the pair", INSIDE, lambda r, how=how: paper.dx_inside(r, *how))
                for how in itertools.product((True, False), repeat=2)
            ),
        ]
        if mistake := proven([r["dx"] for r in results], ranks, back, near):
            return wrong(mistake.name, mistake.text, *figures)
        return wrong(
            "another gradient of x",
            f"On {t} ranks the output is right, the gradient of x is not: on rank 0 its length is"
            f" {(results[0]['dx'].norm() / paper.dx.norm()).item():.2f} times the twin's, and its own columns"
            f" alone would give {(paper.own_dx(0).norm() / paper.dx.norm()).item():.2f}.",
            *figures,
        )
    if (calls := sum(row.calls for row in traffic.ranks[0])) > 2:
        return wrong(
            "more messages than needed",
            f"Right, but with {calls} collectives: one all-reduce forward and one backward are enough.",
            *figures,
        )
    allowed = 2 * book("all_reduce", 8 * TOKENS * HIDDEN, t)
    if max(traffic.counted) > 1.01 * allowed:
        return wrong(
            "more bytes than needed",
            f"Right, but the busiest rank sent {max(traffic.counted):,.0f} bytes, where {allowed:,.0f} are"
            " enough: an all-reduce moves less than gathering every rank's share.",
            *figures,
        )
    return None


mlp = Exercise(
    "split the MLP",
    split_mlp,
    judge,
    minutes=8,
    hints=[
        (
            "Which cut of `up` lets each rank apply gelu without asking anybody? up.chunk(world_size,"
            " dim=1)[rank] is a rank's columns."
        ),
        (
            "A rank then has some columns of the inside. Which rows of `down` do they meet?"
            " down.chunk(world_size, dim=0)[rank]."
        ),
        "What comes out is a partial sum: y = toy.Leave.apply(y, None) adds the ranks' partial sums.",
        (
            "Backward, each rank has only a partial sum of the gradient of x: x = toy.Enter.apply(x, None),"
            " before anything else."
        ),
    ],
)
