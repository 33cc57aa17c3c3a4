"""Drop 03: the split of the MLP, forward and backward, and what it saves."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drops import d02
from helpers import toy
from helpers.practice.engine import OnRanks
from helpers.ranks.world import World

# -- practice: split the MLP ----------------------------------------------------------------------


def split_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down, with each rank doing its share of the work.

    x: (tokens, h), the same on every rank. up: (h, 4h), down: (4h, h), whole: take your part of them.
    Return the whole output on every rank. Its backward must give every rank the whole gradient of x.
    """
    # x is whole everywhere, but each rank finds a part of its gradient only: Enter adds these in backward.
    x = toy.Enter.apply(x, None)
    inside = F.gelu(x @ up.chunk(world_size, dim=1)[rank])
    # My columns of up are what my rows of down need. Leave adds the ranks' partial sums.
    return toy.Leave.apply(inside @ down.chunk(world_size, dim=0)[rank], None)


TOKENS, HIDDEN = 30, 64  # four ranks cannot cut the tokens instead


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in shapes]


def _to_split(rank: int, n: int) -> list[tuple]:
    x, up, down = _random((TOKENS, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN))
    return [(x.requires_grad_(), up / 8, down / 16, rank, n)]


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
    mistakes=r"""
        partial outputs never summed
            Each rank returns a partial sum. A row split ends with one all-reduce: return what toy.Leave
            returns, which leaves its argument alone.
            - return toy.Leave => return toy.Enter
        the non-linearity of partial sums
            You sum gelu of the parts, where gelu of the sum was meant. Split `up` by columns: then each
            rank has whole numbers to bend, only fewer of them.
            - x @ up.chunk(world_size, dim=1)[rank] => x.chunk(world_size, dim=1)[rank] @
              up.chunk(world_size, dim=0)[rank] & inside @ down.chunk(world_size, dim=0)[rank], None) =>
              inside, None) @ down
        the mean where the sum was meant
            The ranks hold partial sums: nothing is to be divided.
            - [rank], None) => [rank], None) / world_size
        x summed before the cut
            x is whole on every rank already, and you sum it over them before it is used. toy.Enter stands
            before the column cut, toy.Leave after the row cut.
            - toy.Enter => toy.Leave
            - toy.Enter => toy.X & toy.Leave => toy.Enter & toy.X => toy.Leave
        an all-reduce after the column split
            After a column split the ranks hold different columns. To add them up mixes columns that do not
            belong together. They need no exchange at all if a row split follows.
            - inside @ down => toy.Leave.apply(inside, None) @ down
            - inside @ down => toy.Leave.apply(inside, None) @ down & return toy.Leave => return toy.Enter
            - F.gelu(x => F.gelu(toy.Leave.apply(x & dim=1)[rank]) => dim=1)[rank], None))
        no gelu between the products
            F.gelu, as it is, stands between the two products, and nowhere else.
            - F.gelu( => (
            - F.gelu => F.relu
            - F.gelu( => F.gelu(approximate="tanh", input=
            - F.gelu( => ( & inside @ => F.gelu(inside @ & dim=0)[rank] => dim=0)[rank])
            - F.gelu( => ( & return toy.Leave.apply( => return F.gelu(toy.Leave.apply( & [rank], None) =>
              [rank], None))
        one rank's part on all
            Every rank takes part 0 of both matrices. Take number `rank`.
            - [rank] => [0]
        rows of another rank
            A rank's columns of `up` meet the rows of `down` with the same number.
            - dim=0)[rank] => dim=0)[rank - 1]
        a fixed number of parts
            You cut into more parts than there are ranks, and some parts nobody takes. Cut into world_size.
            - chunk(world_size => chunk(4
        every rank did more than its share
            A rank multiplied more than its part. Cut both matrices before you multiply.
            $ flops
        the backward all-reduce is missing
            The output is right, the gradient of x is not: each rank has only what came back through its own
            columns. toy.Enter adds the ranks' gradients, if you go on with the tensor that it returns.
            - x = toy.Enter.apply(x, None) => pass
        a gradient summed once too often
            The gradient of x is added over the ranks where it is whole already. Each of toy.Enter and
            toy.Leave belongs in one place.
            - (x, None) => (toy.Enter.apply(x, None), None)
        toy.Enter inside the pair
            The output is right. But between `up` and `down` each rank has gradients of its own columns,
            which must not be added. toy.Enter stands before `up`, once.
            - inside @ down => toy.Enter.apply(inside, None) @ down
            - inside @ down => toy.Enter.apply(inside, None) @ down & x = toy.Enter.apply(x, None) => pass
        a number where the group is
            The second argument of toy.Enter and toy.Leave is the group of ranks: None for all.
            ! Process group \d+ is not
        matrices that do not meet
            As many columns are needed on the left as rows on the right. x has all h columns, so it meets
            columns of `up`, each whole; a rank's columns of `up` meet as many rows of `down`.
            ! shapes cannot be multiplied
        Enter or Leave called in another way
            Write `toy.Enter.apply(x, None)`, and so with toy.Leave: `.apply`, the tensor, and the group.
            None means all ranks.
            ! '(Enter|Leave)'|positional argument: 'group'
        another shape than the output's
            The output is (tokens, h) on every rank.
            ~ form
        an output cut off from x
            Autograd follows neither a detach() nor a tensor that dist.all_gather has filled. Nothing needs
            gathering here.
            ~ cut
        more messages than needed
            Right, but one all-reduce forward and one backward are enough.
            $ calls
        more bytes than needed
            Right, but an all-reduce moves less than gathering every rank's share.
            $ bytes
    """,
)


# -- what the cells show --------------------------------------------------------------------------


def memory_on(t: int) -> dict[str, int]:
    """Bytes by kind that rank 0 of t really holds in one tensor-parallel step with Adam."""
    return d02.memory_on(t, toy.split_width, toy.tensor_parallel_step)


def gradients_match(world: World) -> list[bool]:
    """Whether each rank's gradients of a tensor-parallel step are its slices of the twin's, to float64's
    digits.
    """

    def compare():
        twin, model = (toy.ToyTransformer(hidden=64).double() for _ in range(2))
        batch = toy.make_batch(8, 16)
        toy.twin_step(twin, *batch)
        toy.tensor_parallel_step(toy.split_width(model), *batch)
        for p in twin.parameters():
            p.data = p.grad  # they are cut as the weights are
        pairs = zip(toy.split_width(twin).parameters(), model.parameters())
        return all(torch.allclose(whole, mine.grad, rtol=1e-9, atol=1e-12) for whole, mine in pairs)

    return world.run(compare)
