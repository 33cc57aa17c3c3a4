"""Every exercise of drops 05-09: its solution passes, an empty one is not started, each listed mistake is
caught and named.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_tests import *  # noqa: F403
from exercise_tests import slow
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from drops import d05, d06, d07, d08, d09
from helpers import toy
from helpers.toy.names import reduce_scatter

# Under other names: exercises refuse an answer that says `placement` or `schedules`.
from three_axes.paper import placement as grids
from three_axes.paper import schedules as orders

# -- drop 05 ---------------------------------------------------------------------------------


def hooks(
    at_start=lambda p: None,
    at_end=lambda p, n: p.grad.div_(n),
    wait="finish",
    register="register_post_accumulate_grad_hook",
):
    """The solution of drop 05, with one mistake built in."""

    def overlap(model, world_size):
        under_way = []

        def start(p):
            at_start(p)
            work = dist.all_reduce(p.grad, async_op=True)
            if wait == "hook":
                work.wait()
            under_way.append((work, p))

        def finish():
            for work, p in under_way:
                if wait == "finish":
                    work.wait()
                at_end(p, world_size)
            under_way.clear()

        for p in model.parameters():
            if register == "register_hook":
                p.register_hook(lambda g, p=p: start(p))
            else:
                p.register_post_accumulate_grad_hook(start)
        return finish

    return overlap


def all_at_the_end(model, world_size):
    def finish():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size

    return finish


def no_hooks_at_all(model, world_size):
    return lambda: None


def called_finish(model, world_size):
    return d05.overlap(model, world_size)()


def averages_twice(model, world_size):
    finish = d05.overlap(model, world_size)

    def again():
        finish()
        for p in model.parameters():
            p.grad /= world_size

    return again


def a_copy_that_never_comes_back(model, world_size):
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad.clone(), async_op=True))
        )

    def finish():
        for work in works:
            work.wait()
        works.clear()

    return finish


def in_double(model, world_size):
    works = []

    def start(p):
        twice = torch.cat([p.grad.flatten(), p.grad.flatten()])
        works.append((dist.all_reduce(twice, async_op=True), twice, p))

    def finish():
        for work, twice, p in works:
            work.wait()
            p.grad.copy_(twice[: p.numel()].view_as(p) / world_size)
        works.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return finish


def one_bucket(model, world_size):
    return toy.overlap_gradients(model, bucket=6 * 4 * 192 * 192)


def hangs(model, world_size):
    finish = d05.overlap(model, world_size)

    def one_leaves():
        finish()
        dist.barrier() if dist.get_rank() else None

    return one_leaves


def forgot_async(model, world_size):
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad)))
    return lambda: [work.wait() for work in works]


def waits_by_future(model, world_size):
    def start(p):
        dist.all_reduce(p.grad, async_op=True).get_future().wait()
        p.grad /= world_size

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return lambda: None


def one_parameter_only(model, world_size):
    return d05.overlap(model[-1], world_size)


def list_never_emptied(model, world_size):
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: works.append((dist.all_reduce(p.grad, async_op=True), p))
        )

    def finish():
        for work, p in works:
            work.wait()
            p.grad /= world_size

    return finish


def waits_for_the_one_before(model, world_size):  # right: it does overlap
    works = []

    def start(p):
        if works:
            works[-1][0].wait()
        works.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        for work, p in works:
            work.wait()
            p.grad /= world_size
        works.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return finish


def buckets_of_two(model, world_size):  # right
    return toy.overlap_gradients(model, bucket=2 * 4 * 192 * 192)


# -- drop 06 ---------------------------------------------------------------------------------

WHOLE = dict(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False)


def attention_only():
    return d06.usual_plan() | {"attention": PrepareModuleInput(**WHOLE)}


def mlp_left_whole():
    return {
        name: how for name, how in d06.merged_plan().items() if not name.startswith("mlp.") and name != "mlp"
    }


def a_list():
    return list(d06.usual_plan())


def all_whole():
    return {}


def misspelt():
    return {**d06.usual_plan(), "attention": "all"}


def unknown_part():
    return {"attn": PrepareModuleInput(**WHOLE), **d06.usual_plan()}


def sharded_input():
    cut = dict(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
    return d06.usual_plan() | {"attention": PrepareModuleInput(**cut), "mlp": PrepareModuleInput(**cut)}


def sequence_with(forward_gather, forward_sum):
    def attempt(x, up, down, rank, world_size):
        return forward_sum(F.gelu(forward_gather(x) @ up) @ down)

    return attempt


gather, scatter = toy.gather_sequence, toy.scatter_sequence
no_backward_gather = sequence_with(
    gather,
    toy.conjugate(
        toy.sum_tokens, lambda dy, group: F.pad(dy, (0, 0, 0, dy.shape[1] * (dist.get_world_size() - 1)))
    ),
)
slice_in_backward = sequence_with(toy.conjugate(toy.gather_tokens, toy.my_tokens), scatter)
identity_before_the_pair = sequence_with(toy.conjugate(toy.gather_tokens, lambda dy, group: dy), scatter)
identity_in_backward = sequence_with(gather, toy.conjugate(toy.sum_tokens, lambda dy, group: dy))
leave_without_gather = sequence_with(
    lambda x: x.repeat(1, dist.get_world_size(), 1), lambda y: toy.Leave.apply(y, None)
)
plain_functions = sequence_with(toy.gather_tokens, toy.sum_tokens)
all_reduce_and_slice = sequence_with(gather, lambda y: toy.share_sequence(toy.Leave.apply(y, None)))
whole_output = sequence_with(gather, lambda y: toy.Leave.apply(y, None))
no_gather = sequence_with(lambda x: x.repeat(1, dist.get_world_size(), 1), scatter)


def with_classes(x, up, down, rank, world_size):  # right
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return toy.gather_tokens(x)

        @staticmethod
        def backward(ctx, dx):
            return toy.sum_tokens(dx)

    return scatter(F.gelu(Gather.apply(x) @ up) @ down)


# -- drop 07 ---------------------------------------------------------------------------------


def warm(up):
    """1F1B with another warm-up."""

    def attempt(rank, p, m):
        w = min(m, up(rank, p, m))
        ops = [f"F{i}" for i in range(w)]
        for i in range(m - w):
            ops += [f"F{w + i}", f"B{i}"]
        return ops + [f"B{i}" for i in range(m - w, m)]

    return attempt


def no_drain(rank, p, m):
    return [op for op in d07.order(rank, p, m)][: 2 * m - (p - 1 - rank)]


def backward_first(rank, p, m):
    return [text for i in range(m) for text in (f"B{i}", f"F{i}")]


def gpipe(rank, p, m):
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)]


def from_one(rank, p, m):
    return [text[0] + str(int(text[1:]) + 1) for text in d07.order(rank, p, m)]


def twice(rank, p, m):
    return d07.order(rank, p, m) + ["B0"]


def crossed(rank, p, m):
    return [f"{kind}{i}" for i in (reversed(range(m)) if rank == p - 1 else range(m)) for kind in "FB"]


def words(rank, p, m):
    return "F0 B0"


def never_ends(rank, p, m):
    while True:
        time.sleep(0.01)


def one_forward_missing(rank, p, m):
    return [t for t in d07.order(rank, p, m) if t[1:] != "3"]


def own_order(rank, p, m):  # right: the last two backwards of rank 0 are its own affair
    ops = d07.order(rank, p, m)
    return ops if rank else ops


def overruns(rank, p, m):
    w = p - 1 - rank
    return [f"F{i}" for i in range(w)] + [text for i in range(m) for text in (f"F{w + i}", f"B{i}")]


def without_min(rank, p, m):
    w = p - 1 - rank
    return (
        [f"F{i}" for i in range(w)]
        + [t for i in range(m - w) for t in (f"F{w + i}", f"B{i}")]
        + [f"B{i}" for i in range(max(0, m - w), m)]
    )


def split_backward(rank, p, m):
    return [f"{op.kind}{op.microbatch}" for op in orders.zb_h1(p, m).ops[rank]]


def smaller_bubble(schedule, p, m):
    return (p - 1) / (m + p - 1) / (2 if schedule == "1F1B" else 1)


# -- drop 08 ---------------------------------------------------------------------------------


def in_order(order):
    """An answer to drop 08's first practice that knows one order of the axes only."""

    def attempt(rank, sizes):
        known = {axis: sizes[axis] for axis in order}
        return {axis: grids.group(rank, axis, known) for axis in sizes}

    return attempt


def overlapping(rank, sizes):
    return d08.groups(rank, sizes) | {"dp": sorted((rank + x) % 8 for x in range(sizes["dp"]))}


def too_many(rank, sizes):
    return d08.groups(rank, sizes) | {"dp": list(range(8))}


def without_itself(rank, sizes):
    return {axis: [r for r in g if r != rank] for axis, g in d08.groups(rank, sizes).items()}


def beyond(rank, sizes):
    return d08.groups(rank, sizes) | {"dp": [rank + 8 * x for x in range(sizes["dp"])]}


def from_itself_on(rank, sizes):
    return {axis: [rank] + [r for r in g if r != rank] for axis, g in d08.groups(rank, sizes).items()}


def coordinates_only(rank, sizes):
    return tuple(grids.coordinates(rank, sizes).values())


def always_dp(sizes, node):
    return ["dp"]


# -- drop 09 ---------------------------------------------------------------------------------


def counts(weights=2, gradients=2, optimizer=12, t_of_gradients=True, take=max, zeros=(3, 2, 1)):
    def attempt(stages, d, t, zero):
        n = take(stages) / t
        cut = lambda first: d if zero >= first else 1
        return (
            weights * n / cut(zeros[0]),
            gradients * n * (1 if t_of_gradients else t) / cut(zeros[1]),
            optimizer * n / cut(zeros[2]),
        )

    return attempt


def as_text(stages, d, t, zero):
    return "16 N"


def sum_and_slice(x, rank, world_size):
    dist.all_reduce(x)
    return x.chunk(world_size)[rank]


def gloos_own(x, rank, world_size):
    out = torch.empty_like(x.chunk(world_size)[rank])
    reduce_scatter(out, x)
    return out


def one_place_late(x, rank, world_size):
    return d09.ring_reduce_scatter(
        torch.cat([*x.chunk(world_size)[1:], x.chunk(world_size)[0]]), rank, world_size
    )


def whole_round(x, rank, world_size):
    total, outgoing = x.clone(), x.clone()
    for _ in range(world_size - 1):
        sending = dist.isend(outgoing, (rank + 1) % world_size)
        incoming = torch.empty_like(x)
        dist.recv(incoming, (rank - 1) % world_size)
        sending.wait()
        total += incoming
        outgoing = incoming
    return total.chunk(world_size)[rank]


def sends_first(x, rank, world_size):
    dist.send(x, (rank + 1) % world_size)
    dist.recv(x, (rank - 1) % world_size)
    return x.chunk(world_size)[rank]


def through_rank_0(x, rank, world_size):
    if rank:
        mine = torch.empty_like(x.chunk(world_size)[rank])
        dist.send(x, 0)
        dist.recv(mine, 0)
        return mine
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, world_size):
        dist.recv(theirs, other)
        total += theirs
    for other in range(1, world_size):
        dist.send(total.chunk(world_size)[other], other)
    return total.chunk(world_size)[0]


def single_precision(x, rank, world_size):
    return d09.ring_reduce_scatter(x, rank, world_size).float()


def mean_chunk(x, rank, world_size):
    return d09.ring_reduce_scatter(x, rank, world_size) / world_size


def whole_sum(x, rank, world_size):
    dist.all_reduce(x)
    return x


def no_adding(x, rank, world_size):
    return x.chunk(world_size)[rank].clone()


def straight_to_the_owner(x, rank, world_size):  # right: another way with the same bytes
    chunks = [c.clone() for c in x.chunk(world_size)]
    sending = [dist.isend(chunks[r], r) for r in range(world_size) if r != rank]
    for r in range(world_size):
        if r != rank:
            other = torch.empty_like(chunks[rank])
            dist.recv(other, r)
            chunks[rank] += other
    for work in sending:
        work.wait()
    return chunks[rank]


def called_finish_over_all(model, world_size):
    def divide():
        for p in model.parameters():
            p.grad /= world_size

    return divide()


def the_last_of_the_loop(model, world_size):
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: works.append(dist.all_reduce(p.grad, async_op=True)))

    def finish():
        for work in works:
            work.wait()
        works.clear()
        for p in model.parameters():
            p.grad /= world_size

    return finish


MISTAKES = [
    (d05.overlapped, hooks(wait="hook"), "wrong", "waiting inside the hook"),
    (d05.overlapped, hooks(wait="never"), "wrong", "never waiting before the step"),
    (d05.overlapped, hooks(at_start=lambda p: p.grad.div_(4)), "wrong", "averaging twice"),
    (d05.overlapped, averages_twice, "wrong", "averaging twice"),
    (d05.overlapped, hooks(at_end=lambda p, n: None), "wrong", "the sum, not the mean"),
    (d05.overlapped, hooks(register="register_hook"), "crashed", "an all-reduce that comes too early"),
    (d05.overlapped, all_at_the_end, "wrong", "most of it after backward"),
    (d05.overlapped, no_hooks_at_all, "wrong", "gradients never exchanged"),
    (d05.overlapped, called_finish, "wrong", "no finish() returned"),
    (d05.overlapped, called_finish_over_all, "crashed", "no finish() returned"),
    (d05.overlapped, the_last_of_the_loop, "wrong", "gradients never exchanged"),
    (d05.overlapped, a_copy_that_never_comes_back, "wrong", "gradients never exchanged"),
    (d05.overlapped, forgot_async, "crashed", "nothing to wait for"),
    (d05.overlapped, waits_by_future, "wrong", "waiting inside the hook"),
    (d05.overlapped, one_parameter_only, "wrong", "gradients never exchanged"),
    (d05.overlapped, list_never_emptied, "wrong", "work of earlier steps still in the list"),
    (d05.overlapped, in_double, "wrong", "more bytes than needed"),
    (d05.overlapped, one_bucket, "wrong", "most of it after backward"),
    (d05.overlapped, hangs, "crashed", None),
    (d06.plan, d06.usual_plan, "wrong", "one all-reduce for each matrix"),
    (d06.plan, attention_only, "wrong", "one all-reduce for each matrix"),
    (d06.plan, mlp_left_whole, "wrong", "matrices left whole"),
    (d06.plan, all_whole, "wrong", "matrices left whole"),
    (d06.plan, a_list, "wrong", "no plan for this block"),
    (d06.plan, misspelt, "wrong", "no plan for this block"),
    (d06.plan, unknown_part, "wrong", "no plan for this block"),
    (d06.plan, sharded_input, "wrong", "other collectives instead"),
    (d06.sequence, no_backward_gather, "wrong", "another gradient of x"),
    (d06.sequence, slice_in_backward, "wrong", "half of the backward is missing"),
    (d06.sequence, identity_in_backward, "crashed", "half of the backward is missing"),
    (d06.sequence, identity_before_the_pair, "crashed", "half of the backward is missing"),
    (d06.sequence, leave_without_gather, "wrong", "another shape than the tokens'"),
    (d06.sequence, plain_functions, "wrong", "an output cut off from x"),
    (d06.sequence, all_reduce_and_slice, "wrong", "more bytes than tensor parallelism alone"),
    (d06.sequence, whole_output, "wrong", "another shape than the tokens'"),
    (d06.sequence, no_gather, "wrong", "another output"),
    (d07.one_f_one_b, warm(lambda rank, p, m: p), "wrong", "a warm-up that is too long"),
    (d07.one_f_one_b, warm(lambda rank, p, m: p - rank), "wrong", "a warm-up that is too long"),
    (d07.one_f_one_b, warm(lambda rank, p, m: max(0, p - 2 - rank)), "wrong", "a warm-up that is too short"),
    (d07.one_f_one_b, warm(lambda rank, p, m: rank), "wrong", "the warm-up the wrong way round"),
    (d07.one_f_one_b, no_drain, "wrong", "a missing drain"),
    (d07.one_f_one_b, backward_first, "wrong", "a backward before its forward"),
    (d07.one_f_one_b, gpipe, "wrong", "GPipe instead of 1F1B"),
    (d07.one_f_one_b, from_one, "wrong", "microbatches counted from 1"),
    (d07.one_f_one_b, twice, "wrong", "an operation twice"),
    (d07.one_f_one_b, crossed, "wrong", "ranks that wait for each other"),
    (d07.one_f_one_b, words, "wrong", "no list of operations"),
    (d07.one_f_one_b, one_forward_missing, "wrong", "a forward is missing"),
    slow(d07.one_f_one_b, never_ends, "crashed", None),
    (d07.share, smaller_bubble, "wrong", "1F1B shrinks the bubble"),
    (d07.one_f_one_b, overruns, "wrong", "a forward too many"),
    (d07.one_f_one_b, without_min, "wrong", "a forward too many"),
    (d07.one_f_one_b, split_backward, "wrong", "a backward in two parts"),
    (d07.share, lambda schedule, p, m: "a quarter", "wrong", "no number"),
    (d07.share, lambda schedule, p, m: 0.25, "wrong", "another share"),
    (d08.members, overlapping, "wrong", "groups that do not partition the ranks"),
    (d08.members, too_many, "wrong", "groups that do not partition the ranks"),
    (d08.members, without_itself, "wrong", "groups that do not partition the ranks"),
    (d08.members, beyond, "wrong", "groups that do not partition the ranks"),
    (d08.members, coordinates_only, "wrong", "no groups"),
    (d08.across, always_dp, "wrong", "the same axes for every layout"),
    (d08.across, lambda sizes, node: ["tp" if sizes["tp"] > node else None], "wrong", "no list of axes"),
    (d08.members, in_order(("dp", "tp", "pp")), "wrong", "TP's ranks are no neighbours"),
    (d09.states, counts(weights=4), "wrong", "another number"),
    (d09.states, lambda stages, d, t, zero: 16 * max(stages) / t, "wrong", "not three numbers"),
    (d09.ring, through_rank_0, "wrong", "everything through one rank"),
    (d09.ring, single_precision, "wrong", "not one chunk"),
    (d09.states, as_text, "wrong", "not three numbers"),
    (d09.ring, sum_and_slice, "wrong", "another collective does the work"),
    (d09.ring, gloos_own, "wrong", "another collective does the work"),
    (d09.ring, whole_round, "wrong", "the whole tensor, not a chunk"),
    (d09.ring, one_place_late, "wrong", "another rank's chunk"),
    slow(d09.ring, sends_first, "crashed", "everybody sends before anybody receives"),
    (d09.ring, mean_chunk, "wrong", "the mean, not the sum"),
    (d09.ring, whole_sum, "wrong", "not one chunk"),
    (d09.ring, no_adding, "wrong", "another sum"),
]


def waits_for_the_last(model, world_size):
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))

    def finish():
        works[-1].wait()
        for p in model.parameters():
            p.grad /= world_size

    return finish


def test_waits_that_are_missing_are_counted_and_no_others():
    assert "nobody called wait() for 5 of 6" in d05.overlapped.check(waits_for_the_last).text
    assert "nobody called" not in d05.overlapped.check(waits_for_the_one_before).text


OTHERWISE_RIGHT = [
    (d05.overlapped, waits_for_the_one_before),
    (d07.share, lambda schedule, p, m: round((p - 1) / (m + p - 1), 4)),
    (d08.members, from_itself_on),
    (d05.overlapped, buckets_of_two),
    (d06.sequence, with_classes),
    (d07.one_f_one_b, own_order),
    (d09.ring, straight_to_the_owner),
]
