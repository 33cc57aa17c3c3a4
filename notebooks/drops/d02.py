"""Drop 02: average gradients over unequal shares, and write the ring all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drops import measured, rings
from drops.measured import Step
from helpers import toy
from helpers.practice.engine import OnRanks
from helpers.ranks.world import World

# -- practice: the mean of unequal shares ---------------------------------------------------------

SHARES = ([2, 2, 2, 2], [5, 1, 1, 1], [3, 1, 1, 2])  # examples on each rank


def weighted_average(gradient, examples):
    """Return the gradient of the mean loss over all examples of all ranks.

    gradient: this rank's, of the mean loss over its own examples; a 1-D tensor.
    examples: how many examples this rank had. Ranks may have different numbers.
    """
    # A mean over all examples is the sum over examples, divided by how many there are on all ranks.
    total = torch.tensor([float(examples)])
    dist.all_reduce(total)
    gradient = gradient * examples / total
    dist.all_reduce(gradient)
    return gradient


def _gradients(rank: int, n: int) -> list[tuple]:
    """A rank's mean gradient over its examples, (1000,), and their number, for each of the shares."""
    chance = lambda: torch.Generator().manual_seed(3)
    return [
        (torch.randn(sum(shares), 1000, generator=chance()).split(shares)[rank].mean(0), shares[rank])
        for shares in SHARES
    ]


average = OnRanks(
    "the mean of unequal shares",
    weighted_average,
    minutes=6,
    hints=[
        "A mean over all examples = the sum over examples, divided by their number. What must each rank"
        " add to the sum?",
        "gradient * examples is the sum over this rank's examples. Both that and the number of examples"
        " need an all_reduce.",
        "all_reduce works in place on a tensor: total = torch.tensor([float(examples)]);"
        " dist.all_reduce(total).",
    ],
    tries=((4,),),
    inputs=_gradients,
    praise="Equal to the twin on every rank, with equal and with unequal shares.",
    mistakes="""
        never summed over the ranks
            Each rank would train a model of its own. Its term, gradient · examples, is what it adds to the
            sum: all_reduce it, and return the tensor that all_reduce has written to.
            - gradient * examples / total => gradient & dist.all_reduce(gradient) => pass
            - gradient * examples / total => gradient * examples & dist.all_reduce(gradient) => pass
            - dist.all_reduce(gradient) => pass
        a sum where the mean was meant
            Every rank holds a sum. The twin's loss is a mean over examples, so its gradient is one too.
            - gradient * examples / total => gradient
            - gradient * examples / total => gradient * examples
        equal weights for unequal shares
            You weigh all ranks alike. A rank's gradient is a mean over its own examples: one with 5 of 8
            examples must count 5/8.
            - gradient * examples / total => gradient / 4
            - gradient * examples / total => gradient / total
        divided by the number of ranks
            A sum over all examples is divided by their number, not by 4.
            - gradient * examples / total => gradient * examples / 4
        divided by this rank's own examples
            A rank's gradient is a mean over its own examples already. What is to be divided by is the
            number of examples on all ranks: all_reduce that number too.
            - gradient * examples / total => gradient / examples
            - gradient * examples / total => gradient & return gradient => return gradient / examples
            - gradient * examples / total => gradient * examples & return gradient => return gradient /
              examples
            - gradient * examples / total => gradient * examples & return gradient => return gradient /
              (examples * dist.get_world_size())
        weighed after the sum
            Multiply before you sum: each gradient by its own rank's number of examples.
            - gradient * examples / total => gradient & return gradient => return gradient * examples / total
        summed on one rank
            dist.reduce leaves the sum on one rank only. Every rank needs it: dist.all_reduce.
            - dist.all_reduce(gradient) => dist.reduce(gradient, 0)
            - dist.all_reduce(total) => dist.reduce(total, 0) & examples / total => examples &
              dist.all_reduce(gradient) => dist.reduce(gradient, 0); gradient /= total
        one rank's gradient on all
            A broadcast copies one rank's tensor to the others; nothing is summed. Take dist.all_reduce.
            - dist.all_reduce(gradient) => dist.broadcast(gradient, 0)
        a share that is always 0
            `//` leaves only the whole part: 5 // 8 is 0.
            - gradient * examples / total => gradient * (examples // total)
        small shares weighed most
            A gradient is a mean over its rank's examples: 5 examples count five times as much as one.
            - [float(examples)] => [1 / examples] & gradient * examples / total => gradient / examples / total
        the largest share for all examples
            Divide by the number of examples on all ranks: their sum, not their maximum.
            - dist.all_reduce(total) => dist.all_reduce(total, op=dist.ReduceOp.MAX)
        one tensor in every place
            [t] * n is one tensor n times: what comes last is in every place. [torch.empty_like(t) for _ in
            range(n)] makes n of them.
            - gradient * examples / total => gradient & dist.all_reduce(gradient) => parts =
              [torch.empty_like(gradient)] * 4; dist.all_gather(parts, gradient); gradient = parts[0]
        divided twice
            You have the twin's gradient, divided by the number of ranks, or of examples, once more.
            - return gradient => return gradient / 4
            - return gradient => return gradient / total
        None where a tensor is needed
            Something is None there. dist.all_reduce returns None: it writes the sum into the tensor that you
            give it.
            ! 'NoneType'
        another shape than the gradient's
            Return the tensor that dist.all_reduce has written to: all_reduce itself returns None.
            ~ form
    """,
)


# -- practice: one step of a ring -----------------------------------------------------------------


def pass_on(outgoing, incoming, rank, world_size):
    """Send `outgoing` to the next rank, and receive into `incoming` what the previous rank sends."""
    right_of, left_of = (rank + 1) % world_size, (rank - 1) % world_size
    if rank % 2 == 0:  # even ranks speak first, odd ranks listen first: somebody always listens
        dist.send(outgoing, right_of)
        dist.recv(incoming, left_of)
    else:
        dist.recv(incoming, left_of)
        dist.send(outgoing, right_of)


step = OnRanks(
    "one step of a ring",
    pass_on,
    minutes=6,
    hints=[
        "The next rank is (rank + 1) % world_size, so that behind the last one comes rank 0. Where does a"
        " rank receive from?",
        "If all send first, nobody receives. Let even ranks send first and odd ranks receive first, or take"
        " dist.isend and wait for it at the end.",
    ],
    tries=((4,), (3,), (2,)),
    inputs=lambda rank, n: [
        (torch.full((length,), 10.0 * (rank + 1)), torch.zeros(length), rank, n) for length in (1000, 10)
    ],
    sees=lambda arguments, answer: arguments[1],
    messages=True,
    praise="On 2, 3 and 4 ranks. A ring is this step, 2(n−1) times.",
    mistakes="""
        turned round
            What you receive is the next rank's. Send to rank + 1, receive from rank − 1.
            - (rank + 1) % world_size, (rank - 1) => (rank - 1) % world_size, (rank + 1)
        nothing received
            incoming is as it was: give it to dist.recv, which writes into it.
            - dist.recv(incoming, left_of) => dist.recv(torch.empty_like(incoming), left_of)
            - dist.recv(incoming, left_of) => incoming = incoming.clone(); dist.recv(incoming, left_of)
        added, not received
            You add what came. Here it is only received; the ring adds it later.
            - dist.recv(incoming, left_of) => dist.recv(incoming, left_of); incoming += outgoing
        received over what was to be sent
            You receive into outgoing. A rank that receives first then sends on what it has just received.
            - dist.recv(incoming, left_of) => dist.recv(outgoing, left_of); incoming.copy_(outgoing)
        a rank's own number
            You send to this rank itself, or receive from it. The next rank is (rank + 1) % world_size.
            ! should not be the same as the rank
        more bytes than one message
            Each rank sends its tensor once, to one rank.
            $ bytes
    """,
)


# -- practice: a ring all-reduce ------------------------------------------------------------------


def ring_all_reduce(x, rank, world_size):
    """Make x, a 1-D tensor, the sum of all ranks' x: in place, with sends and receives only."""
    chunks = list(torch.tensor_split(x, world_size))  # views: what is written to a chunk is written to x
    right_of, left_of = (rank + 1) % world_size, (rank - 1) % world_size

    def pass_on(outgoing, incoming):
        if rank % 2 == 0:  # even ranks speak first, odd ranks listen first, so that somebody always listens
            dist.send(chunks[outgoing].contiguous(), right_of)
            dist.recv(incoming, left_of)
        else:
            dist.recv(incoming, left_of)
            dist.send(chunks[outgoing].contiguous(), right_of)

    for step in range(world_size - 1):  # reduce-scatter: sums grow as they go round
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        buffer = torch.empty_like(chunks[incoming])
        pass_on(outgoing, buffer)
        chunks[incoming] += buffer
    for step in range(world_size - 1):  # all-gather: finished sums go round
        outgoing, incoming = (rank + 1 - step) % world_size, (rank - step) % world_size
        pass_on(outgoing, chunks[incoming])


def _to_sum(rank: int, n: int, length: int) -> list[tuple]:
    """A tensor of this length, and two whose numbers tell the rank and the chunk that they are from."""
    plain = torch.arange(length, dtype=torch.float64 if n == 5 else torch.float32) % 97 * (rank + 1)
    return [(x, rank, n) for x in (*rings.marked(rank, n, torch.empty(8 * n)), plain)]


ring = OnRanks(
    "a ring all-reduce",
    ring_all_reduce,
    minutes=14,
    hints=[
        "Cut x into n chunks with torch.tensor_split: they are views of x. In each step a rank sends one"
        " chunk to the right and receives one from the left.",
        "First n−1 steps: in step k rank r sends chunk (r−k) % n and adds what it receives to chunk"
        " (r−k−1) % n. Then which chunk is finished, and where?",
        "Then n−1 more steps: in step k rank r sends chunk (r+1−k) % n and overwrites chunk (r−k) % n"
        " with what it receives.",
        "If it hangs: even ranks send first and then receive, odd ranks receive first and then send.",
    ],
    tries=((4, 40_000), (2, 10_001), (3, 10_001), (5, 9_999), (4, 6)),  # some do not divide
    inputs=_to_sum,
    sees=lambda arguments, answer: arguments[0],
    messages=True,
    praise="The sum on 2, 3, 4 and 5 ranks, also where the length does not divide. No rank sent too much.",
    figures=lambda run, truth: [
        (
            "bytes sent by the busiest rank, for tensors of S bytes",
            *(f"{max(one.traffic.counted) / one.ranks[0]['size']:.2f}·S" for one in (run, truth)),
        )
    ],
    shows={
        "x was not changed": rings.unchanged,
        "half of the way": rings.half_of_the_way,
        "fewer chunks than ranks": lambda run, _: (
            run.tried == (4, 6) and any("index out of range" in said for said in run.errors)
        ),
        "the mean where the sum was meant": rings.mean,
        "a part added more than once": rings.repeated,
        "chunks of different numbers added": rings.mixed,
        "another value than the sum": rings.where_it_parts,
    },
    mistakes="""
        the mean where the sum was meant
            An all-reduce sums; whoever wants the mean divides afterwards.
        x was not changed
            x is as it was on every rank. Work in place: write into x[...], or into views of x.
        the remainder is left out
            All is right but the last few numbers: equally long chunks do not cover x. torch.tensor_split
            makes some chunks one longer.
            - torch.tensor_split(x, world_size) => x[: len(x) // world_size * world_size].chunk(world_size)
        pieces of n numbers, not n pieces
            x.split(k) makes pieces of k numbers each. torch.tensor_split(x, n) makes n pieces.
            - torch.tensor_split(x, world_size) => x.split(world_size)
        half of the way
            Each rank holds one finished chunk: that is the reduce-scatter, and it is right. Now let the
            finished chunks go round.
        a view that is lost
            `chunks[j] = …` puts a new tensor into your list, and x keeps its old numbers. Write into the
            view: `chunks[j] += buffer`, `chunks[j].copy_(buffer)`, or receive into it.
            - chunks[incoming] += buffer => chunks[incoming] = chunks[incoming] + buffer
            - pass_on(outgoing, chunks[incoming]) => new = torch.empty_like(chunks[incoming]);
              pass_on(outgoing, new); chunks[incoming] = new
        finished sums added once more
            What arrives in the second half is a finished sum: write it over yours, do not add it.
            - pass_on(outgoing, chunks[incoming]) => new = torch.empty_like(chunks[incoming]);
              pass_on(outgoing, new); chunks[incoming] += new
            - (world_size - 1):  # reduce => (2 * world_size - 2):  # & pass_on(outgoing, chunks[incoming])
              => pass
        parts written over, not added
            In the first half a rank adds what it receives; only finished sums are written over.
            - chunks[incoming] += buffer => chunks[incoming].copy_(buffer)
        a step too few or too many
            Each half has n−1 steps: a chunk visits n ranks, and is on the first of them already.
            - range(world_size - 1):  # reduce => range(world_size - 2):  # reduce
            - range(world_size - 1):  # reduce => range(world_size):  # reduce
            - range(world_size - 1):  # all => range(world_size - 2):  # all
            - range(world_size - 1) => range(world_size - 2)
        the second half begins with another chunk
            After the first half rank r has finished chunk r+1, so that is the first one to send.
            - (rank + 1 - step) % world_size, (rank - step) => (rank - step) % world_size, (rank - step - 1)
            - (rank + 1 - step) % world_size, (rank - step) => (rank + 2 - step) % world_size, (rank + 1 -
              step)
        the chunks' numbers rise
            What rank r−1 sends in step k, rank r adds to, and sends in step k+1: a chunk's number falls by
            one from step to step. Yours rises.
            - (rank - step) % world_size, (rank - step - 1) => (rank + step) % world_size, (rank + step + 1)
        what arrived is not passed on
            In the first half what a rank receives is added to chunk (r−k−1) % n of x itself, which it sends
            next. `c = c + buffer` makes a new tensor; and the chunk just sent is not sent again.
            - chunks[incoming] += buffer => lost = chunks[incoming] + buffer
            - chunks[incoming] += buffer => chunks[outgoing] += buffer
        into the chunk just sent
            What a rank receives belongs to the chunk after the one it sends: (r−k−1) % n in step k.
            - pass_on(outgoing, chunks[incoming]) => new = torch.empty_like(chunks[incoming]);
              pass_on(outgoing, new); chunks[outgoing].copy_(new)
        the ring turned round
            You send to the previous rank and receive from the next one, with the numbers of a ring that
            goes the other way. Turn either the neighbours or the numbers.
            - (rank + 1) % world_size, (rank - 1) => (rank - 1) % world_size, (rank + 1)
        a place of a tuple
            torch.tensor_split gives a tuple, and you write to a place of it. Write into the view instead:
            `chunks[j] += buffer`, or receive into it.
            ! 'tuple' object does not support item assignment
        what recv returns
            dist.recv returns a number, the rank that has sent. What came is in the tensor that you gave it.
            ! 'int' object has no attribute
        fewer chunks than ranks
            All longer tensors came out right. Of few numbers x.chunk(n) may make fewer than n chunks;
            torch.tensor_split always makes n.
        a part added more than once
            A chunk visits each rank once while it grows: n−1 steps. A finished sum is not added again, nor
            what was received into the chunk itself.
        chunks of different numbers added
            What a rank receives belongs to the chunk with the same number: in step k rank r receives chunk
            (r−k−1) % n, and adds it to that one.
        another value than the sum
            In step k, which chunk does a rank send, which one does it receive? Is what comes added, or
            written over? (dist.recv puts it into the tensor you give. What irecv fills may be used only
            after .wait().)
        more bytes than needed
            n−1 chunks to sum, and n−1 to spread, are enough.
            $ bytes
    """,
)


# -- what the cells show --------------------------------------------------------------------------


OPTIMIZERS = {"SGD": (torch.optim.SGD, 0.1), "AdamW": (torch.optim.AdamW, 0.001)}  # name -> (class, rate)


def losses(world: World, optimizer: str, combine: str, steps: int = 12) -> list[float]:
    """The mean loss of all ranks, step by step, of data-parallel training on one batch.

    optimizer: "SGD" or "AdamW". combine: "mean" of the ranks' gradients, or their "sum".
    """

    def train():
        model, (make, rate) = toy.ToyTransformer(hidden=64), OPTIMIZERS[optimizer]
        update = make(model.parameters(), rate)
        curve = []
        for _ in range(steps):
            model.zero_grad()
            curve.append(toy.data_parallel_step(model, *toy.make_batch()))
            if combine == "sum":
                for p in model.parameters():
                    p.grad *= dist.get_world_size()
            update.step()
        return curve

    return [sum(step) / len(step) for step in zip(*world.run(train))]


def twin_after(steps: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """The toy in one process after so many steps of plain SGD on the whole batch, and the last loss."""
    twin = toy.ToyTransformer(hidden=256, seed=0)
    for _ in range(steps):
        twin.zero_grad()
        loss = toy.twin_step(twin, *toy.make_batch(b=8, s=32))
        for p in twin.parameters():
            p.data -= 0.1 * p.grad
    return twin, loss


def sent_in_all_reduce(world: World, megabytes: float) -> float:
    """Megabytes that a rank sends in an all-reduce of so many, on the wire where the system counts it."""

    def run():
        dist.all_reduce(torch.ones(round(megabytes * 250_000)))

    world.run(run)
    return (world.traffic.wire[0] or world.traffic.counted[0]) / 1e6


def one_and_four() -> dict[str, Step]:
    """A step of data parallelism on one rank and on four."""
    return measured.one_and_four("dp", lambda model: model, toy.data_parallel_step)
