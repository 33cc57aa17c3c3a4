"""Drop 13's exercises: a cost model of one's own, and four quick cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import NamedTuple

from drops import lines
from drops.lines import LINES, Cost
from helpers.practice import Answer, Asked, Run, WrongForm, names_in, number, right
from three_axes.paper import by_hand
from three_axes.plan import CLUSTERS, FRAMEWORKS, Cluster, Estimate, Job, Layout, estimate, find_model
from three_axes.table import human

# -- practice: a cost model of one's own ----------------------------------------------------------


class Given(NamedTuple):
    """A job as a cost model sees it: N parameters, L layers of width h, `batch` sequences of s tokens. C:
    FLOP/s that a GPU reaches. W, R: bytes/s that a link in a node, and a port out of it, reach. node: GPUs of
    a node. g: bytes of a gradient, 2, or 4 where a framework sums gradients in float32.
    """

    N: float
    L: int
    h: int
    s: int
    batch: int
    C: float
    W: float
    R: float
    node: int
    g: int


class Cut(NamedTuple):
    """A layout. d, t, p: sizes of DP, TP and PP. b: sequences in a microbatch. v: chunks of layers on a rank.
    zero: the ZeRO stage. again: 1 if every layer's forward runs twice (recompute), else 0.
    """

    d: int
    t: int
    p: int
    b: int = 1
    v: int = 1
    zero: int = 1
    again: int = 0

    def __str__(self) -> str:
        more = f", v {self.v}" * (self.v > 1) + f", b {self.b}" * (self.b > 1)
        more += f", ZeRO-{self.zero}" * (self.zero != 1) + ", recompute" * bool(self.again)
        return f"{self.d} · {self.t} · {self.p}{more}"


# `cost` calls the course's functions. A Line would first look for the reader's, which gives the same and
# takes longer than the rest of `cost`: drop 14's check asks thousands of times.
compute, tp_sends, stage_sends = lines.compute.ours, lines.tp_sends.ours, lines.stage_sends.ours
shows, all_reduce, bandwidth = lines.shows.ours, lines.all_reduce.ours, lines.bandwidth.ours
bubble, states, activations = lines.bubble.ours, lines.states.ours, lines.activations.ours


def cost(job, cut):
    """The Cost of a step of `job`, a Given, under `cut`, a Cut."""
    T, m = cut.b * job.s, job.batch / (cut.d * cut.b)
    n, layers = job.N / (cut.t * cut.p), job.L / cut.p  # parameters and layers on a rank
    reach = lambda ranks, stride: bandwidth(ranks, stride, job.node, job.W, job.R)

    work = m * compute(n, layers / cut.t, job.h, job.s, T, job.C) * (1 + cut.again / 3)
    tp = m * 5 / 4 * tp_sends(layers, job.h, T, cut.t) / reach(cut.t, 1)
    share = bubble(m, cut.p, cut.v)
    idle = (work + tp) * share / (1 - share)

    sent, hides = (2 + job.g) / 2, (work + tp) / m  # bytes a parameter, all-reduced; seconds
    if cut.zero == 0:
        sent = job.g
    if cut.zero == 2:
        sent, hides = (2 + m * job.g) / 2, work + tp
    if cut.zero == 3:
        sent, hides = m * (4 + job.g) / 2, work + tp
    dp = shows(all_reduce(sent * n, cut.d) / reach(cut.d, cut.t), hides)

    port = job.W if cut.d * cut.t * cut.p <= job.node else job.R
    messages = 2 * cut.v * (m if cut.v == 1 else cut.p) if cut.p > 1 else 0
    sends = messages * stage_sends(job.h, T, cut.t) / port

    held = states(n, cut.d, cut.zero, g=job.g)
    chunks = 1 + (cut.p - 1) / (cut.p * cut.v) if cut.v > 1 else 1
    kept = activations(job.L, job.h, T, cut.t, 2 if cut.again else 34) * chunks
    return Cost(work, tp, idle, dp, sends, held + kept + 3e9)


# C is 0.77 of what a large bfloat16 product reaches alone (A100: 0.80), because a step also has elementwise
# work and launches. (Nobody has published a product of a GB300: `DEVICES` assumes one.)
_REACHED = {
    "dgx-a100": (0.70, 0.76, 0.68),
    "dgx-h100": (0.56, 0.76, 0.68),
    "dgx-b200": (0.54, 0.76, 0.68),
    "gb200-nvl72": (0.51, 0.76, 0.68),
    "gb300-nvl72": (0.58, 0.76, 0.68),
}


class _Held(NamedTuple):
    """A job on which the reader's lines and the planner are compared."""

    model: str
    cluster: str
    batch: int
    seq_len: int
    framework: str

    @property
    def job(self) -> Job:
        sizes = find_model(self.model), CLUSTERS[self.cluster], self.batch, self.seq_len
        return Job(*sizes, FRAMEWORKS[self.framework])


# Two jobs, of which the drop shows the first, each with twelve layouts that fit, as fields of a Cut: each
# axis where it is best and where it is worst, TP over nodes, as many microbatches as stages, ZeRO-3 with many
# microbatches.
_JOBS = {
    _Held("opt-30b", "dgx-a100", 256, 2048, "textbook"): (
        *((32, 1, 1, 2, 1, 3, 0), (16, 2, 1, 2, 1, 2, 0), (8, 4, 1, 4, 1, 1, 0), (4, 8, 1, 8, 1, 1, 0)),
        *((8, 1, 4, 1, 3, 1, 0), (2, 1, 16, 1, 1, 1, 0), (16, 2, 1, 1, 1, 3, 0), (16, 1, 2, 1, 1, 1, 1)),
        *((2, 8, 2, 4, 1, 1, 0), (32, 1, 1, 8, 1, 3, 1), (4, 1, 8, 8, 1, 1, 1), (1, 2, 16, 16, 1, 0, 1)),
    ),
    _Held("llama-3-70b", "dgx-h100", 128, 8192, "megatron-lm"): (
        *((64, 1, 1, 2, 1, 3, 1), (16, 4, 1, 1, 1, 3, 0), (2, 4, 8, 1, 1, 1, 0), (8, 8, 1, 1, 1, 1, 0)),
        *((4, 8, 2, 1, 4, 1, 0), (4, 16, 1, 2, 1, 1, 0), (1, 64, 1, 16, 1, 0, 0), (1, 8, 8, 2, 1, 0, 0)),
        *((4, 4, 4, 1, 5, 1, 1), (2, 2, 16, 1, 1, 1, 1), (4, 8, 2, 16, 1, 1, 1), (8, 4, 2, 2, 1, 1, 1)),
    ),
}
# (changed fields of the second job, a layout) for which one term, or one branch of it, decides.
_PROBES = (
    ({}, (1, 1, 8, 8, 4, 1, 0)),  # p 8, m 16, v 4
    ({}, (1, 1, 8, 1, 1, 1, 0)),  # a pipeline in one node
    ({}, (8, 1, 8, 8, 1, 1, 0)),  # two microbatches
    ({"s": 131072, "batch": 8}, (1, 8, 8, 1, 1, 0, 0)),  # attention is most
    ({"s": 131072, "batch": 8}, (1, 8, 8, 1, 1, 0, 1)),
    ({"batch": 4096, "s": 512}, (8, 8, 1, 1, 1, 3, 0)),  # ZeRO-3 with many microbatches
    ({"batch": 4096, "s": 512}, (2, 1, 1, 1, 1, 3, 0)),
    ({"batch": 32, "s": 4096}, (8, 8, 1, 1, 1, 2, 0)),  # ZeRO-2 with four microbatches, half of it hidden
    ({"batch": 8, "s": 512}, (8, 8, 1, 1, 1, 2, 0)),  # and with one
    ({"batch": 8, "s": 256}, (2, 4, 1, 1, 1, 1, 0)),  # DP in one node, and nothing to hide under
    ({"batch": 8, "s": 256}, (2, 2, 2, 1, 1, 2, 0)),
    ({"batch": 8, "s": 256}, (4, 4, 1, 1, 1, 1, 0)),  # two ranks of a node share its ports with others
    ({"batch": 8, "s": 256}, (8, 8, 1, 1, 1, 1, 0)),  # eight share them
    ({"batch": 8, "s": 256}, (4, 16, 1, 1, 1, 1, 0)),  # a stride longer than a node
    ({"batch": 8, "s": 256, "R": 200e9}, (8, 2, 1, 1, 1, 1, 0)),  # ports that are together faster than a link
    ({"batch": 16, "s": 1024, "h": 1024}, (2, 4, 1, 8, 1, 1, 0)),  # compute hides some, TP some
    ({"batch": 8, "s": 1024, "C": 4e15}, (8, 8, 1, 1, 1, 3, 0)),
    ({"C": 4e15}, (1, 16, 1, 1, 1, 1, 0)),  # TP over nodes
    ({"C": 4e15}, (1, 32, 2, 1, 1, 1, 0)),
    ({"C": 4e15}, (1, 2, 1, 1, 1, 1, 0)),
    ({"C": 4e15, "R": 1e9}, (4, 8, 2, 1, 8, 1, 0)),  # sends, in chunks
    ({"g": 4}, (2, 4, 8, 1, 1, 0, 0)),  # plain DP, gradients of 4 bytes
    ({"g": 2}, (2, 4, 8, 1, 1, 0, 0)),  # states by ZeRO's stage
    ({"g": 2}, (2, 1, 1, 1, 1, 2, 1)),
    ({"g": 2}, (2, 1, 1, 1, 1, 1, 1)),
    ({"g": 4}, (2, 1, 1, 1, 1, 2, 1)),
    ({"g": 4}, (2, 1, 1, 1, 1, 3, 1)),
    ({"N": 1e9}, (1, 8, 8, 4, 2, 0, 0)),  # activations in chunks
    ({"N": 1e9}, (1, 8, 2, 4, 2, 0, 0)),
    ({"N": 1e9, "L": 4, "s": 64, "batch": 128}, (2, 8, 4, 1, 1, 1, 0)),  # the rest is most of memory
)
NEAR = 0.1  # a term may differ by a tenth from the solution's
TOLD_APART = 1.1  # the order of two layouts counts if the planner's seconds differ by more than this factor


def _given(held: _Held) -> Given:
    return as_written(held.job, Layout())[0]


def layout_of(cut: Cut) -> Layout:
    """The planner's layout of a Cut: with sequence parallelism wherever there is TP."""
    return Layout(
        dp=cut.d,
        tp=cut.t,
        pp=cut.p,
        microbatch=cut.b,
        interleave=cut.v,
        schedule="interleaved" if cut.v > 1 else "1F1B",
        zero=cut.zero,
        sequence_parallel=cut.t > 1,
        recompute="full" if cut.again else "none",
    )


def reaches(name: str) -> list[float]:
    """[C, W, R] of a cluster of this name: what is reached of its printed speeds."""
    return [part * whole for part, whole in zip(_REACHED[name], _printed(CLUSTERS[name]))]


def _printed(cluster: Cluster) -> tuple[float, float, float]:
    """(FLOP/s of a GPU, bytes/s of a link, of a port), as they are printed."""
    return cluster.device.flops, cluster.intra_node_bandwidth, cluster.inter_node_bandwidth


def as_written(job: Job, layout: Layout) -> tuple[Given, Cut]:
    """A planner's job and layout as a Given and a Cut. If a layout recomputes only some layers, the Cut
    recomputes all.
    """
    speeds = reaches(next(name for name in _REACHED if _printed(CLUSTERS[name]) == _printed(job.cluster)))
    sizes = job.model.params, job.model.layers, job.model.hidden, job.seq_len, job.global_batch
    given = Given(*sizes, *speeds, job.cluster.gpus_per_node, job.framework.holds.gradient_bytes)
    again = int(layout.recompute == "full")
    axes = layout.dp, layout.tp, layout.pp
    return given, Cut(*axes, layout.microbatch, layout.interleave, layout.zero, again)


@cache
def _cases() -> list[tuple[Given, Cut]]:
    """The arguments of an attempt: the layouts of both jobs, then those for which one term decides."""
    cases = [(_given(held), Cut(*cut)) for held, cuts in _JOBS.items() for cut in cuts]
    last = cases[-1][0]
    return cases + [(last._replace(**changed), Cut(*cut)) for changed, cut in _PROBES]


@cache
def _planned() -> dict[_Held, list[Estimate]]:
    """The planner's estimates of each job's layouts."""
    return {held: [estimate(held.job, layout_of(Cut(*cut))) for cut in cuts] for held, cuts in _JOBS.items()}


def _agreement(seconds: list[float], planned: list[Estimate]) -> tuple[float, float]:
    """(the share of pairs more than 10 % apart that are in the planner's order, the mean relative error)."""
    theirs = [one.step_seconds for one in planned]
    apart = lambda a, b: max(a, b) > TOLD_APART * min(a, b)
    pairs = [(i, k) for i, k in combinations(range(len(theirs)), 2) if apart(theirs[i], theirs[k])]
    in_order = sum((seconds[i] < seconds[k]) == (theirs[i] < theirs[k]) for i, k in pairs)
    errors = [abs(mine / other - 1) for mine, other in zip(seconds, theirs)]
    return in_order / len(pairs), sum(errors) / len(errors)


def _cost(value) -> Cost:
    """What a reader returned, as a Cost. Raises WrongForm if it is no tuple of six values."""
    if not isinstance(value, tuple) or len(value) != len(Cost._fields):
        raise WrongForm(f"You return a {type(value).__name__}, and a Cost of six numbers is asked for")
    return Cost(*map(number, value))


def _farthest(run: Run, truth: Run, term: str) -> tuple[float, int]:
    """(the largest relative difference of a term from the solution's, the case that has it)."""
    pairs = zip(run.values, truth.values)
    apart = [_differ(getattr(mine, term), getattr(ours, term)) for mine, ours in pairs]
    return max((share, -case) for case, share in enumerate(apart))[0], apart.index(max(apart))


def _differ(mine: float, ours: float) -> float:
    return abs(mine - ours) / max(abs(ours), 1e-9)


def _only(run: Run, term: str) -> Run:
    """A run in which each Cost keeps this one term, and the others are 0."""
    bare = Cost(*[0.0] * len(Cost._fields))
    values = [bare._replace(**{term: getattr(value, term)}) for value in run.values]
    return Run(run.tried, [run.ranks[0] | {"values": values}])


def _text_on(term: str, run: Run, truth: Run) -> str:
    """A text on the case in which a term differs most from the solution's."""
    _, case = _farthest(run, truth, term)
    mine, ours = (getattr(of.values[case], term) for of in (run, truth))
    many = sum(_differ(getattr(a, term), getattr(b, term)) > NEAR for a, b in zip(run.values, truth.values))
    job, cut = _cases()[case]
    times = f"{mine / ours:.3g} times ours" if ours else f"{mine:.3g}, and ours is 0"
    where = f"N = {job.N / 1e9:.3g}·10⁹, s = {job.s:,}, batch {job.batch}, g = {job.g}, under {cut!r}"
    return f"`{term}` is {times} where {where}. It is off in {many} of {len(run.values)} cases."


def _addend(attempt: Callable) -> str:
    """A sentence on the addend of memory that is off: activations grow with b, states with N, the rest with
    neither.
    """
    memory = lambda of, case: _by_the_course(of, *case)[-1]
    job, cut = max(_cases(), key=lambda case: _differ(memory(attempt, case), memory(cost, case)))
    grown = {"activations": (job, cut._replace(b=2 * cut.b)), "states": (job._replace(N=2 * job.N), cut)}
    for name, more in grown.items():
        mine, ours = (memory(of, more) - memory(of, (job, cut)) for of in (attempt, cost))
        if _differ(mine, ours) > NEAR:
            return f"It is your {name} that are off: where they double, you add {mine / ours:.2f} times ours."
    return "States and activations are right, the rest is not."


def _by_the_course(attempt: Callable, job: Given, cut: Cut):
    with lines.by_the_course():
        return attempt(job, cut)


class _TermByTerm(Asked):
    """An exercise on a Cost. The first term that differs is judged, as if the others were right."""

    def judged(self, mine: Run, does: Callable[[str], Run]) -> Answer | None:
        """The answer to the first term that differs; None if each is within a tenth of the solution's in
        every case.
        """
        if mine.error:
            return super().judged(mine, does)
        truth = does("")
        if wrong_form := self._form(mine, truth):
            return wrong_form
        for term in Cost._fields:
            if _farthest(mine, truth, term)[0] > NEAR:
                answer = super().judged(_only(mine, term), lambda edit: _only(does(edit), term))
                where = _text_on(term, mine, truth)
                if self.advice(answer.misconception):
                    answer.text = f"{where} {answer.text}"
                else:
                    answer.misconception, answer.text = f"your line for {term}", where
                return answer
        return None

    def _where(self, mine: Run, truth: Run, parts: str) -> str:
        return ""  # `judged` writes this text

    def verdict(self, attempt: Callable) -> Answer:
        """As for other exercises, and a right attempt is written into a file for drop 14. The lines that it
        calls are the course's.
        """
        answer = super().verdict(attempt if attempt is self.reference else partial(_by_the_course, attempt))
        if answer.misconception == f"your line for {Cost._fields[-1]}":
            answer.text += f" {_addend(attempt)}"
        if answer.kind == "right" and attempt is not self.reference:
            answer.text += f" {lines.keep(attempt, 'cost', 'Drop 13. The Cost of a step.')}"
        return answer


def _as_near(run: Run) -> Answer:
    """Praise, with the terms that differ from the solution's, though near enough, and the distance from the
    planner.
    """
    truth, rows, values = written._does(_cases())(""), [], iter(run.values)
    for held, planned in _planned().items():
        in_order, error = _agreement([next(values).seconds for _ in planned], planned)
        near = f"{in_order:.0%} of the pairs in its order, seconds {error:.0%} apart on average"
        rows.append((f"{held.model} against the planner", near, ""))
    near = [term for term in Cost._fields if _farthest(run, truth, term)[0] > 1e-6]
    for term in near:
        rows.append((f"`{term}` differs from ours", f"by up to {_farthest(run, truth, term)[0]:.1%}", ""))
    text = "All six lines are right." if not near else "Near enough: every line is within a tenth of ours."
    return right(text, *rows)


# -- how the reader's function reaches drop 14


def _off(function: Callable) -> str:
    """'' if a function of (job, cut) is near enough to the solution in all cases, else a sentence."""
    cases = _cases()
    try:
        values = [Cost(*map(number, function(*case))) for case in cases]
    except Exception as e:  # whatever the reader's function raises
        return f"it ends with {type(e).__name__}: {e}"
    run, truth = (Run(cases, [{"values": of}]) for of in (values, [cost(*case) for case in cases]))
    off = (term for term in Cost._fields if _farthest(run, truth, term)[0] > NEAR)
    return next((_text_on(term, run, truth) for term in off), "")


lines.JUDGES["cost"] = _off


@dataclass
class Lines:
    """A cost model: (job, cut) -> Cost. whose: 'your lines' or 'our lines'. where: a text on their source."""

    function: Callable
    whose: str
    where: str

    def __call__(self, job: Given, cut: Cut) -> Cost:
        return Cost(*self.function(job, cut))

    def __repr__(self) -> str:
        return f"{self.whose}, {self.where}"


def your_lines() -> Lines:
    """The reader's `cost` where the check of drop 13 kept it; the solution if there is none, or if it is not
    right any more.
    """
    kept = lines.kept()
    if mine := kept.right.get("cost"):
        ours = [name for name in LINES if name in names_in(mine) and name not in kept.right]
        but = f"; {', '.join(ours)}: the course's, because yours is missing or not right" if ours else ""
        return Lines(mine, "your lines", f"the last of them{kept.where}{but}")
    if why := kept.broken.get("cost"):
        return Lines(cost, "our lines", f"because of your `cost`{kept.where}: {why}")
    return Lines(cost, "our lines", "because the practice of drop 13 is not passed here")


written = _TermByTerm(
    "a cost model of your own",
    cost,
    minutes=15,
    hints=[
        "Begin with T = b·s tokens in a microbatch, m = batch/(d·b) microbatches, N/(t·p) parameters and L/p"
        " layers on a rank. Then write one row of the table after the other, and return a Cost early: the"
        " check judges the first field that is wrong.",
        "share = bubble(m, cut.p, cut.v) is a share of the step, `idle` are seconds: (work + tp) · share /"
        " (1 − share).",
        "bandwidth(t, 1, …) for TP, bandwidth(d, t, …) for DP. (work + tp)/m hides DP, but work + tp under"
        " ZeRO-2 and ZeRO-3.",
    ],
    cases=_cases,
    reads=_cost,
    tolerance=1e-6,
    praise=_as_near,
)


# -- practice: four quick cases -------------------------------------------------------------------

GPU = 80  # GB
ANSWERS = ("DP alone", "TP in the node", "TP in the node, PP across, DP on top", "FSDP")
REASONS = (
    "too large for a node",
    "the model's code stays as it is, and all ranks share its states",
    "the states fit one GPU with room to spare",
    "too large for a GPU, and links inside the node are fast",
)
# Case -> ({right answer: its right reasons}, why, (parameters, d, t, p, ZeRO stage): a layout whose states
# fit a GPU of 80 GB and leave room).
QUICK = {
    "1B on 8 GPUs with NVLink": (
        {0: (2,)},
        "16 bytes a parameter are 16 GB: nothing needs cutting, and DP sends least.",
        (1e9, 8, 1, 1, 0),
    ),
    "30B on 8 GPUs with NVLink": (
        {1: (3,), 3: (1,)},
        "480 GB of states do not fit a GPU; in one node TP's all-reduces run over NVLink. (FSDP is a fair"
        " alternative.)",
        (30e9, 1, 8, 1, 0),
    ),
    "200B on 64 GPUs in 8 nodes": (
        {2: (0,)},
        "3,200 GB of states do not fit a node. All 64 GPUs would hold them, 50 GB each, but then every weight"
        " crosses nodes and every layer is recomputed: for 175B on 64 the planner finds that an eighth"
        " slower. TP fills the node, PP goes across, DP takes what is left.",
        (200e9, 2, 8, 4, 1),
    ),
    "13B on 16 GPUs in 2 nodes, for a team that will not change its model": (
        {3: (1,)},
        "208 GB over 16 GPUs are 13 GB each with FSDP, and it wraps the model as it is.",
        (13e9, 16, 1, 1, 3),
    ),
}


def quick(case):
    """(answer, reason) for a case: one of d13.ANSWERS and one of d13.REASONS."""
    from drops.d13 import ANSWERS, REASONS

    gpu, node = 80, 8 * 80
    states = 16 * int(case.partition("B")[0])  # GB, at 16 bytes a parameter
    if "will not change" in case:
        return ANSWERS[3], REASONS[1]  # TP and PP cut the model's own code
    if states < gpu / 2:
        return ANSWERS[0], REASONS[2]
    if states < node:
        return ANSWERS[1], REASONS[3]
    return ANSWERS[2], REASONS[0]


def _indices(reply) -> tuple[int, int]:
    answer, reason = reply[:]  # a set has no order, and no slices
    if answer in REASONS and reason in ANSWERS:
        raise WrongForm("The answer comes first, and then its reason; you return them the other way round")
    return ANSWERS.index(answer.strip()), REASONS.index(reason.strip())


def _first_unfit(run: Run, _) -> tuple[str, str] | None:
    for (case, (fits, _, (params, *_))), (answer, reason) in zip(QUICK.items(), run.values):
        if answer not in fits:
            text = f"{case}: not {ANSWERS[answer]!r}. Its states are {16 * params / 1e9:,.0f} GB."
            return _unfit(case, answer, 16 * params / 1e9), text
        if reason not in fits[answer]:
            text = f"{case}: {ANSWERS[answer]!r} is right, but not because {REASONS[reason]}."
            return "right for another reason", text
    return None


def _unfit(case: str, answer: int, states: float) -> str:
    """The name of the mistake in an answer to a case. states: GB."""
    if states < GPU / 2:
        return "more than needed"
    if ANSWERS[answer] == "DP alone":
        return "states that do not fit a GPU"
    if "will not change" in case:
        return "a change of the model's code"
    if ANSWERS[answer] == "TP in the node":
        return "states that do not fit a node"
    return "every weight across nodes" if ANSWERS[answer] == "FSDP" else "more nodes than there are"


def _as_sizes(run: Run) -> Answer:
    """Praise, with a layout d·t·p for each case and the bytes of states on a GPU."""
    lines = []
    for case, (_, why, (params, d, t, p, zero)) in QUICK.items():
        size = sum(by_hand.states_bytes(params, d, t, p, zero))
        lines.append((case, f"{d}·{t}·{p}, {human(size)} of states a GPU. {why}", ""))
    return right(
        "Four cases, and four reasons that would stand in a meeting. As sizes d·t·p, whose product is the"
        " number of GPUs:",
        *lines,
    )


cases = Asked(
    "four quick cases",
    quick,
    minutes=3,
    hints=[
        "Begin with 16 bytes a parameter, and compare with a GPU of 80 GB, then with a node of eight.",
        "1B: 16 GB. 30B: 480 GB. 200B: 3,200 GB. 13B: 208 GB.",
        "Then what the team wants. FSDP wraps a model as it is; TP and PP change its code.",
    ],
    cases=[(case,) for case in QUICK],
    reads=_indices,
    compares=False,
    praise=_as_sizes,
    finds=_first_unfit,
)
