"""Drop 03: the split of the MLP, forward and backward, and what it saves."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers import toy
from helpers.practice.engine import OnRanks
from helpers.practice.runs import Run, alike
from helpers.ranks import memory
from helpers.ranks.world import World

# -- practice: split the MLP ----------------------------------------------------------------------


def split_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down, with each rank doing its share of the work.

    x: (tokens, h), the same on every rank. up: (h, 4h), down: (4h, h), whole: take your part of them.
    Return the whole output on every rank. Its backward must give every rank the whole gradient of x.
    """
    x = toy.Enter.apply(x, None)
    inside = F.gelu(x @ up.chunk(world_size, dim=1)[rank])
    return toy.Leave.apply(inside @ down.chunk(world_size, dim=0)[rank], None)


TOKENS, HIDDEN = 32, 64


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in shapes]


def _to_split(rank: int, n: int) -> list[tuple]:
    # Of a plain all_reduce PyTorch warns in ten lines; what it leads to is told below.
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
    x, up, down = _random((TOKENS, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN))
    return [(x.requires_grad_(), up / 8, down / 16, rank, n)]


def _unused(run: Run, truth: Run) -> bool:
    """Whether the ranks return partial sums of the output, though they called an all-reduce."""
    if run.error or not run.ranks[0]["forward"]:
        return False
    outputs, whole = [rank["values"][0] for rank in run.ranks], truth.ranks[0]["values"][0]
    return alike(sum(outputs), whole) and not alike(outputs[0], whole / run.n)


mlp = OnRanks(
    "split the MLP",
    split_mlp,
    minutes=8,
    hints=[
        "Which cut of `up` lets each rank apply gelu without asking anybody? up.chunk(world_size,"
        " dim=1)[rank] is a rank's columns.",
        "A rank then has some columns of the inside. Which rows of `down` do they meet?"
        " down.chunk(world_size, dim=0)[rank].",
        "What comes out is a partial sum: y = toy.Leave.apply(y, None) adds the ranks' partial sums.",
        "Backward, each rank has only a partial sum of the gradient of x: x = toy.Enter.apply(x, None),"
        " before anything else.",
    ],
    tries=((2,), (4,)),
    inputs=_to_split,
    gradient=lambda arguments: _random((TOKENS, HIDDEN), (TOKENS, HIDDEN))[1],
    praise="The output and the gradient of x are the twin's, with one all-reduce forward and one backward.",
    figures=lambda run, truth: [
        (
            f"share of the work on the busiest of {run.n} ranks",
            *(f"{one.most('flops') / truth.most('flops') / run.n:.2f}" for one in (run, truth)),
        )
    ],
    shows={"a sum that is not used": _unused},
    mistakes="""
        a sum that is not used
            Each rank returns its partial sum of the output, though there was an all-reduce. toy.Leave
            leaves its argument alone: use what it returns.
        partial outputs never summed
            Each rank holds a partial sum. A row split ends with one all-reduce: toy.Leave.
            - return toy.Leave => return toy.Enter
        the non-linearity of partial sums
            You sum gelu of the parts, where gelu of the sum was meant. Split `up` by columns: then each
            rank has whole numbers to bend, only fewer of them.
            - x @ up.chunk(world_size, dim=1)[rank] => x.chunk(world_size, dim=1)[rank] @
              up.chunk(world_size, dim=0)[rank] & inside @ down.chunk(world_size, dim=0)[rank], None) =>
              inside, None) @ down
        the mean where the sum was meant
            The output is that of one process, divided by the number of ranks. The ranks hold partial sums:
            nothing is to be divided.
            - [rank], None) => [rank], None) / world_size
        Enter and Leave swapped
            x is whole on every rank already, and you sum it over them before it is used. The output is not
            summed. toy.Enter stands before the column cut, toy.Leave after the row cut.
            - toy.Enter => toy.X & toy.Leave => toy.Enter & toy.X => toy.Leave
        x summed before the cut
            x is whole on every rank already, and you sum it over them before it is used. toy.Leave belongs
            after the row cut; before the column cut stands toy.Enter.
            - toy.Enter => toy.Leave
        summed where it is whole
            The output is that of one process, times the number of ranks: what you sum is whole on every
            rank.
            - return toy.Leave.apply( => return toy.Leave.apply(toy.Leave.apply( & [rank], None) => [rank],
              None), None)
        an all-reduce after the column split
            After a column split the ranks hold different columns. To add them up mixes columns that do not
            belong together. They need no exchange at all if a row split follows.
            - F.gelu(x @ up.chunk(world_size, dim=1)[rank]) => toy.Leave.apply(F.gelu(x @
              up.chunk(world_size, dim=1)[rank]), None)
            - F.gelu(x @ up.chunk(world_size, dim=1)[rank]) => F.gelu(toy.Leave.apply(x @
              up.chunk(world_size, dim=1)[rank], None))
            - F.gelu(x @ up.chunk(world_size, dim=1)[rank]) => toy.Leave.apply(F.gelu(x @
              up.chunk(world_size, dim=1)[rank]), None) & return toy.Leave => return toy.Enter
            - F.gelu(x @ up.chunk(world_size, dim=1)[rank]) => F.gelu(toy.Leave.apply(x @
              up.chunk(world_size, dim=1)[rank], None)) & return toy.Leave => return toy.Enter
        the non-linearity is left out
            There is no gelu between the two products.
            - F.gelu( => (
            - F.gelu( => ( & return toy.Leave => return toy.Enter
        another non-linearity
            The output is that of relu, or of gelu by tanh. Use F.gelu as it is.
            - F.gelu => F.relu
            - F.gelu( => F.gelu(approximate="tanh", input=
        gelu in another place
            gelu stands after `down`; it belongs between the two products.
            - F.gelu( => ( & toy.Leave.apply(inside @ down.chunk(world_size, dim=0)[rank], None) =>
              F.gelu(toy.Leave.apply(inside @ down.chunk(world_size, dim=0)[rank], None))
            - F.gelu( => ( & inside @ down.chunk(world_size, dim=0)[rank] => F.gelu(inside @
              down.chunk(world_size, dim=0)[rank])
        one rank's part on all
            Every rank takes part 0 of both matrices. Take number `rank`.
            - [rank] => [0]
        rows of another rank
            A rank's columns of `up` meet the rows of `down` with the same number; yours meet another
            rank's.
            - dim=0)[rank] => dim=0)[(rank + 1) % world_size]
            - dim=0)[rank] => dim=0)[(rank + 2) % world_size]
            - dim=0)[rank] => dim=0)[(rank + 3) % world_size]
            - dim=0)[rank] => dim=0)[world_size - 1 - rank]
        a fixed number of parts
            You cut into more parts than there are ranks, and some parts nobody takes. Cut into world_size.
            - chunk(world_size => chunk(4
            - chunk(world_size => chunk(8
        every rank did more than its share
            A rank multiplied more than its part. Cut both matrices before you multiply.
            $ flops
        the backward all-reduce is missing
            The output is right, the gradient of x is not: each rank has only what came back through its own
            columns. Forward, x goes to every rank unchanged; backward, the ranks' gradients must be added.
            toy.Enter does that, if you go on with the tensor that it returns.
            - x = toy.Enter.apply(x, None) => pass
        a gradient summed once too often
            The gradient of x is added over the ranks where it is whole already. Each of toy.Enter and
            toy.Leave belongs in one place.
            - (x, None) => (toy.Enter.apply(x, None), None)
        a gradient that is divided
            The gradient of x is the twin's, divided by the number of ranks. The ranks hold partial sums:
            add them, and divide by nothing.
            - (x, None) => (x / world_size + x.detach() * (1 - 1 / world_size), None)
        toy.Enter inside the pair
            The output is right, the gradient of x is not. You sum gradients inside the pair, between `up`
            and `down`. There each rank has gradients of its own columns, which must not be added. toy.Enter
            stands before `up`, once.
            - inside @ down => toy.Enter.apply(inside, None) @ down
            - inside @ down => toy.Enter.apply(inside, None) @ down & x = toy.Enter.apply(x, None) => pass
            - F.gelu(x @ up.chunk(world_size, dim=1)[rank]) => F.gelu(toy.Enter.apply(x @
              up.chunk(world_size, dim=1)[rank], None))
            - F.gelu(x @ up.chunk(world_size, dim=1)[rank]) => F.gelu(toy.Enter.apply(x @
              up.chunk(world_size, dim=1)[rank], None)) & x = toy.Enter.apply(x, None) => pass
        matrices that do not meet
            Two matrices do not meet: as many columns are needed on the left as rows on the right. x has all
            h columns, so it meets columns of `up`, each whole; a rank's columns of `up` meet as many rows
            of `down`.
            ! shapes cannot be multiplied
        Enter or Leave without .apply
            Write `toy.Enter.apply(x, None)`, and so with toy.Leave: `.apply`, the tensor, and the group.
            None means all ranks.
            ! '(Enter|Leave)'
        the group is missing
            Write `toy.Enter.apply(x, None)`, and so with toy.Leave: `.apply`, the tensor, and the group.
            None means all ranks.
            ! positional argument: 'group'
        another shape than the output's
            The output is (tokens, h) on every rank.
            ~ form
        an output cut off from x
            Autograd follows neither a detach() nor a tensor that dist.all_gather has filled. Nothing needs
            gathering here: a rank's columns of `up` meet its rows of `down`.
            ~ cut
        another output
            Which part of `up` and of `down` does a rank take?
            ~ values
        another gradient of x
            Backward, each rank's own columns give it a part of the gradient alone.
            ~ gradients
        more messages than needed
            Right, but one all-reduce forward and one backward are enough.
            $ calls
        more bytes than needed
            Right, but an all-reduce moves less than gathering every rank's share.
            $ bytes
    """,
)


# -- what the cells show --------------------------------------------------------------------------


def memory_on(t: int, b: int = 8, s: int = 32) -> dict[str, int]:
    """Bytes by kind that rank 0 of t really holds in one tensor-parallel step with Adam."""

    def step():
        model = toy.split_width(toy.ToyTransformer(hidden=256))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, targets = toy.make_batch(b, s)
        with memory.saved_activations(model) as held:
            loss = toy.loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return memory.by_kind(model, optimizer, held.peak)

    with World(t) as world:
        return world.run(step)[0]


def gradients_match(world: World) -> list[bool]:
    """Whether each rank's gradients of a tensor-parallel step are its slices of the twin's, to float64's
    digits.
    """

    def compare():
        twin, batch = toy.ToyTransformer(hidden=64).double(), toy.make_batch(8, 16)
        toy.twin_step(twin, *batch)
        model = toy.ToyTransformer(hidden=64, seed=dist.get_rank()).double()
        toy.share_weights(model)
        toy.split_width(model)
        toy.tensor_parallel_step(model, *batch)
        rank, size = dist.get_rank(), dist.get_world_size()
        same = []
        for (name, whole), mine in zip(twin.named_parameters(), model.parameters()):
            part = whole.grad
            if whole.shape != mine.shape:
                part = part.chunk(size, 0 if any(f".{c}." in name for c in ("q", "k", "v", "up")) else 1)[
                    rank
                ]
            same.append(torch.allclose(part, mine.grad, rtol=1e-9, atol=1e-12))
        return all(same)

    return world.run(compare)
