"""Every exercise of the notebooks beyond the fourteen: its solution passes, an empty one is not started, each
listed mistake is caught and named.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from exercise_tests import *  # noqa: F403
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from drops import b1, b2, b3, b4
from helpers import toy

pytestmark = pytest.mark.waits

# -- b1 ----------------------------------------------------------------------------------------


def layered(keep="", second=True, reduce=None, give=None):
    """fsdp_layer with one thing done otherwise."""

    def attempt(shard, x, layer, rank, world_size):
        parts = [torch.empty_like(shard) for _ in range(world_size)]
        dist.all_gather(parts, shard)
        w = torch.cat(parts)
        if keep != "parts":
            del parts
        y = layer.forward(w, x)
        if not keep:
            del w
        dy = layer.rest(y)
        if second:
            parts = [torch.empty_like(shard) for _ in range(world_size)]
            dist.all_gather(parts, shard)
            w = torch.cat(parts)
        elif not keep:
            w = torch.zeros(len(shard) * world_size)
        dx, dw = layer.backward(w, x, dy)
        if reduce:
            return dx, reduce(dw, rank, world_size)
        mine = torch.empty_like(shard)
        dist.reduce_scatter(mine, list(dw.chunk(world_size)))
        return dx, give(mine, world_size) if give else mine / world_size

    return attempt


def summed_whole(dw, rank, world_size):
    dist.all_reduce(dw)
    return dw / world_size


def two_reductions(dw, rank, world_size):
    dist.all_reduce(dw)
    mine = torch.empty(len(dw) // world_size)
    dist.reduce_scatter(mine, list(dw.chunk(world_size)))
    return mine / world_size**2


kept_by_name, kept_in_parts = layered(keep="w"), layered(keep="parts")
used_twice, filled_with_zeros = layered(keep="w", second=False), layered(second=False)
reduced_twice = layered(reduce=two_reductions)
all_reduced = layered(reduce=lambda dw, rank, n: summed_whole(dw, rank, n).chunk(n)[rank])
left_whole = layered(reduce=summed_whole)
negative = layered(give=lambda mine, n: -mine)


def freed_storage(shard, x, layer, rank, world_size):
    w = torch.empty(len(shard) * world_size)
    dist.all_gather(list(w.chunk(world_size)), shard)
    dy = layer.rest(layer.forward(w, x))
    return layer.backward(w, x, dy)


def freed_and_used(shard, x, layer, rank, world_size):
    w = torch.empty(len(shard) * world_size)
    dist.all_gather(list(w.chunk(world_size)), shard)
    y = layer.forward(w, x)
    w.untyped_storage().resize_(0)
    dx, dw = layer.backward(w, x, layer.rest(y))
    mine = torch.empty_like(shard)
    dist.reduce_scatter(mine, list(dw.chunk(world_size)))
    return dx, mine / world_size


def a_shard_alone(shard, x, layer, rank, world_size):
    dx, dw = layer.backward(shard, x, layer.rest(layer.forward(shard, x)))
    return dx, dw.chunk(world_size)[rank]


def no_backward_of_it(shard, x, layer, rank, world_size):
    return x, shard


def dx_alone(shard, x, layer, rank, world_size):
    return b1.fsdp_layer(shard, x, layer, rank, world_size)[0]


def dx_of_x(shard, x, layer, rank, world_size):
    return x, b1.fsdp_layer(shard, x, layer, rank, world_size)[1]


def into_one_tensor(shard, x, layer, rank, world_size):
    """Right, written otherwise: gathered into the weights' own memory, which is given back."""
    w = torch.empty(len(shard) * world_size)
    dist.all_gather(list(w.chunk(world_size)), shard)
    y = layer.forward(w, x)
    w.untyped_storage().resize_(0)
    dy = layer.rest(y)
    w.untyped_storage().resize_(4 * len(shard) * world_size)
    dist.all_gather(list(w.chunk(world_size)), shard)
    dx, dw = layer.backward(w, x, dy)
    mine = torch.empty_like(shard)
    dist.reduce_scatter(mine, list((dw / world_size).chunk(world_size)))
    return dx, mine


def plainly(**how):
    return lambda n: [line[:2] for line in toy.fsdp_order(n, **how)]


def without(*lines):
    """The right order, and none of these in it, as (what, backward): of forward, of backward or of both."""

    def attempt(n):
        steps, backward, left = b1.step_order(n), False, []
        for step in steps:
            backward |= step[0] == "B" or step == ("gather", n - 1) and ("F", n - 1) in left
            if (step[0], backward) not in lines:
                left.append(step)
        return left

    return attempt


when_needed, three_at_once = plainly(prefetch=0), plainly(prefetch=2)
all_at_first, never_freed = plainly(prefetch=99), plainly(reshard=False)
not_gathered_again = without(("gather", True))
freed_in_backward_alone, never_reduced = without(("free", False)), without(("reduce", True))
never_gathered = without(("gather", False), ("gather", True))


def all_gathered_first(n):
    return [("gather", i) for i in range(n)] + [step for step in b1.step_order(n)[1:] if step[0] != "gather"]


def left_at_the_end(n):
    return [step for step in b1.step_order(n)[:-2] if step] + [("reduce", 0)]


def reduced_again(n):
    return b1.step_order(n) + [("reduce", i) for i in range(n)]


def reduced_at_first(n):
    return [("reduce", i) for i in range(n)] + [step for step in b1.step_order(n) if step[0] != "reduce"]


def gathered_over(n):
    return [step for step in b1.step_order(n) for _ in range(1 + (step[0] == "gather"))]


def forward_alone(n):
    return b1.step_order(n)[: 3 * n]


def one_too_far(n):
    return b1.step_order(n + 1)


def a_string(n):
    return "gather 0"


def with_its_last_layer_kept(n):
    """Right: the last layer is needed again at once."""
    steps = b1.step_order(n)
    steps.remove(("free", n - 1))
    first = steps.index(("gather", n - 1))
    return steps[: first + 1] + [step for step in steps[first + 1 :] if step != ("gather", n - 1)]


def meshed(of_parts=True, of_model=True, mesh=lambda m: m, shape=(2, 2), **how):
    """shard_model with one thing done otherwise."""

    def attempt(model):
        grid = mesh(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
        for part in model if of_parts else ():
            fully_shard(part, mesh=grid, **how)
        if of_model:
            fully_shard(model, mesh=grid)

    return attempt


across_nodes, in_the_node_alone = meshed(mesh=lambda m: m["replicate"]), meshed(mesh=lambda m: m["shard"])
over_all_four, of_one_rank = meshed(shape=(4,)), meshed(shape=(4, 1))
at_once, no_root, kept_whole = meshed(False), meshed(of_model=False), meshed(reshard_after_forward=False)


def turned(model):
    """A mesh whose second dimension crosses nodes."""
    from torch.distributed.device_mesh import DeviceMesh

    grid = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    for part in [*model, model]:
        fully_shard(part, mesh=grid)


def blocks_alone(model):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for block in model.blocks:
        fully_shard(block, mesh=grid)


def not_at_all(model):
    return model


def blocks_and_root(model):
    """Right: what is left of the model is a unit of its own."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for block in model.blocks:
        fully_shard(block, mesh=grid)
    return fully_shard(model, mesh=grid)


# -- b2 ----------------------------------------------------------------------------------------


def no_maximum(y1, lse1, y2, lse2):
    w1, w2 = lse1.exp(), lse2.exp()
    return (w1 * y1 + w2 * y2) / (w1 + w2), (w1 + w2).log()


def sums_not_merged(y1, lse1, y2, lse2):
    return b2.merge_parts(y1, lse1, y2, lse2)[0], torch.maximum(lse1, lse2)


def y_alone(y1, lse1, y2, lse2):
    return b2.merge_parts(y1, lse1, y2, lse2)[0]


def minus_infinity_is_nothing(y1, lse1, y2, lse2):
    return b2.merge_parts(y1, lse1, y2, lse2.nan_to_num(neginf=0.0))


def a_sigmoid(y1, lse1, y2, lse2):  # right, written otherwise
    share = torch.sigmoid(lse1 - lse2)
    return share * y1 + (1 - share) * y2, torch.logaddexp(lse1, lse2)


def in_float32(y1, lse1, y2, lse2):  # right, less exactly
    return tuple(x.float() for x in b2.merge_parts(y1, lse1, y2, lse2))


def one_chunk_too_far(rank, c, s):
    half = s // (2 * c)
    return [*range(rank * half, (rank + 1) * half), *range(s - rank * half, s - (rank - 1) * half)]


def neighbours_overlap(rank, c, s):
    half = s // (2 * c)
    return [*range(rank * half, (rank + 2) * half)]


def counted_from_one(rank, c, s):
    return [i + 1 for i in b2.tokens_of(rank, c, s)]


def backwards(rank, c, s):
    return b2.tokens_of(rank, c, s)[::-1]


def by_the_work(rank, c, s):
    """Chunks in order whose pairs are equal: but not their tokens."""
    edge = lambda r: round(s * (r / c) ** 0.5)
    return list(range(edge(rank), edge(rank + 1)))


def other_pairs(rank, c, s):
    half = s // (2 * c)
    back = s - ((rank + 1) % c + 1) * half
    return [*range(rank * half, (rank + 1) * half), *range(back, back + half)]


def a_number(rank, c, s):
    return rank


def striped(rank, c, s):
    return torch.arange(rank, s, c)


def stepped(positions, mask, average):
    def attempt(model, tokens, targets, at, everywhere, dp, cp):
        here = torch.arange(len(at))
        x = model[0].token(tokens) + model[0].position.weight[at if positions else here]
        allowed = at[:, None] >= everywhere if mask else here[:, None] >= torch.arange(len(everywhere))
        for block in model.blocks:
            x = toy.context_block(block, x, allowed, cp)
        loss = toy.loss_of(model[-1](x), targets)
        loss.backward()
        average(model, dp, cp)
        return loss.item()

    return attempt


def summed(model, dp, cp):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def twice(model, dp, cp):
    toy.average_gradients(model)
    for p in model.parameters():
        p.grad /= 4


everyone = lambda model, dp, cp: toy.average_gradients(model)
local_positions, local_mask = stepped(False, True, everyone), stepped(True, False, everyone)
a_sum, averaged_twice = stepped(True, True, summed), stepped(True, True, twice)


def no_return(model, tokens, targets, at, everywhere, dp, cp):
    b2.cut_step(model, tokens, targets, at, everywhere, dp, cp)


def loss_of_all(model, tokens, targets, at, everywhere, dp, cp):
    return b2.cut_step(model, tokens, targets, at, everywhere, dp, cp) * 4


def averaged_one_by_one(model, tokens, targets, at, everywhere, dp, cp):
    """Right, written otherwise: first over cp, then over dp."""
    return stepped(
        True, True, lambda m, dp, cp: (toy.average_gradients(m, cp), toy.average_gradients(m, dp))
    )(model, tokens, targets, at, everywhere, dp, cp)


# -- b3 ----------------------------------------------------------------------------------------


def dispatched(take_as=None, un_permute=None, combine=None, copy=None, swap=toy.swap):
    """expert_layer with one thing done otherwise."""

    def attempt(x, choice, weight, expert, rank, world_size):
        k = choice.shape[1]
        order = choice.flatten().argsort(stable=True)
        give = choice.flatten().bincount(minlength=world_size)
        take = torch.empty_like(give)
        if take_as:
            take = take_as(give)
        else:
            dist.all_to_all_single(take, give)
        give, take = give.tolist(), take.tolist()
        rows = swap(x[order // k if copy is None else copy(order, k, len(x))], give, take)
        back = swap(expert(rows), take, give)
        copies = un_permute(back, order) if un_permute else back[order.argsort()]
        copies = copies.view(*choice.shape, -1)
        return combine(copies, weight) if combine else (copies * weight.unsqueeze(-1)).sum(1)

    return attempt


def plain_swap(rows, give, take):
    coming = rows.new_empty(sum(take), rows.shape[1])
    dist.all_to_all_single(coming, rows.detach().contiguous(), take, give)
    return coming


my_own = dispatched(take_as=lambda give: give.clone())
all_even = dispatched(take_as=lambda give: torch.full_like(give, int(give.sum()) // len(give)))
no_backward_of_its_own = dispatched(swap=plain_swap)
summed_to_a_row = dispatched(combine=lambda copies, weight: (copies * weight.unsqueeze(-1)).sum((0, 1)))
argsorted = dispatched()  # right, written otherwise


def sizes_of_another_sum(x, choice, weight, expert, rank, world_size):
    return toy.swap(x, [3] * world_size, [3] * world_size)[:, :4]


def one_rank_skips_the_counts(x, choice, weight, expert, rank, world_size):
    give = choice.flatten().bincount(minlength=world_size)
    if rank:
        dist.all_to_all_single(torch.empty_like(give), give)
    return x


def ep_of_the_wrong_size(rank, ranks, tp, ep):
    return b3.groups_of(rank, ranks, tp, max(1, ep // 2))


def three_groups(rank, ranks, tp, ep):
    g = b3.groups_of(rank, ranks, tp, ep)
    del g["edp"]
    return g


def twice_everything(layers, attention, expert, experts, k, tp, ep):
    return 2 * b3.parameters_on_rank(layers, attention, expert, experts, k, tp, ep)


def in_words(layers, attention, expert, experts, k, tp, ep):
    return "many"


# -- b4 ----------------------------------------------------------------------------------------


def last_of(entries, members, keep=lambda e: True, any_group=False, ranks=None):
    """who_never_came with one thing done otherwise."""
    missing = {}
    for group, mine in members.items():
        last = {
            r: max(
                (
                    e["collective_seq_id"]
                    for e in entries[r]
                    if keep(e) and (any_group or e["process_group"][0] == group)
                ),
                default=-1,
            )
            for r in ranks or mine
        }
        if behind := [r for r in last if last[r] < max(last.values())]:
            missing[group] = behind
    return missing


def always_rank_0(entries, members):
    return {group: [0] for group in members}


def a_list(entries, members):
    return [1]


def in_a_set(entries, members):  # right, said otherwise: a group without missing ranks may be there
    return {g: set(last_of(entries, members).get(g, ())) for g in members}


def named(rank=None, line=None, cause=None, run=3):
    """diagnoses() with one thing of one run said otherwise, as dealt first: tests share the runs."""

    def attempt():
        b4._deals[:] = [0]
        guilty, its_line, why = b4.truth(run)
        answer = rank(b4.stop(run), guilty) if rank else guilty
        others = {n: b4.truth(n) for n in (1, 2, 3) if n != run}
        return {run: (answer, line or its_line, cause or why)} | others

    return attempt


waits_too = lambda stopped, guilty: next(r for r in stopped.dumps if r != guilty and stopped.waits(r))
the_dead = lambda stopped, guilty: stopped.dead[0]
one_that_waits, one_that_waits_for_a_straggler = named(waits_too), named(waits_too, run=7)
one_that_died = named(the_dead, run=6)
a_longer_timeout, a_longer_timeout_for_the_slow = (
    named(cause="the timeout is too short"),
    named(cause="the timeout is too short", run=7),
)
a_longer_timeout_for_the_dead = named(cause="the timeout is too short", run=6)
a_bad_cable = named(cause="the network")
where_they_wait, the_first_line = named(line=9), named(line=1)
as_if_slow, as_if_stopped = named(cause="only slow"), named(cause="a save on one rank only", run=7)
another_cause = named(cause="a wrong split")
no_such_rank = named(lambda stopped, guilty: 9)
no_such_cause = named(cause="bad luck")


def two_runs():
    return {n: b4.truth(n) for n in (1, 2)}


def the_shown_one():
    return {n: b4.truth(n) for n in (1, 2, 4)}


def in_a_list():
    return [1, 2, 3]


def all_of_them():
    return {n: b4.truth(n) for n in b4.RUNS if n != 4}


def on_its_own(batches, step):
    for batch in batches:
        step(batch)


def with_a_longer_timeout(batches, step):
    patient = dist.new_group(timeout=timedelta(hours=1))
    dist.barrier(group=patient)
    for batch in batches:
        step(batch)


def with_a_barrier(batches, step):
    for batch in batches:
        dist.barrier()
        step(batch)


def the_last_one_again(batches, step):
    batch, ended = None, False
    while True:
        fresh = next(batches, None)
        ended = ended or fresh is None
        batch = batch if fresh is None else fresh
        left = torch.tensor(float(not ended))
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
        if not left or batch is None:
            return
        step(batch)


def three_and_out(batches, step):
    for _, batch in zip(range(3), batches):
        left = torch.ones(1)
        dist.all_reduce(left)
        step(batch)


def one_too_few(batches, step):
    batch = next(batches, None)
    while True:
        after = next(batches, None)
        left = torch.tensor(float(after is not None))
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if not left:
            return
        step(batch)
        batch = after


def counted_first(batches, step):  # right, written otherwise
    mine = list(batches)
    number = torch.tensor(len(mine))
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    for batch in mine[: int(number)]:
        step(batch)


def answered_for(batches, step):  # right, as join() does it: who has no batch adds nothing
    while True:
        batch = next(batches, None)
        left = torch.tensor(float(batch is not None))
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
        if not left:
            return
        step(batch) if batch is not None else dist.all_reduce(torch.zeros(8))


OTHERWISE_RIGHT = [
    (b1.one_layer, into_one_tensor),
    (b1.order, with_its_last_layer_kept),
    (b1.mesh, blocks_and_root),
    (b2.parts, a_sigmoid),
    (b2.parts, in_float32),
    (b2.places, striped),
    (b2.step, averaged_one_by_one),
    (b3.layer, argsorted),
    (b4.never, in_a_set),
    (b4.clinic, all_of_them),
    (b4.mended, counted_first),
    (b4.mended, answered_for),
]
MISTAKES = [
    (b1.one_layer, kept_by_name, "wrong", "gathered weights kept"),
    (b1.one_layer, kept_in_parts, "wrong", "gathered weights kept"),
    (b1.one_layer, used_twice, "wrong", "backward without a second gather"),
    (b1.one_layer, filled_with_zeros, "wrong", "backward without a second gather"),
    (b1.one_layer, freed_storage, "wrong", "backward without a second gather"),
    (b1.one_layer, freed_and_used, "wrong", "backward without a second gather"),
    (b1.one_layer, reduced_twice, "wrong", "gradients reduced twice"),
    (b1.one_layer, all_reduced, "wrong", "an all-reduce where a reduce-scatter is enough"),
    (b1.one_layer, left_whole, "wrong", "the whole gradient kept"),
    (b1.one_layer, negative, "wrong", "another dx, or another gradient"),
    (b1.one_layer, a_shard_alone, "crashed", "a shard where the whole layer is needed"),
    (b1.one_layer, no_backward_of_it, "wrong", "a part left out"),
    (b1.one_layer, dx_alone, "wrong", "no pair of tensors"),
    (b1.one_layer, dx_of_x, "wrong", "another dx, or another gradient"),
    (b1.order, never_freed, "wrong", "gathered weights kept"),
    (b1.order, freed_in_backward_alone, "wrong", "gathered weights kept"),
    (b1.order, left_at_the_end, "wrong", "gathered weights kept"),
    (b1.order, all_at_first, "wrong", "prefetch so early that nothing is saved"),
    (b1.order, three_at_once, "wrong", "prefetch so early that nothing is saved"),
    (b1.order, when_needed, "wrong", "gathered only when needed"),
    (b1.order, not_gathered_again, "wrong", "backward without a second gather"),
    (b1.order, all_gathered_first, "wrong", "backward without a second gather"),
    (b1.order, never_gathered, "wrong", "weights that are not there"),
    (b1.order, reduced_again, "wrong", "gradients not reduced once"),
    (b1.order, never_reduced, "wrong", "gradients not reduced once"),
    (b1.order, reduced_at_first, "wrong", "reduced before backward"),
    (b1.order, gathered_over, "wrong", "gathered twice over"),
    (b1.order, forward_alone, "wrong", "layers in the wrong order"),
    (b1.order, one_too_far, "wrong", "a step that does not exist"),
    (b1.order, a_string, "wrong", "no list of steps"),
    (b1.mesh, across_nodes, "wrong", "sharding over the wrong mesh axis"),
    (b1.mesh, turned, "wrong", "sharding over the wrong mesh axis"),
    (b1.mesh, in_the_node_alone, "wrong", "replicas that never meet"),
    (b1.mesh, over_all_four, "wrong", "cut over all four ranks"),
    (b1.mesh, of_one_rank, "wrong", "nothing is cut"),
    (b1.mesh, not_at_all, "wrong", "nothing is cut"),
    (b1.mesh, at_once, "wrong", "one unit: the whole model at once"),
    (b1.mesh, no_root, "wrong", "gathered weights kept"),
    (b1.mesh, kept_whole, "wrong", "gathered weights kept"),
    (b1.mesh, blocks_alone, "wrong", "parts left out"),
    (b2.parts, no_maximum, "wrong", "the larger lse not taken out first"),
    (b2.parts, sums_not_merged, "wrong", "sums that are not merged"),
    (b2.parts, y_alone, "wrong", "not y and lse"),
    (b2.parts, minus_infinity_is_nothing, "wrong", "a part that a token may not see"),
    (b2.places, one_chunk_too_far, "wrong", "tokens that are not shared out"),
    (b2.places, neighbours_overlap, "wrong", "tokens that are not shared out"),
    (b2.places, counted_from_one, "wrong", "tokens that are not shared out"),
    (b2.places, backwards, "wrong", "positions out of order"),
    (b2.places, by_the_work, "wrong", "unequal numbers of tokens"),
    (b2.places, other_pairs, "wrong", "one rank has more pairs"),
    (b2.places, a_number, "wrong", "no list of positions"),
    (b2.step, no_return, "wrong", "no loss"),
    (b2.step, loss_of_all, "wrong", "another loss than the twin's"),
    (b3.layer, my_own, "crashed", "split sizes not exchanged"),
    (b3.layer, all_even, "crashed", "split sizes not exchanged"),
    (b3.layer, one_rank_skips_the_counts, "crashed", None),
    (b3.layer, sizes_of_another_sum, "wrong", "another shape"),
    (b3.layer, no_backward_of_its_own, "wrong", "an output cut off from x"),
    (b3.layer, summed_to_a_row, "wrong", "another shape"),
    (b3.fold, ep_of_the_wrong_size, "wrong", "a group that cannot be"),
    (b3.fold, three_groups, "wrong", "no groups"),
    (b3.parameters, twice_everything, "wrong", "another number"),
    (b3.parameters, in_words, "wrong", "no number"),
    (b4.never, always_rank_0, "wrong", "other ranks"),
    (b4.never, a_list, "wrong", "no ranks by group"),
    (b4.clinic, one_that_waits, "wrong", "blaming the rank that timed out"),
    (b4.clinic, one_that_waits_for_a_straggler, "wrong", "blaming the rank that timed out"),
    (b4.clinic, one_that_died, "wrong", "blaming the rank that died"),
    (b4.clinic, a_longer_timeout, "wrong", "raising the timeout"),
    (b4.clinic, a_longer_timeout_for_the_slow, "wrong", "raising the timeout"),
    (b4.clinic, a_longer_timeout_for_the_dead, "wrong", "raising the timeout"),
    (b4.clinic, a_bad_cable, "wrong", "blaming the network"),
    (b4.clinic, where_they_wait, "wrong", "the line where ranks wait"),
    (b4.clinic, the_first_line, "wrong", "another line"),
    (b4.clinic, as_if_slow, "wrong", "stopped taken for slow"),
    (b4.clinic, as_if_stopped, "wrong", "slow taken for stopped"),
    (b4.clinic, another_cause, "wrong", "another cause"),
    (b4.clinic, no_such_rank, "wrong", "no diagnoses"),
    (b4.clinic, no_such_cause, "wrong", "no diagnoses"),
    (b4.clinic, two_runs, "wrong", "no diagnoses"),
    (b4.clinic, the_shown_one, "wrong", "no diagnoses"),
    (b4.clinic, in_a_list, "wrong", "no diagnoses"),
    (b4.mended, on_its_own, "crashed", "a rank that stops alone"),
    (b4.mended, with_a_longer_timeout, "crashed", "raising the timeout"),
    (b4.mended, with_a_barrier, "crashed", "a barrier more"),
    (b4.mended, the_last_one_again, "wrong", "a batch trained on twice"),
    (b4.mended, three_and_out, "wrong", "batches left out"),
    (b4.mended, one_too_few, "wrong", "batches left out"),
]
