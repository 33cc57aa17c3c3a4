"""Beyond, b3: experts shared out over ranks; what an uneven router costs; two meshes over the same ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from drops.d08 import met
from helpers import toy
from helpers.practice.engine import Asked, OnRanks
from helpers.practice.exercise import Answer, right
from helpers.practice.runs import Run, number, told
from helpers.ranks import current, memory
from helpers.ranks.world import World
from helpers.toy import experts
from three_axes.count.clock import Timeline
from three_axes.count.traffic import Traffic
from three_axes.files import rows_of
from three_axes.table import Table

# -- practice: dispatch and combine ---------------------------------------------------------------


def expert_layer(x, choice, weight, expert, rank, world_size):
    """y (T, h) of this rank's tokens x (T, h). Expert number r is on rank r.

    choice, weight: (T, k), the numbers of each token's experts, and what their answers count. expert: this
    rank's, a function of rows (n, h) -> (n, h). toy.swap(rows, give, take) sends the first give[0] rows to
    rank 0, the next give[1] to rank 1, and so on; take[r] rows come from rank r. Its backward is there.
    """
    order = choice.flatten().argsort(stable=True)  # copies of tokens, by expert
    give = choice.flatten().bincount(minlength=world_size)
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give)
    give, take = give.tolist(), take.tolist()
    rows = toy.swap(x[order // choice.shape[1]], give, take)
    back = toy.swap(expert(rows), take, give)
    copies = torch.zeros_like(back).index_copy(0, order, back)
    return (copies.view(*choice.shape, -1) * weight.unsqueeze(-1)).sum(1)


T, H = 12, 8


def tokens(t: int, h: int) -> torch.Tensor:
    """This rank's tokens, (t, h): other ones on every rank."""
    return torch.randn(t, h, generator=torch.Generator().manual_seed(100 + dist.get_rank()))


def _to_dispatch(rank: int, n: int, k: int) -> list[tuple]:
    """Tokens whose splits are uneven, and tokens of which none chooses the last expert."""
    twin = experts.Experts(H, n, k)

    def expert(rows):
        told()["rows"] = told().get("rows", 0) + len(rows)
        return twin.experts[rank](rows)

    cases = []
    for which, bias in ((0, 0.15), (-1, -9)):
        twin.bias.zero_()
        twin.bias[which] = bias
        x = tokens(T, H).requires_grad_()
        cases.append((x, *twin.route(x), expert, rank, n))
    return cases


def _computed(run: Run) -> list[int]:
    return [facts.get("rows", 0) for facts in run.ranks]


def _unfit(run: Run, at_once: bool) -> bool:
    """Whether an all-to-all of rows ended in a crash or a hang: its sizes do not fit. at_once: nothing was
    exchanged before, so that no rank can know how many rows come.
    """
    if not (error := run.error):
        return False
    # Where one died, the others may not have come so far.
    ranks = [s for s in error.seen if (s.exit is not None if error.kind == "died" else not s.finished)]
    last = [(s.where and s.where["in"]) or s.box for s in ranks]
    rows = [at for at in last if at and at["op"] == "all_to_all" and len(at["shape"] or []) == 2]
    stopped = error.kind in ("timeout", "deadlock", "died") and last and len(rows) == len(last)
    said_so = any("alltoall" in text or "Split sizes" in text for text in run.errors)
    return bool(said_so or stopped) and any(at["number"] == 1 for at in rows) == at_once


def _too_few_counts(run: Run, _) -> bool:
    """Whether a rank died when it had exchanged less than a number for each rank."""
    last = [s.box for s in run.error.seen if s.box] if run.error else []
    return any(at["op"] == "all_to_all" and at["shape"][1:] == [] and at["shape"][0] < run.n for at in last)


def _left_early(run: Run, *_) -> bool:
    """Whether a rank has ended while others stand in an all-to-all."""
    return (
        bool(run.error)
        and run.error.kind in ("deadlock", "timeout")
        and any(s.finished for s in run.error.seen)
    )


layer = OnRanks(
    "dispatch and combine",
    expert_layer,
    minutes=12,
    hints=[
        "Make k copies of every token, T·k in all, and sort them by expert:"
        " choice.flatten().argsort(stable=True). Copy i belongs to token i // k.",
        "give is how many copies each expert gets: bincount. take is what the others have for you: an"
        " all-to-all of give, dist.all_to_all_single(take, give).",
        "rows = toy.swap(copies, give, take); the answers go back by toy.swap(…, take, give).",
        "What comes back is in the order of `order`: torch.zeros_like(back).index_copy(0, order, back) undoes"
        " it. Then weigh, and sum over k.",
    ],
    tries=((4, 2), (2, 1)),  # ranks, k
    inputs=_to_dispatch,
    gradient=lambda arguments: torch.ones(T, H),
    praise="y and the gradient of x are the twin's on 4 ranks with k = 2 and on 2 with k = 1, splits uneven.",
    figures=lambda run, truth: [
        (
            "rows that the expert of each rank computed",
            *(", ".join(map(str, _computed(one))) for one in (run, truth)),
        )
    ],
    shows={
        "split sizes not exchanged": lambda run, _: _unfit(run, at_once=True),
        "splits that do not fit": lambda run, _: _unfit(run, at_once=False) and not _left_early(run),
        "a rank that leaves before the answers go back": _left_early,
        "counts that leave out an expert": _too_few_counts,
        "tokens that do not travel": lambda run, _: (
            not run.error and not any("all_to_all" in facts["forward"] for facts in run.ranks)
        ),
        "no expert was asked": lambda run, _: not run.error and not any(_computed(run)),
    },
    mistakes=r"""
        split sizes not exchanged
            An all-to-all does not fit: `give` must add up to the rows that go out, and `take` must be what
            the others give. How many rows come is known to those who send them. First exchange the numbers,
            an all-to-all of `give`; then the rows.
        splits that do not fit
            An all-to-all does not fit: `give` must add up to the rows that go out, and `take` must be what
            the others give. Copies go out by give, and take of them come. Their answers go the other way:
            out by take, in by give.
        a rank that leaves before the answers go back
            An all-to-all needs every rank, also one with no rows to send or to compute: no `return` before
            the second.
        no rows for an expert
            The expert of a rank may get no row at all. expert(rows) works on none; torch.cat of none does
            not.
            ! expected a non-empty list
        another shape
            y is (T, h), a row for each of this rank's tokens. (k is choice.shape[1], 1 in the second try.)
            ~ form
        weights cut off from the router
            y is right, but the router's weights get no gradient from it, and the router would never learn.
            - weight.unsqueeze => weight.detach().unsqueeze
        counts that leave out an expert
            `give` needs a number for each expert, 0 for one that no token of yours chose:
            bincount(minlength=world_size).
        2 where k is meant
            Each token has k experts, choice.shape[1]. The second try has k = 1.
            - choice.shape[1] => 2
        rows that overwrite each other
            `y[i] += …` keeps one of several rows with the same i. y.index_add(0, i, rows) adds all of them.
            - copies = torch.zeros_like(back).index_copy(0, order, back)⏎    return
              (copies.view(*choice.shape, -1) * weight.unsqueeze(-1)).sum(1) => y =
              torch.zeros_like(x)⏎    y[order // choice.shape[1]] += back *
              weight.flatten()[order].unsqueeze(-1)⏎    return y
        weights in another order than the rows
            What comes back is in the order of `order`, and weight.flatten() is not: weigh the copies that
            have found their places, or take weight.flatten()[order].
            - (0, order, back) => (0, order, back * weight.flatten().unsqueeze(-1)) & *
              weight.unsqueeze(-1)).sum(1) => * 1).sum(1)
        weighed before the expert
            Experts are not linear: half of a row does not give half of its answer. Weigh the answers.
            - x[order // choice.shape[1]] => (x[order //
              choice.shape[1]] * weight.flatten()[order].unsqueeze(-1)) & * weight.unsqueeze(-1)).sum(1) => *
              1).sum(1)
        combining without the router's weights
            Each answer counts by the router's weight, and yours count alike. Without the weights the router
            would never learn.
            - * weight.unsqueeze(-1)).sum(1) => * 1).sum(1)
            - * weight.unsqueeze(-1)).sum(1) => * 1).mean(1)
        answers at other tokens' places
            Every answer is there, at another token's place. Row i of what comes back belongs to copy
            order[i]: put it there, by index_copy, or take back[order.argsort()]. As they come, or as
            back[order], they are in another order.
            - torch.zeros_like(back).index_copy(0, order, back) => back[order]
            - torch.zeros_like(back).index_copy(0, order, back) => back
        divided by k once more
            Every answer is weighed, and the weights sum to 1: sum them, no mean.
            - .sum(1) => .mean(1)
        a copy of another token
            The copies are sorted, but they are other tokens': choice.flatten() has k copies of token 0, then
            k of token 1, so copy order[i] is of token order[i] // k.
            - order // choice.shape[1] => order % len(x)
            - order // choice.shape[1] => order % choice.shape[1]
        copies in another order
            The first give[0] rows go to rank 0: sort the copies by their experts. choice.flatten() has k
            copies of token 0, then k of token 1: row i is copy order[i], which is of token order[i] // k.
            ! index \d+ is out of bounds for dimension 0
            - order // choice.shape[1] => torch.arange(len(order)) // choice.shape[1]
            - choice.flatten().argsort(stable=True) => torch.arange(choice.numel())
        no expert was asked
            Call expert(rows) on the rows that have come.
        one expert of k
            Each token has k experts, and you use one. Send k copies of every token.
            - .sum(1) => [:, 0]
            - .sum(1) => [:, 1]
        tokens that do not travel
            No all-to-all: your expert saw this rank's tokens alone, and not those that chose it.
        an output cut off from x
            Something between x and y has no backward: dist.all_to_all_single has none, and detach() cuts it
            off. toy.swap has one.
            ~ cut
            - expert(rows) => expert(rows).detach()
            - toy.swap(x[order // choice.shape[1]] => toy.swap(x[order // choice.shape[1]].detach()
    """,
)


# -- practice: two meshes over the same ranks -----------------------------------------------------


def groups_of(rank, ranks, tp, ep):
    """Whom `rank` of `ranks` meets: {"tp": [...], "dp": [...], "ep": [...], "edp": [...]}, rising lists.

    Attention: tp is innermost, dp the rest. Experts: ep is innermost, over the same ranks, edp the rest.
    tp: the ranks that share attention's matrices. dp: those whose gradients of attention are averaged with
    this rank's. ep: those that this rank exchanges tokens with. edp: those that hold the same experts, whose
    gradients are summed.
    """
    # Two meshes over the same ranks. Innermost ranks are neighbours; outer ones are a group apart.
    inner = lambda size: list(range(rank // size * size, rank // size * size + size))
    outer = lambda size: list(range(rank % size, ranks, size))
    return {"tp": inner(tp), "dp": outer(tp), "ep": inner(ep), "edp": outer(ep)}


LAYOUTS = [(8, 2, 4), (8, 4, 2), (8, 2, 8), (8, 1, 4), (16, 4, 8), (16, 8, 4), (8, 2, 2)]
ASKED = [(rank, *layout) for layout in LAYOUTS for rank in range(layout[0])]
MESHES = ("tp", "dp", "ep", "edp")


def _parts(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    """The first group that is another one than the solution's."""
    for (rank, ranks, tp, ep), mine, meant in zip(ASKED, run.values, truth.values):
        for axis in MESHES:
            if mine[axis] != meant[axis]:
                what = f"rank {rank} of {ranks}, tp {tp}, ep {ep}: its {axis}"
                return [(what, str(mine[axis]), str(meant[axis]))]
    return []


def _praised(run: Run) -> Answer:
    return right(
        "Two meshes over the same ranks, and on eight real ranks every group met.",
        (f"ranks that met along {', '.join(MESHES)}", str(met(run.values[:8])), "[2, 4, 4, 2]"),
    )


def _impossible(run: Run, _) -> bool:
    """Whether a group has ranks that do not exist, lacks the rank itself, or has another size."""
    return not run.error and any(
        not {*mine[axis]} <= {*range(ranks)} or rank not in mine[axis] or len(mine[axis]) != size
        for (rank, ranks, tp, ep), mine in zip(ASKED, run.values)
        for axis, size in zip(MESHES, (tp, ranks // tp, ep, ranks // ep))
    )


fold = Asked(
    "the groups of a folded layout",
    groups_of,
    minutes=8,
    hints=[
        "Take the two meshes one by one. In attention's, the ranks of tp are neighbours, those of dp are tp"
        " apart.",
        "The experts' mesh is over the same ranks and asks nothing of tp: ep are neighbours, edp are ep"
        " apart.",
        "A group of neighbours begins at rank // size · size; one of ranks `size` apart at rank % size.",
    ],
    cases=ASKED,
    reads=lambda groups: {axis: sorted(int(rank) for rank in groups[axis]) for axis in MESHES},
    praise=_praised,
    figures=_parts,
    shows={"a group that cannot be": _impossible},
    mistakes="""
        no groups
            Return a dictionary with tp, dp, ep and edp, each a list of ranks.
            ~ form
        experts' gradients summed over other experts
            The ranks of dp hold the same attention, but other experts: you would sum expert 0 with expert
            1. An expert's gradient is summed over the ranks that hold that expert, edp. (Tokens of the
            others have come to it already.)
            - "edp": outer(ep) => "edp": outer(tp)
            - "edp": outer(ep) => "edp": list(range(ranks))
        experts inside dp, not folded
            You let tokens go to ranks of dp alone, which are tp apart. Folded, the experts' mesh does not
            know attention's: ep is innermost there, so that its ranks are neighbours in a node.
            - inner(ep) => outer(tp)[outer(tp).index(rank) // ep * ep :][:ep] & outer(ep) =>
              outer(tp)[outer(tp).index(rank) % ep :: ep]
            - "ep": inner(ep) => "ep": [rank // (tp * ep) * tp * ep + rank % tp + i * tp for i in range(ep)]
        tp and ep outermost
            tp and ep are innermost: their ranks are neighbours, and dp and edp go over the rest.
            - rank // size * size, rank // size * size + size => rank % (ranks // size), ranks, ranks // size
              & rank % size, ranks, size => rank // (ranks // size) * (ranks // size), (rank // (ranks //
              size) + 1) * (ranks // size)
        a group that begins at the rank
            All members name the same group: of neighbours it begins at rank // size · size.
            - list(range(rank // size * size, rank // size * size + size)) => list(range(rank, rank + size))
        dp in the experts' mesh
            dp is attention's: the ranks tp apart. The experts' ranks that are ep apart are edp.
            - "dp": outer(tp) => "dp": outer(ep)
        innermost and outermost exchanged
            tp and ep are innermost: their ranks are neighbours. Tokens go where other experts are: ep.
            Gradients are summed where the same experts are: edp.
            - "ep": inner(ep), "edp": outer(ep) => "ep": outer(ep), "edp": inner(ep)
            - "tp": inner(tp), "dp": outer(tp) => "tp": outer(tp), "dp": inner(tp)
        a group that cannot be
            Ranks are 0 to ranks − 1, and each is a member of its four groups. tp and ep say how many
            ranks their groups have; dp has ranks / tp, edp ranks / ep.
    """,
)


# -- practice: parameters on a rank ---------------------------------------------------------------


def parameters_on_rank(layers, attention, expert, experts, k, tp, ep):
    """Parameters that a rank holds. attention, expert: those of one layer's attention, and of one expert.

    experts: in each layer; k: of them for each token. tp cuts attention, ep shares the experts out.
    """
    # All experts are held, not only a token's k; dp and edp hold copies.
    return layers * (attention / tp + experts * expert / ep)


# Mixtral 8x22B (hidden 6144, 48 heads and 8 of K and V, experts of 16384, 56 layers), without its embeddings
HIDDEN, INNER, LAYERS = 6144, 16384, 56
MIXTRAL = (LAYERS, 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 6, 3 * HIDDEN * INNER, 8, 2)

parameters = Asked(
    "parameters on a rank",
    parameters_on_rank,
    minutes=6,
    hints=[
        "Take one layer: attention, cut by tp, and the experts that this rank owns.",
        "How many experts does a rank own? experts / ep. Does k matter for that?",
    ],
    cases=[
        (*MIXTRAL, 2, 8),
        (*MIXTRAL, 2, 4),
        (*MIXTRAL, 1, 1),
        (1, 100, 1000, 64, 8, 4, 16),
        (2, 70, 30, 4, 1, 2, 2),
    ],
    reads=number,
    tolerance=1e-6,
    praise="All experts that a rank owns are in its memory, whoever uses them.",
    figures=lambda run, truth: [
        (f"Mixtral 8x22B, TP 2, EP {ep}, in 10⁹", f"{mine / 1e9:.1f}", f"{meant / 1e9:.1f}")
        for ep, mine, meant in zip((8, 4), run.values, truth.values)
    ],
    mistakes="""
        no number
            Return how many parameters the rank holds.
            ~ form
        counting active parameters for memory
            A token uses k experts, but other tokens use the others. A rank must hold every expert that it
            owns, experts / ep. Active parameters count for compute.
            - experts * expert / ep => k * expert / ep
            - experts * expert / ep => k * expert
            - experts * expert / ep => experts * k * expert / ep
        experts cut by tp
            tp cuts attention. Here an expert is whole on its rank: the experts' mesh has its own size for
            that, etp, and it is 1.
            - experts * expert / ep => experts * expert / ep / tp
            - / ep => / tp
        attention shared out over ep
            ep shares out the experts. Attention is on every rank of it, cut by tp alone.
            - attention / tp => attention / tp / ep
            - / tp => / ep
            - / tp => / tp / ep & experts * expert / ep => experts * expert / ep / tp
        tp and ep exchanged
            tp cuts attention, ep shares the experts out. You divide each by the other's size.
            - attention / tp + experts * expert / ep => attention / ep + experts * expert / tp
        every expert on every rank
            That is data parallelism. With ep ranks, each holds experts / ep of them.
            - experts * expert / ep => experts * expert
        attention left whole
            tp cuts attention's matrices: a rank holds 1/tp.
            - attention / tp => attention
        one expert on each rank
            A layer has `experts` of them, and ep ranks share them out: experts / ep on each, whole.
            - experts * expert / ep => expert
            - experts * expert / ep => expert / ep
        bytes, not parameters
            Asked is the number of parameters.
            - return layers => return 2 * layers
        ep taken for a rank's experts
            ep is the number of ranks that share the experts out: experts / ep on each.
            - experts * expert / ep => ep * expert
        one layer
            Every layer has attention and experts of its own. Is a bracket missing?
            - layers * (attention / tp + experts * expert / ep) => layers * attention / tp + experts *
              expert / ep
            - layers * ( => (
            - attention / tp + experts * expert / ep => attention / tp / layers + experts * expert / ep
    """,
)


# -- what the cells show --------------------------------------------------------------------------

# Eight ranks, two meshes over them. Outermost axis first.
FOLDED = {"attention": {"dp": 4, "tp": 2}, "experts": {"edp": 2, "ep": 4}}
ROW = 2e-4  # seconds of one row in an expert, emulated
POLICIES = {"none dropped": (None, 0.0), "capacity": (16, 0.0), "balancing bias": (None, 0.03)}


def layer_traffic(world: World, t: int = 256, h: int = 64) -> Traffic:
    """The bytes of one expert layer, top-2 of four experts on four ranks, forward and backward."""

    def run():
        layer = experts.split_experts(experts.Experts(h))
        x = tokens(t, h).requires_grad_()
        y, _ = experts.expert_parallel(layer, x)
        y.sum().backward()

    world.run(run)
    return world.traffic


def _paced(layer, rows, counts):
    with current.span("F"):
        time.sleep(ROW * len(rows))
        return experts.run_experts(layer, rows, counts)


def timeline_of(world: World, skew: float, t: int = 256, h: int = 64) -> Timeline:
    """One forward of an expert layer on the clock, compute emulated, and what it keeps for backward.

    skew: what expert 0's score has on top for every token, for its choice alone.
    """

    def run():
        layer = experts.split_experts(experts.Experts(h))
        layer.bias[0] = skew
        x = tokens(t, h)
        experts.expert_parallel(layer, x)  # to warm up
        current.rank.recorder.start()
        dist.barrier()
        with memory.saved_activations(layer):
            experts.expert_parallel(layer, x, compute=_paced)[0].sum()

    world.run(run)
    return world.timeline


def _train(capacity: int | None, rate: float, steps: int = 60, t: int = 32, h: int = 16) -> list[float]:
    """Teach an expert layer, on real ranks, what to do with four kinds of tokens, of which one is common.

    Returns, over the last 20 steps: loss, share of the copies dropped, and rows that the fullest expert
    computes, mean = 1.
    """
    torch.manual_seed(0)
    centres, answers = torch.randn(4, h), torch.randn(4, h, h) / h**0.5
    layer = experts.split_experts(experts.Experts(h))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    chance = torch.Generator().manual_seed(1 + dist.get_rank())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    of_steps = []
    for _ in range(steps):
        kind = torch.tensor([0.55, 0.25, 0.15, 0.05]).multinomial(t, True, generator=chance)
        x = centres[kind] + 0.3 * torch.randn(t, h, generator=chance)
        target = (x[:, None] @ answers[kind])[:, 0]
        y, load = experts.expert_parallel(layer, x, capacity=capacity)
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        experts.average_expert_gradients(layer, dist.group.WORLD, alone)
        optimizer.step()
        kept = load if capacity is None else load.clamp(max=capacity)
        sums = torch.cat([loss.detach()[None], load, kept])
        dist.all_reduce(sums)
        loss, load, kept = sums[0] / dist.get_world_size(), sums[1:5], sums[5:]
        experts.even_out(layer, load, rate)
        of_steps.append([float(loss), float(1 - kept.sum() / load.sum()), float(kept.max() / load.mean())])
    return torch.tensor(of_steps[-20:]).mean(0).tolist()


def policies(world: World) -> Table:
    """An uneven router: left alone, cut at a capacity, evened out by a bias. Priced in loss and in time."""
    rows = []
    for name, (capacity, rate) in POLICIES.items():
        loss, dropped, fullest = world.run(_train, capacity, rate)[0]
        rows.append([name, f"{dropped:.0%}", f"{fullest:.1f}", f"{loss:.2f}"])
    columns = ["policy", "dropped", "fullest expert, mean = 1", "loss"]
    return Table(columns, rows, title="60 steps; means of the last 20")


def published() -> dict[str, float]:
    """Layout -> MFU in %, of Mixtral 8x22B on 128 H100: Liu et al. 2025 (MoE Parallel Folding), Table 3."""
    named = {"MCore": "Megatron-Core", "MCore w/ Folding": "Megatron-Core, folded"}
    return {
        named.get(row["method"], row["method"]): float(row["mfu_pct"])
        for row in rows_of("moe_folding_2025_table3.csv")
        if row["model"] == "Mixtral-8x22B"
    }
