"""Drop 03: the split of the MLP, forward and backward, and what it saves."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from drops import measured
from drops.measured import Step
from helpers import toy
from helpers.practice.engine import OnRanks
from helpers.ranks.world import World

# -- practice: split the MLP ----------------------------------------------------------------------


def split_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down, with each rank doing its share of the work.

    x: (tokens, h), the same on every rank. up: (h, 4h), down: (4h, h), whole: take your part of them.
    Return the whole output on every rank. Its backward must give every rank the whole gradient of x.
    """
    # x is whole everywhere, but each rank finds a part of its gradient only: this adds them in backward.
    x = toy.copy_to_tp(x)
    inside = F.gelu(x @ up.chunk(world_size, dim=1)[rank])
    # My columns of up are what my rows of down need. The sum over the ranks is the output.
    return toy.reduce_from_tp(inside @ down.chunk(world_size, dim=0)[rank])


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
        "What comes out is a partial sum: y = toy.reduce_from_tp(y) adds the ranks' partial sums.",
        "Backward, each rank has only a partial sum of the gradient of x: x = toy.copy_to_tp(x),"
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
            Each rank returns a partial sum. A row split ends with one all-reduce: return what
            toy.reduce_from_tp returns, which leaves its argument alone.
            - return toy.reduce_from_tp => return toy.copy_to_tp
        the non-linearity of partial sums
            You sum gelu of the parts, where gelu of the sum was meant. Split `up` by columns: then each
            rank has whole numbers to bend, only fewer of them.
            - x @ up.chunk(world_size, dim=1)[rank] => x.chunk(world_size, dim=1)[rank] @
              up.chunk(world_size, dim=0)[rank] & inside @ down.chunk(world_size, dim=0)[rank]) =>
              inside) @ down
        the mean where the sum was meant
            The ranks hold partial sums: nothing is to be divided.
            - dim=0)[rank]) => dim=0)[rank]) / world_size
        x summed before the cut
            x is whole on every rank already, and you sum it over them before it is used. toy.copy_to_tp
            stands before the column cut, toy.reduce_from_tp after the row cut.
            - toy.copy_to_tp => toy.reduce_from_tp
            - toy.copy_to_tp => toy.X & toy.reduce_from_tp => toy.copy_to_tp & toy.X => toy.reduce_from_tp
        an all-reduce after the column split
            After a column split the ranks hold different columns. To add them up mixes columns that do not
            belong together. They need no exchange at all if a row split follows.
            - inside @ down => toy.reduce_from_tp(inside) @ down
            - inside @ down => toy.reduce_from_tp(inside) @ down & return toy.reduce_from_tp => return
              toy.copy_to_tp
            - F.gelu(x => F.gelu(toy.reduce_from_tp(x & dim=1)[rank]) => dim=1)[rank]))
        no gelu between the products
            F.gelu, as it is, stands between the two products, and nowhere else.
            - F.gelu( => (
            - F.gelu => F.relu
            - F.gelu( => F.gelu(approximate="tanh", input=
            - F.gelu( => ( & inside @ => F.gelu(inside @ & dim=0)[rank] => dim=0)[rank])
            - F.gelu( => ( & return toy.reduce_from_tp( => return F.gelu(toy.reduce_from_tp( &
              dim=0)[rank]) => dim=0)[rank]))
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
            columns. toy.copy_to_tp adds the ranks' gradients, if you go on with the tensor that it returns.
            - x = toy.copy_to_tp(x) => pass
        a gradient summed once too often
            The gradient of x is added over the ranks where it is whole already. Each of toy.copy_to_tp and
            toy.reduce_from_tp belongs in one place.
            - copy_to_tp(x) => copy_to_tp(toy.copy_to_tp(x))
        toy.copy_to_tp inside the pair
            The output is right. But between `up` and `down` each rank has gradients of its own columns,
            which must not be added. toy.copy_to_tp stands before `up`, once.
            - inside @ down => toy.copy_to_tp(inside) @ down
            - inside @ down => toy.copy_to_tp(inside) @ down & x = toy.copy_to_tp(x) => pass
        a number where the group is
            The second argument of toy.copy_to_tp and toy.reduce_from_tp is a group of ranks. Without one it
            is all of them.
            ! Process group \d+ is not
        matrices that do not meet
            As many columns are needed on the left as rows on the right. x has all h columns, so it meets
            columns of `up`, each whole; a rank's columns of `up` meet as many rows of `down`.
            ! shapes cannot be multiplied
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


# -- practice: a loss over split words ------------------------------------------------------------


def split_loss(logits, targets, first):
    """The mean cross-entropy of tokens whose scores lie on several ranks.

    logits: (T, V/t), the scores of this rank's words. targets: (T,), the right words, the same on all ranks.
    first: the number of this rank's first word.
    """
    words = logits.shape[1]
    largest = logits.max(1).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    total = (logits - largest[:, None]).exp().sum(1)
    dist.all_reduce(total)
    mine = (first <= targets) & (targets < first + words)
    place = (targets - first).clamp(0, words - 1)
    score = torch.where(mine, logits.gather(1, place[:, None])[:, 0], 0)  # 0 where another rank has the word
    dist.all_reduce(score)
    return (total.log() + largest - score).mean()


WORDS = 48


def _scored(rank: int, n: int) -> list[tuple]:
    """Scores of usual size, and some too large for exp."""
    cases = []
    for scale in (1.0, 300.0):
        chance = torch.Generator().manual_seed(11)
        logits = scale * torch.randn(WORDS, WORDS, generator=chance)
        targets = torch.randperm(WORDS, generator=chance)  # every word, also the first and last of a rank
        cases.append((logits.chunk(n, 1)[rank].clone(), targets, rank * WORDS // n))
    return cases


cross_entropy = OnRanks(
    "a loss over split words",
    split_loss,
    minutes=10,
    hints=[
        "The loss of a token is log(sum of exp(scores)) − the right word's score. Both need all ranks: three"
        " numbers for each token travel, not its scores.",
        "Subtract the largest score before exp: the largest of all ranks, by dist.all_reduce(largest,"
        " op=dist.ReduceOp.MAX). Add it again after log.",
        "The right word is on one rank. There take its score, at place targets − first; on the others 0. The"
        " sum over the ranks is the score.",
    ],
    tries=((4,), (2,)),
    inputs=_scored,
    praise="The loss of the whole vocabulary, from three numbers a token, and no score left its rank.",
    figures=lambda run, truth: [
        (
            "bytes that all-reduces sum, a token",
            *(f"{one.most('bytes') / (2 * WORDS) / (2 * (one.n - 1) / one.n):.0f}" for one in (run, truth)),
        )
    ],
    mistakes="""
        the largest of this rank's words
            Each rank subtracts another number, so their sums do not add up. All need the largest of all
            ranks: dist.all_reduce with op=dist.ReduceOp.MAX.
            - dist.all_reduce(largest, op=dist.ReduceOp.MAX) => pass
        largest scores added, not compared
            dist.all_reduce sums unless you say otherwise: op=dist.ReduceOp.MAX.
            - (largest, op=dist.ReduceOp.MAX) => (largest)
        exp of scores too large
            exp(300) is infinite in float32. Subtract the largest score first, and add it again after log.
            - dist.all_reduce(largest, op=dist.ReduceOp.MAX) => largest = largest * 0
            - largest = logits.max(1).values => largest = torch.zeros(len(logits)) &
              dist.all_reduce(largest, op=dist.ReduceOp.MAX) => pass
        the largest score not added again
            log(sum of exp(score − largest)) is too small by largest.
            - total.log() + largest - score => total.log() - score
        a sum over this rank's words
            The sum of exp goes over all words: all_reduce it.
            - dist.all_reduce(total) => pass
        the right word of one rank
            Only one rank has the right word's score. The others bring 0, and an all_reduce gives it to all.
            - dist.all_reduce(score) => pass
        a score of a wrong word
            A rank that does not have the right word must bring 0, not the score of another word.
            - torch.where(mine, logits.gather(1, place[:, None])[:, 0], 0) => logits.gather(1, place[:,
              None])[:, 0]
        places not counted from the rank's first word
            targets are numbers in the whole vocabulary. On this rank word `first` is at place 0.
            - (targets - first) => targets
        the sum where the mean is meant
            Return the mean over the tokens.
            - score).mean() => score).sum()
        the probability's sign
            A loss is −log of the probability: log(sum) − score.
            - total.log() + largest - score => score - largest - total.log()
        more bytes than three numbers a token
            Three numbers for each token are enough: the largest, the sum, the right word's score.
            $ bytes
    """,
)


# -- what the cells show --------------------------------------------------------------------------


def one_and_four() -> dict[str, Step]:
    """A step of tensor parallelism on one rank and on four."""
    return measured.one_and_four("tp", toy.split_width, toy.tensor_parallel_step)


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
