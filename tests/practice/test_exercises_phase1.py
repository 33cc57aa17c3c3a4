"""Every exercise of drops 01-04: its solution passes, an empty one is not started, each listed mistake is
caught and named.
"""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_tests import *  # noqa: F403
from exercise_tests import slow

from drops import d01, d02, d03, d04
from helpers import toy

pytestmark = pytest.mark.waits

# -- drop 01 ---------------------------------------------------------------------------------


def dp_grows(small, large):  # data parallelism sends activations
    if max(small) > 1.5 * min(small):
        return "pipeline"
    return "data" if large[0] > 1.5 * small[0] else "tensor"


def all_that_is_even_is_tensor(small, large):  # tensor parallelism sends weights
    return "pipeline" if max(small) > 1.5 * min(small) else "tensor"


def pipeline_all_reduces(small, large):  # a pipeline needs an all-reduce
    return "data" if large[0] < 1.5 * small[0] else "pipeline"


def uneven_is_tensor(small, large):
    if max(small) > 1.5 * min(small):
        return "tensor"
    return "pipeline" if large[0] > 1.5 * small[0] else "data"


def exactly_double(small, large):
    if max(small) > 1.5 * min(small):
        return "pipeline"
    return "tensor" if large[0] >= 2 * small[0] else "data"


def by_the_amount(small, large):
    if max(small) < 1e6:
        return "pipeline"
    return "tensor" if large[0] > 1.5 * small[0] else "data"


def a_typo(small, large):
    return "DP"


def a_bug(small, large):
    return small[9]


def never_ends(small, large):
    while True:
        time.sleep(0.01)


# -- drop 02 ---------------------------------------------------------------------------------


def eight_examples(gradient, examples):
    gradient = gradient * examples / 8
    dist.all_reduce(gradient)
    return gradient


def forgot_return(gradient, examples):
    dist.all_reduce(gradient)


def returns_what_all_reduce_returns(gradient, examples):
    return dist.all_reduce(gradient)


def as_numpy(gradient, examples):
    return d02.weighted_average(gradient, examples).numpy()


def mean_of_all_numbers(gradient, examples):
    return gradient.mean()


def a_third(gradient, examples):
    return d02.weighted_average(gradient, examples) / 3


def off_the_end_of_the_ring(x, rank, world_size):
    dist.send(x, rank + 1) if rank % 2 == 0 else dist.recv(x, rank - 1)
    dist.send(x, rank + 1) if rank % 2 else dist.recv(x, rank - 1)


def whole_tensor(x, rank, world_size):
    outgoing, incoming = x.clone(), torch.empty_like(x)
    for _ in range(world_size - 1):
        if rank % 2 == 0:
            dist.send(outgoing, (rank + 1) % world_size)
            dist.recv(incoming, (rank - 1) % world_size)
        else:
            dist.recv(incoming, (rank - 1) % world_size)
            dist.send(outgoing, (rank + 1) % world_size)
        x += incoming
        outgoing = incoming.clone()


def all_send_first(x, rank, world_size):
    incoming = torch.empty_like(x)
    dist.send(x.clone(), (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    x += incoming


def all_receive_first(x, rank, world_size):
    incoming = torch.empty_like(x)
    dist.recv(incoming, (rank - 1) % world_size)
    dist.send(x.clone(), (rank + 1) % world_size)
    x += incoming


def through_rank_0(x, rank, world_size):
    other = torch.empty_like(x)
    if rank == 0:
        for r in range(1, world_size):
            dist.recv(other, r)
            x += other
        for r in range(1, world_size):
            dist.send(x, r)
    else:
        dist.send(x, 0)
        dist.recv(x, 0)


def rebound(x, rank, world_size):
    x = x + 1


def only_half_the_way(x, rank, world_size):
    chunks = torch.tensor_split(x, world_size)
    incoming = torch.empty_like(chunks[(rank - 1) % world_size])
    if rank % 2 == 0:
        dist.send(chunks[rank].contiguous(), (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
    else:
        dist.recv(incoming, (rank - 1) % world_size)
        dist.send(chunks[rank].contiguous(), (rank + 1) % world_size)
    chunks[(rank - 1) % world_size].add_(incoming)


def the_library(x, rank, world_size):
    dist.all_reduce(x)


def through_the_last(x, rank, world_size):
    last, other = world_size - 1, torch.empty_like(x)
    if rank == last:
        for r in range(last):
            dist.recv(other, r)
            x += other
        for r in range(last):
            dist.send(x, r)
    else:
        dist.send(x, last)
        dist.recv(x, last)


def never_waits(x, rank, world_size):
    d02.ring_all_reduce(x, rank, world_size)
    extra = torch.ones(3)
    works = [dist.isend(extra, (rank + 1) % world_size), dist.irecv(torch.empty(3), (rank - 1) % world_size)]
    del works


def a_bad_index(x, rank, world_size):
    dist.send(torch.tensor_split(x, world_size)[rank + 1], (rank + 1) % world_size)


# -- drop 03 ---------------------------------------------------------------------------------


def all_by_itself(x, up, down, rank, world_size):
    return F.gelu(x @ up) @ down


def only_columns(x, up, down, rank, world_size):
    return F.gelu(x @ up.chunk(world_size, dim=1)[rank])


def sums_twice(x, up, down, rank, world_size):
    y = d03.split_mlp(x, up, down, rank, world_size)
    toy.Leave.apply(y.detach(), None)
    return y


def all_the_way_back(x, up, down, rank, world_size):
    class Alone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = F.gelu(x @ up.chunk(world_size, dim=1)[rank]) @ down.chunk(world_size, dim=0)[rank]
            dist.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return torch.autograd.grad(F.gelu(x @ up) @ down, x, dy)[0]

    return Alone.apply(x)


def gathered(x, up, down, rank, world_size):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            out = [torch.empty_like(y) for _ in range(world_size)]
            dist.all_gather(out, y)
            return sum(out)

        @staticmethod
        def backward(ctx, dy):
            return dy

    inside = F.gelu(toy.Enter.apply(x, None) @ up.chunk(world_size, dim=1)[rank])
    return Gather.apply(inside @ down.chunk(world_size, dim=0)[rank])


def cut_off(x, up, down, rank, world_size):
    return d03.split_mlp(x, up, down, rank, world_size).detach()


def sum_not_used(x, up, down, rank, world_size):
    y = (
        F.gelu(toy.Enter.apply(x, None) @ up.chunk(world_size, dim=1)[rank])
        @ down.chunk(world_size, dim=0)[rank]
    )
    toy.Leave.apply(y, None)
    return y


def gathers_the_columns(x, up, down, rank, world_size):
    inside = F.gelu(x @ up.chunk(world_size, dim=1)[rank])
    parts = [torch.empty_like(inside) for _ in range(world_size)]
    dist.all_gather(parts, inside)
    return torch.cat(parts, dim=1) @ down


def shapes_that_do_not_meet(x, up, down, rank, world_size):
    return x @ up.chunk(world_size, dim=0)[rank]


# -- drop 04 ---------------------------------------------------------------------------------


def stage_loop(
    receive_first=False,
    grad=True,
    downstream=False,
    loss_everywhere=False,
    forgets_send=False,
    first_sends_back=False,
    item_everywhere=False,
    own_loss=False,
    one_tensor=False,
):
    """The solution of drop 04, with one mistake built in."""

    def pipeline(stage, tokens, targets, empty, rank, world_size):
        last, loss = world_size - 1, None
        x = tokens
        if receive_first and rank < last:
            dist.recv(torch.empty_like(empty), rank + 1)
        if rank > 0:
            x = empty
            dist.recv(x, rank - 1)
            if grad:
                x.requires_grad_()
        y = stage(x)
        if rank == last or loss_everywhere:
            loss = toy.loss_of(y, targets)
            if rank == last:
                loss.backward()
        if rank < last:
            dist.send(y.detach(), rank + 1)
            if own_loss:
                y.square().mean().backward()
            else:
                dy = x.detach() if one_tensor and rank > 0 else torch.empty_like(y)
                dist.recv(dy, rank + 1)
                y.backward(dy)
        if rank > 0 and not forgets_send or first_sends_back:
            dist.send(x.grad, (rank + 1) % world_size if downstream else rank - 1)
        return loss.item() if rank == last or loss_everywhere or item_everywhere else None

    return pipeline


def detached_backward(stage, tokens, targets, empty, rank, world_size):
    loss = d04.pipeline(stage, tokens, targets, empty, rank, world_size)
    for p in stage.parameters():
        p.grad *= 2
    return loss


MISTAKES = [
    (d04.loop, stage_loop(first_sends_back=True), "crashed", "a gradient sent by the first rank"),
    (d04.loop, stage_loop(item_everywhere=True), "crashed", "a loss asked of every rank"),
    slow(d04.loop, stage_loop(own_loss=True), "crashed", "a gradient that nobody receives"),
    (d04.loop, stage_loop(one_tensor=True), "wrong", "other gradients than the twin's"),
    (d01.fingerprints, never_ends, "crashed", None),
    (d03.mlp, sum_not_used, "wrong", "partial outputs never summed"),
    (d03.mlp, gathers_the_columns, "wrong", "an output cut off from x"),
    (d02.average, returns_what_all_reduce_returns, "wrong", "nothing returned"),
    (d02.average, as_numpy, "wrong", "another shape than the gradient's"),
    (d02.average, mean_of_all_numbers, "wrong", "another shape than the gradient's"),
    (d02.ring, off_the_end_of_the_ring, "crashed", None),
    (d04.loop, stage_loop(receive_first=True), "crashed", "neighbours that wait for each other"),
    (d04.loop, stage_loop(forgets_send=True), "crashed", "a message with one end"),
    (d04.loop, stage_loop(grad=False), "crashed", "a received activation that does not require grad"),
    slow(d04.loop, stage_loop(downstream=True), "crashed", "a gradient sent downstream"),
    (d04.loop, stage_loop(loss_everywhere=True), "wrong", "the loss on every stage"),
    (d04.loop, detached_backward, "wrong", "other gradients than the twin's"),
    (d03.mlp, all_by_itself, "wrong", "every rank did more than its share"),
    (d03.mlp, all_the_way_back, "wrong", "every rank did more than its share"),
    (d03.mlp, gathered, "wrong", "more bytes than needed"),
    (d03.mlp, cut_off, "wrong", "an output cut off from x"),
    (d03.mlp, sums_twice, "wrong", "more messages than needed"),
    (d03.mlp, only_columns, "wrong", "another shape than the output's"),
    (d03.mlp, shapes_that_do_not_meet, "crashed", "matrices that do not meet"),
    (d01.fingerprints, dp_grows, "wrong", "gradients do not grow with the batch"),
    (d01.fingerprints, all_that_is_even_is_tensor, "wrong", "activations grow with the batch"),
    (d01.fingerprints, pipeline_all_reduces, "wrong", "the ends of a pipeline have one neighbour"),
    (d01.fingerprints, uneven_is_tensor, "wrong", "the ends of a pipeline have one neighbour"),
    (d01.fingerprints, exactly_double, "wrong", "the wire is never exactly double"),
    (d01.fingerprints, by_the_amount, "wrong", "judged by the amount"),
    (d01.fingerprints, a_typo, "wrong", "not one of the three answers"),
    (d01.fingerprints, a_bug, "crashed", None),
    (d02.average, eight_examples, "wrong", "another value than the twin's"),
    (d02.average, forgot_return, "wrong", "nothing returned"),
    (d02.average, a_third, "wrong", "another value than the twin's"),
    (d02.ring, whole_tensor, "wrong", "the whole tensor, not a chunk"),
    (d02.ring, all_send_first, "crashed", "everybody sends before anybody receives"),
    slow(d02.ring, all_receive_first, "crashed", "everybody receives before anybody sends"),
    (d02.ring, through_rank_0, "wrong", "everything through one rank"),
    (d02.ring, rebound, "wrong", "x was not changed"),
    (d02.ring, only_half_the_way, "wrong", "another value than the sum"),
    (d02.ring, the_library, "wrong", "another collective does the work"),
    (d02.ring, through_the_last, "wrong", "everything through one rank"),
    (d02.ring, never_waits, "wrong", "a message nobody waits for"),
    (d02.ring, a_bad_index, "crashed", None),
]


def test_what_ranks_print_is_shown_and_never_hides_the_verdict(capsys):
    def says(gradient, examples):
        print(*range(200), sep="\n")
        return d02.weighted_average(gradient, examples)

    d02.average.check(says)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 31 and any(line.startswith("… ") for line in shown) and "199" in shown[-1]


def test_hints_come_in_steps_and_the_solution_on_request():
    exercise = d02.ring
    exercise._shown = 0
    exercise.check(lambda x, rank, world_size: None)  # not started: that was the first hint
    assert str(exercise.hint()).startswith("Hint 2 of 4")
    exercise._shown = 0
    shown = [str(exercise.hint()) for _ in range(len(exercise.hints) + 2)]
    assert shown[0].startswith("Hint 1 of 4") and shown[3].startswith("Hint 4 of 4")
    assert shown[4] == shown[5] and "solution()" in shown[4]
    assert "def ring_all_reduce(x, rank, world_size):" in str(exercise.solution())


def test_other_arguments_and_no_function_are_refused():
    assert d02.ring.check(lambda x: None).misconception == "other arguments than asked for"
    with pytest.raises(TypeError, match="your function itself, without brackets"):
        d02.ring.check(3)


def test_right_answers_written_otherwise_pass():
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            dx = dx.clone()
            dist.all_reduce(dx)
            return dx

    def slices(x, up, down, rank, world_size):
        n = up.shape[1] // world_size
        mine = slice(rank * n, (rank + 1) * n)
        return toy.Leave.apply(F.gelu(Sum.apply(x) @ up[:, mine]) @ down[mine], None)

    def asynchronous(stage, tokens, targets, empty, rank, world_size):
        x = tokens
        if rank > 0:
            dist.irecv(empty, rank - 1).wait()
            x = empty.clone().requires_grad_(True)
        y = stage(x)
        if rank == world_size - 1:
            loss = toy.loss_of(y, targets)
            loss.backward()
        else:
            dist.isend(y.detach(), rank + 1).wait()
            dy = torch.empty_like(y)
            dist.irecv(dy, rank + 1).wait()
            torch.autograd.backward(y, dy)
        if rank > 0:
            dist.isend(x.grad, rank - 1).wait()
        return loss if rank == world_size - 1 else None

    assert d03.mlp.check(slices).kind == "right"
    assert d04.loop.check(asynchronous).kind == "right"
