"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and a 4-layer model trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from drops import d13
from drops.d13 import Cut, Given
from helpers.practice import Answer, Asked, Run, WrongForm, number, right
from three_axes.plan import CLUSTERS, FRAMEWORKS, Cluster, Job, Layout, ModelShape, find_model

# -- practice: defend another job -----------------------------------------------------------------


class Defended(NamedTuple):
    """A defence of the layout `cut`. seconds: of a step. memory: bytes. bubble: a share of the step. crosses:
    the axes, of 'tp', 'dp' and 'pp', that cross nodes. The others: the fastest layout with half the network,
    with a quarter of the batch, with TP 16, and of FSDP alone; None where none fits.
    """

    cut: Cut
    seconds: float
    memory: float
    bubble: float
    crosses: set
    half_network: Cut | None
    quarter_batch: Cut | None
    tp16: Cut | None
    fsdp: Cut | None


def defence(cost, job, cuts, room):
    """The Defended of `job`: the fastest of `cuts`, by `cost`, that fits `room` bytes."""

    def best(job, cuts):
        whole = [cut for cut in cuts if job.batch % (cut.d * cut.b) == 0]
        fits = [cut for cut in whole if cost(job, cut).memory <= room]
        return min(fits, key=lambda cut: cost(job, cut).seconds, default=None)

    mine = best(job, cuts)
    made = cost(job, mine)
    m = job.batch / (mine.d * mine.b)
    reach = {"tp": (mine.t, 1), "dp": (mine.d, mine.t), "pp": (mine.p, mine.t * mine.d)}
    return Defended(
        cut=mine,
        seconds=made.seconds,
        memory=made.memory,
        bubble=(mine.p - 1) / (m * mine.v + mine.p - 1),
        crosses={axis for axis, (ranks, stride) in reach.items() if ranks > 1 and ranks * stride > job.node},
        half_network=best(job._replace(R=job.R / 2), cuts),
        quarter_batch=best(job._replace(batch=job.batch // 4), cuts),
        tp16=best(job, [cut for cut in cuts if cut.t == 16]),
        fsdp=best(job, [cut for cut in cuts if cut.zero == 3]),
    )


KEPT = 0.1  # share of a GPU's memory: a layout that leaves less of it free is called tight
_34B = ModelShape("34B", 48, 8192, 64, 32000, kv_heads=8, ffn=22016, gated=True)


@cache
def case(
    model: ModelShape,
    gpus: int,
    batch: int,
    seq_len: int,
    cluster: Cluster = CLUSTERS["dgx-h100"],
    sizes_of_b: tuple[int, ...] = (1, 2, 4),
    ends: bool = False,
) -> tuple[Given, list[Cut], float]:
    """(job, cuts, room): the arguments of `defence` for a model on a cluster. The layouts are all that divide
    the model, the GPUs and the batch, with and without recompute: under ZeRO-1, or under FSDP where there is
    data parallelism alone. sizes_of_b: the sizes of a microbatch. ends: under both there; also stages that
    divide the layers with the embedding and the output layer counted; and no stages so small that the output
    layer is more than a fifth of one, because the lines share it out over all stages.
    """
    given, _ = d13.as_written(Job(model, cluster, batch, seq_len, FRAMEWORKS["megatron-lm"]), Layout())
    divides = lambda stages: any(layers % stages == 0 for layers in (model.layers, model.layers + 2 * ends))
    output = model.vocab * model.hidden
    layers = given.N - output * (1 if model.tied else 2)
    even = lambda stages: stages == 1 or not ends or output <= 0.2 * layers / stages
    cuts = []
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for t in (t for t in sizes if model.heads % t == 0):
        for p in (p for p in sizes if gpus % (t * p) == 0 and divides(p) and even(p)):
            d = gpus // (t * p)
            chunks = [v for v in range(1, 9) if divides(p * v) and (p > 1 or v == 1)]
            for b in (b for b in sizes_of_b if batch % (d * b) == 0):
                m = batch // (d * b)
                zeros = (1,) if t * p > 1 else (1, 3) if ends else (3,)
                cuts += [
                    Cut(d, t, p, b, v, zero, again)
                    for zero in zeros
                    for v in chunks
                    if v == 1 or m % p == 0  # interleaved 1F1B goes round all stages with p microbatches
                    for again in (0, 1)
                ]
    return given, cuts, (1 - KEPT) * cluster.device.memory


def OTHER() -> tuple[Given, list[Cut], float]:
    """34B parameters (48 layers of 8,192) on 96 H100s, 384 sequences of 4,096 tokens: (job, cuts, room)."""
    return case(_34B, 96, 384, 4096)


_JOBS = {
    "34B on 96 GPUs": OTHER,
    "a job that you have not seen": partial(case, find_model("llama-2-13b"), 16, 64, 4096),
    "another that you have not seen": partial(case, find_model("opt-30b"), 128, 128, 2048),
    "a third that you have not seen": partial(case, find_model("llama-3-70b"), 32, 128, 8192),
    "a fourth that you have not seen": partial(
        case, find_model("opt-30b"), 128, 128, 2048, sizes_of_b=(2, 4)
    ),
}
QUESTIONS = {
    "cut": "which layout",
    "seconds": "how long a step takes",
    "memory": "what the fullest GPU holds",
    "bubble": "how large the bubble is",
    "crosses": "which axes cross nodes",
    "half_network": "which layout with half the network",
    "quarter_batch": "which layout with a quarter of the batch",
    "tp16": "which layout with TP 16",
    "fsdp": "which layout of FSDP alone",
}


def _cases() -> list[tuple]:
    return [(d13.cost, *job()) for job in _JOBS.values()]


def _defended(value) -> Defended:
    """What a reader returned, as a Defended. Raises WrongForm if it cannot be one."""
    if not isinstance(value, tuple) or len(value) != len(Defended._fields):
        raise WrongForm("You return something else than a Defended, with its nine fields")
    theirs = Defended(*value)
    cuts = {name: getattr(theirs, name) for name in ("cut", "half_network", "quarter_batch", "tp16", "fsdp")}
    for name, cut in cuts.items():
        if not (isinstance(cut, tuple) and len(cut) == len(Cut._fields) or cut is None and name != "cut"):
            raise WrongForm(f"{name} is {str(cut)[:60]}, and it is a Cut, one of `cuts`")
    axes = theirs.crosses
    if isinstance(axes, (str, dict)) and axes != {} or not set(axes) <= {"tp", "dp", "pp"}:
        raise WrongForm(f"crosses is {axes!r}, and it is a set of 'tp', 'dp' and 'pp', such as {{'dp'}}")
    numbers = {name: number(getattr(theirs, name)) for name in ("seconds", "memory", "bubble")}
    cuts = {name: cut and Cut(*cut) for name, cut in cuts.items()}
    return theirs._replace(crosses=frozenset(axes), **numbers, **cuts)


def _only(run: Run, field: str) -> Run:
    """A run in which each defence keeps this one field, and the others are 0."""
    nothing = Defended(*[0] * len(Defended._fields))
    values = [nothing._replace(**{field: getattr(value, field)}) for value in run.values]
    return Run(run.tried, [run.ranks[0] | {"values": values}])


class _OneByOne(Asked):
    """An exercise on a Defended. The first field that differs is judged, as if the others were right."""

    def judged(self, mine: Run, does: Callable[[str], Run]) -> Answer | None:
        """The answer to the first field that differs; None if all fields are the solution's."""
        if mine.error:
            return super().judged(mine, does)
        truth = does("")
        if wrong_form := self._form(mine, truth):
            return wrong_form
        for field, question in QUESTIONS.items():
            one, ours = _only(mine, field), _only(truth, field)
            if one.differs_in(ours, self.alike):
                answer = self._named(one, lambda edit: _only(does(edit), field))
                where = self._at(field, mine, truth)
                if self.advice(answer.misconception):
                    answer.text = f"{where} {answer.text}"
                else:
                    answer.misconception, answer.text = f"another answer: {question}", where
                return answer
        return None

    def _named(self, one: Run, does: Callable[[str], Run]) -> Answer:
        reads, self.reads = self.reads, lambda value: value
        try:
            return super().judged(one, does)
        finally:
            self.reads = reads

    def _where(self, mine: Run, truth: Run, parts: str) -> str:
        return ""  # `judged` writes this text

    def _at(self, field: str, mine: Run, truth: Run) -> str:
        """A sentence on the first job in which a field is wrong, and on the reader's answer."""
        pairs = enumerate(zip(mine.values, truth.values))
        of = lambda value: getattr(value, field)
        case = next(i for i, (a, b) in pairs if not self.alike(of(a), of(b)))
        job, got = list(_JOBS)[case], getattr(mine.values[case], field)
        if field == "crosses":
            shown = ", ".join(sorted(got)) or "none"
        else:
            shown = f"{got:.4g}" if isinstance(got, float) else f"{got}"
        return f"For {job}, {QUESTIONS[field]}: you answer {shown}."


def _page(run: Run) -> Answer:
    """Praise: the defence of the other job, by our lines and by the reader's, if the reader has any."""
    job, cuts, room = OTHER()
    made = run.values[0]
    slower = lambda cut: (
        f"{cut}: {d13.cost(job, cut).seconds / made.seconds - 1:+.0%}" if cut else "none can be"
    )
    rows = [
        ("34B on 96 H100s", f"{made.cut}: {made.seconds:.1f} s, {made.memory / 1e9:.0f} GB", ""),
        ("between nodes", ", ".join(sorted(made.crosses)) or "nothing", ""),
        ("bubble", f"{made.bubble:.1%}", ""),
        ("why not TP 16", slower(made.tp16), ""),
        ("why not FSDP", slower(made.fsdp), ""),
        ("half the network", f"{made.half_network}", ""),
        ("a quarter of the batch", f"{made.quarter_batch}", ""),
    ]
    own = d13.your_lines()
    if own.function is not d13.cost:
        mine = defence(own, job, cuts, room)
        rows.append(("by your own lines", f"{mine.cut}: {mine.seconds:.1f} s", ""))
    return right("A defence of any job, from a cost model that you wrote. For this one it says:", *rows)


defend = _OneByOne(
    "defend another job",
    defence,
    minutes=10,
    hints=[
        "Write a function best(job, cuts) first: of the cuts whose d·b divides the batch and that fit the"
        " room, the one with least cost(job, cut).seconds. Five of the nine answers are calls of it.",
        "job._replace(R=job.R / 2) is the job with half the network. A quarter of the batch leaves fewer cuts"
        " that divide it. TP 16: best(job, [cut for cut in cuts if cut.t == 16]).",
        "The bubble is (p − 1)/(m·v + p − 1) with m = batch/(d·b). An axis crosses nodes when it has more"
        " than one rank and ranks · stride > job.node; strides are 1 for tp, t for dp, t·d for pp.",
    ],
    cases=_cases,
    reads=_defended,
    tolerance=1e-6,
    praise=_page,
)
