"""Beyond, b3: experts shared out over ranks; what an uneven router costs; two meshes over the same ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drops.d08 import met, no_group
from helpers import toy
from helpers.practice import Answer, Asked, OnRanks, Run, facts_so_far, first, number, right
from helpers.toy import experts

from .cells import tokens

# -- practice: dispatch and combine ---------------------------------------------------------------


def expert_layer(x, choice, weight, expert, rank, world_size):
    """Return y (T, h), the layer's output for this rank's tokens x (T, h). Expert number r is on rank r.

    choice, weight: (T, k), the numbers of each token's experts, and the weights of their answers. expert:
    this rank's, a function of rows (n, h) -> (n, h). toy.swap(rows, give, take) sends the first give[0] rows
    to rank 0, the next give[1] to rank 1, and so on, and receives take[r] from rank r. It has a backward.
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


def _to_dispatch(rank: int, n: int, k: int) -> list[tuple]:
    """The arguments of two cases: tokens whose splits are uneven, and tokens of which none chooses the last
    expert.
    """
    twin = experts.Experts(H, n, k)

    def expert(rows):
        facts_so_far()["rows"] = facts_so_far().get("rows", 0) + len(rows)
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
    """Whether an all-to-all of rows ended in a crash or a hang, because its sizes do not fit. at_once:
    whether it was the first collective, so that no rank could know how many rows it receives.
    """
    if not (error := run.error):
        return False
    # If a rank died, the others may not have reached that collective.
    ranks = [s for s in error.seen if (s.exit is not None if error.kind == "died" else not s.finished)]
    # A rank of a hang that is in no collective is in its own code: its last collective has ended.
    hangs = error.kind in ("timeout", "deadlock")
    last = [(s.where and s.where["in"]) or (None if hangs else s.box) for s in ranks]
    rows = [at for at in last if at and at["op"] == "all_to_all" and len(at["shape"] or []) == 2]
    stopped = (hangs or error.kind == "died") and last and len(rows) == len(last)
    raised = any("alltoall" in text or "Split sizes" in text for text in run.errors)
    return bool(raised or stopped) and any(at["number"] == 1 for at in rows) == at_once


def _too_few_counts(run: Run) -> bool:
    """Whether a rank failed in an all-to-all of fewer counts than there are ranks."""
    last = [s.box for s in run.error.seen if s.box] if run.error else []
    return any(at["op"] == "all_to_all" and at["shape"][1:] == [] and at["shape"][0] < run.n for at in last)


def _left_early(run: Run) -> bool:
    """Whether the run hung although a rank had finished."""
    return (
        bool(run.error)
        and run.error.kind in ("deadlock", "timeout")
        and any(s.finished for s in run.error.seen)
    )


def _found_in_layer(run: Run, _) -> tuple[str, str] | None:
    travels = any("all_to_all" in facts.get("forward", ()) for facts in run.ranks)
    return first(
        {
            "split sizes not exchanged": _unfit(run, at_once=True),
            "splits that do not fit": _unfit(run, at_once=False) and not _left_early(run),
            "a rank that leaves before the answers go back": _left_early(run),
            "counts that leave out an expert": _too_few_counts(run),
            "no expert was asked": not run.error and not any(_computed(run)),
            "tokens that do not travel": not run.error and not travels,
        }
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
    finds=_found_in_layer,
)


# -- practice: two meshes over the same ranks -----------------------------------------------------


def groups_of(rank, ranks, tp, ep):
    """The groups of `rank`: {"tp": [...], "dp": [...], "ep": [...], "edp": [...]}, each in rising order.

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
    """The first group that differs from the solution's; [] if none does."""
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


def _wrong_groups(run: Run, truth: Run) -> tuple[str, str] | None:
    """(what is wrong with the first group that differs from the solution's, an example)."""
    pairs = list(zip(ASKED, run.values, truth.values))
    off = [axis for axis in MESHES if any(mine[axis] != meant[axis] for _, mine, meant in pairs)]
    if not off:
        return None
    axis, fine = off[0], [other for other in MESHES if other not in off]
    (rank, ranks, tp, ep), mine, meant = next(case for case in pairs if case[1][axis] != case[2][axis])
    text = f"Rank {rank} of {ranks}, with tp {tp} and ep {ep}: its {axis} is {mine[axis]}."
    also = f"Right in all cases: {', '.join(fine) or 'none of the four'}."
    for other in MESHES:
        if all(mine[axis] == meant[other] for _, mine, meant in pairs):
            return (
                f"{axis} has the ranks of {other}",
                f"{text} In each case it is what {other} should be. {also}",
            )
    name, why = _about(rank, ranks, mine[axis], meant[axis])
    return f"{axis} {name}", f"{text} {why} {also}"


def _about(rank: int, ranks: int, group: list[int], meant: list[int]) -> tuple[str, str]:
    """What is wrong with a group: words to stand after its axis, and a sentence."""
    distance = f", {meant[1] - meant[0]} apart" if len(meant) > 1 else ""
    if len(group) != len(meant):
        return "of another size", f"It needs {len(meant)} rank{'s' * (len(meant) > 1)}{distance}."
    if why := no_group(rank, group, ranks):
        return "without the rank" if rank not in group else "with a strange rank", why
    apart, right_ = (distances[1] - distances[0] for distances in (group, meant))
    if apart != right_:
        return "at another distance", f"Its first two ranks are {apart} apart, and should be {right_}."
    return (
        "that begins elsewhere",
        f"Its ranks are {apart} apart, as they should be; its first rank is wrong.",
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
    finds=_wrong_groups,
)


# -- practice: parameters on a rank ---------------------------------------------------------------


def parameters_on_rank(layers, attention, expert, experts, k, tp, ep):
    """Parameters that a rank holds. attention, expert: those of one layer's attention, and of one expert.

    experts: in each layer; k: of them for each token. tp cuts attention, ep shares the experts out.
    """
    # All experts are held, not only a token's k; dp and edp hold copies.
    return layers * (attention / tp + experts * expert / ep)


# Mixtral 8x22B without its embeddings: hidden 6144, 48 heads and 8 of K and V, experts of 16384, 56 layers.
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
)
