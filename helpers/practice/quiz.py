"""Ten questions about the course, in two versions with different numbers: before the course, and after it.

Every answer is computed. After the course the comment on a wrong answer says why it is wrong, and names the
drop and section to read again. Before the course no answer gets such a comment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from three_axes.paper import SCHEDULES, Placement, by_hand, crosses, simulate
from three_axes.table import human

from ..live import live, question
from . import passed


@dataclass(frozen=True)
class Question:
    """A question with its answers. options: answer -> '' for the right one, for others why they are wrong.
    where: (drop, heading) that teaches it.
    """

    text: str
    options: dict[str, str]
    where: tuple[str, str]

    @property
    def right(self) -> str:
        """The right option."""
        return next(option for option, why in self.options.items() if not why)

    def judge(self, option: str) -> str:
        """The comment on an answer. Raises ValueError for an answer that is not offered."""
        if option not in self.options:
            raise ValueError(
                f"{option!r} is not an answer; choose one of {', '.join(map(repr, self.options))}"
            )
        drop, heading = self.where
        why = self.options[option]
        return f"No: {why} Read again: drop {drop}, {heading!r}." if why else "Right."


def _sorted(right: float, wrong: dict[float, str], show: Callable[[float], str]) -> dict[str, str]:
    """The options, from the smallest number to the largest. wrong: number -> why it is wrong."""
    return {show(number): why for number, why in sorted([(right, ""), *wrong.items()])}


def all_reduce(n: int, mb: int) -> Question:
    """Answer: 2·(n − 1)/n · mb, in MB."""
    wrong = {
        mb: "a rank also passes on what others sent.",
        mb * (n - 1) / n: "that is the first half, the reduce-scatter. The finished chunks still go round.",
        mb
        * (n - 1): "that is the whole tensor to each other rank. In a ring chunks are summed on their way.",
    }
    return Question(
        f"{n} ranks all-reduce a tensor of {mb} MB in a ring. How much does each rank send?",
        _sorted(by_hand.all_reduce_bytes(mb, n), wrong, "{:g} MB".format),
        ("02", "Inside the all-reduce"),
    )


def tensor_parallel(layers: int) -> Question:
    """Answer: four a layer."""
    wrong = {
        layers: "attention and MLP have one each, and backward has as many as forward.",
        2 * layers: "that is forward alone.",
        8 * layers: "a column cut and the row cut behind it need one for both, in each direction.",
    }
    return Question(
        f"{layers} layers, tensor parallelism. How many all-reduces of activations has a step, forward and"
        " backward, with one microbatch?",
        _sorted(2 * 2 * layers, wrong, str),
        ("06", "Four all-reduces a layer"),
    )


def boundary(b: int, s: int, h: int) -> Question:
    """Answer: 2·b·s·h bytes."""
    wrong = {
        2 * s * h: "that is one sequence of the batch.",
        2 * h * h: "that is a matrix of weights. Weights stay on their stage.",
        4 * b * s * h: "that is forward and backward together.",
    }
    return Question(
        f"{b} sequences of {s:,} tokens, hidden size {h:,}, 2 bytes a number. How many bytes cross one"
        " boundary of a pipeline in forward?",
        _sorted(2 * b * s * h, wrong, human),
        ("04", "One step, by hand"),
    )


def bubble(p: int, m: int) -> Question:
    """Answer: (p − 1)/(m + p − 1)."""
    wrong = {
        (p - 1) / m: "that is idle time over busy time. The bubble is a share of wall time.",
        p / (m + p): "the last stage starts p − 1 forwards late, not p.",
        (p - 1) / p: "that is one batch, not cut.",
    }
    return Question(
        f"{p} equal stages, {m} microbatches, 1F1B. What share of wall time is a stage idle?",
        _sorted(by_hand.bubble(p, m), wrong, lambda x: f"{x:.0%}"),
        ("07", "Two orders"),
    )


def in_flight(p: int, m: int, rank: int) -> Question:
    """Answer: min(m, p − rank), from a simulation."""
    wrong = {
        m: "that is GPipe. Under 1F1B backwards begin long before the last forward.",
        p: "that is rank 0. Each later rank waits one forward less for its first backward.",
        1: "that is the last rank. Others run more forwards before their first backward.",
    }
    return Question(
        f"{p} stages, {m} microbatches, 1F1B. How many microbatches does rank {rank} hold for backward, at"
        " most?",
        _sorted(simulate(SCHEDULES["1F1B"].make(p, m)).in_flight(rank), wrong, str),
        ("07", "Two orders"),
    )


def leaving(pp: int, dp: int, tp: int) -> Question:
    """Answer: the axes for which rank 0's group crosses nodes of 8."""
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    far = {axis for axis in sizes if crosses(Placement(sizes).group(0, axis), 8)}
    why = f"a tp group spans {tp} ranks, a dp group {dp * tp}, a pp group {pp * dp * tp}; a node has 8."
    sets = {"none": set(), "pp": {"pp"}, "dp and pp": {"dp", "pp"}, "all three": {"pp", "dp", "tp"}}
    return Question(
        f"TP {tp} innermost, then DP {dp}, PP {pp} outermost, nodes of 8 GPUs. Whose groups leave a node?",
        {name: "" if axes == far else why for name, axes in sets.items()},
        ("08", "When it hurts"),
    )


def zero_1(billions: int, d: int) -> Question:
    """Answer: 4·n + 12·n/d bytes, for n parameters."""
    n = billions * 1e9
    wrong = {
        16 * n: "that is plain data parallelism.",
        2 * n + 14 * n / d: "that is ZeRO-2, which divides gradients too.",
        16 * n / d: "that is ZeRO-3. ZeRO-1 divides the optimizer's 12 bytes only.",
    }
    return Question(
        f"{billions}·10⁹ parameters, mixed precision with Adam, ZeRO-1 on {d} ranks. States on a rank?",
        _sorted(sum(by_hand.states_bytes(n, d, zero=1)), wrong, human),
        ("09", "Why keep them four times?"),
    )


def accumulation(m: int) -> Question:
    """Answer: 3·m/2 times. A microbatch sends three halves of an all-reduce, and DP two a step."""
    wrong = {
        1.5: "that is one microbatch.",
        m: "a microbatch has three halves of an all-reduce, and DP two in the whole step.",
        3 * m: "DP sends two halves of an all-reduce, not one.",
    }
    return Question(
        f"ZeRO-3 in place of data parallelism, {m} microbatches in a step. How many times as many bytes?",
        _sorted(3 * m / 2, wrong, "{:g}".format),
        ("09", "What it costs to send"),
    )


def half_the_microbatch(held: int, activations: int) -> Question:
    """Answer: held + activations/2, in GB."""
    wrong = {
        (held + activations) / 2: "states do not depend on the batch.",
        held / 2 + activations: "states stay. Activations are of one microbatch.",
        held + activations: "only one microbatch is held at a time.",
    }
    return Question(
        f"A GPU holds {held} GB of states and {activations} GB of activations. You halve its microbatch, and"
        " run twice as many, one after another. What does it hold?",
        _sorted(held + activations / 2, wrong, "{:g} GB".format),
        ("10", "The same crash, and what lets it through"),
    )


def tie(first: float, second: float) -> Question:
    """first, second: seconds. Answer: measure both if they are less than 10 % apart, else take the first."""
    apart = second / first - 1
    why = f"they are {apart:.0%} apart, and a tie is up to 10 %."
    options = ("take the faster", "measure both, or take the simpler", "buy a faster network first")
    right = options[apart < 0.1]
    return Question(
        f"The planner says {first:g} s a step for one layout and {second:g} s for another. What do you do?",
        {option: "" if option == right else why for option in options},
        ("13", "What is left"),
    )


# Question -> its numbers before the course, and after it.
QUESTIONS = {
    all_reduce: ((4, 400), (8, 160)),
    tensor_parallel: ((24,), (40,)),
    boundary: ((8, 2048, 4096), (4, 4096, 8192)),
    bubble: ((4, 8), (8, 16)),
    in_flight: ((8, 32, 2), (4, 16, 1)),
    leaving: ((4, 2, 4), (2, 4, 8)),
    zero_1: ((8, 4), (20, 16)),
    accumulation: ((8,), (4,)),
    half_the_microbatch: ((30, 40), (24, 48)),
    tie: ((10.0, 10.4), (8.0, 10.0)),
}
NAMES = [ask.__name__.replace("_", " ") for ask in QUESTIONS]
STORIES = ("before", "after")
_displayed: dict[str, Quiz] = {}  # story -> the first quiz that this kernel has displayed


class Quiz:
    """The ten questions: with buttons if a kernel runs, with folded answers if none does.

    story: 'before' or 'after' the course. When all questions are answered, the progress file keeps which
    first answers were right. Raises ValueError for another story.
    """

    def __init__(self, story: str = "after"):
        if story not in STORIES:
            raise ValueError(f"story={story!r}: choose 'before' or 'after'")
        self.story = story
        self.questions = [ask(*numbers[STORIES.index(story)]) for ask, numbers in QUESTIONS.items()]
        self.first: dict[int, bool] = {}  # question -> whether the first answer to it was right
        self.chosen: dict[int, str] = {}  # question -> the last answer to it

    def answer(self, number: int, option: str) -> str:
        """Answer question 1, 2, …; returns the comment. Raises ValueError for another answer."""
        sentence = self._verdict(number, option)
        self.chosen[number - 1] = option
        self.first.setdefault(number - 1, option == self.questions[number - 1].right)
        if len(self.first) == len(self.questions):
            with passed.changing() as done:
                done.quiz.setdefault(self.story, [self.first[i] for i in range(len(self.questions))])
            sentence += f" {sum(self.first.values())} of {len(self.questions)} right at the first try."
        return sentence

    def _verdict(self, number: int, option: str) -> str:
        verdict = self.questions[number - 1].judge(option)
        return verdict if self.story == "after" else "Noted."

    def __repr__(self) -> str:
        return "\n".join(
            f"{i}. {q.text}\n" + "\n".join(f"   ○ {o}" for o in q.options)
            for i, q in enumerate(self.questions, 1)
        )

    def _repr_mimebundle_(self, **_):
        import ipywidgets as widgets

        kept = _displayed.setdefault(self.story, self)  # if its cell runs again, the quiz keeps its answers
        self.first, self.chosen = kept.first, kept.chosen
        rows = []
        for i, asked in enumerate(self.questions, 1):
            chosen = self.chosen.get(i - 1)
            line = widgets.HTML(escape(self._verdict(i, chosen)) if chosen else "")

            def answered(option: str, i=i, line=line) -> None:
                line.value = escape(self.answer(i, option))

            rows += [*question(f"{i}. {asked.text}", asked.options, chosen, answered), line]
        box = widgets.VBox(rows)
        folded = "".join(
            f"<details><summary>{i}. {escape(q.text)}"
            f" ({escape(' · '.join(q.options))})</summary>{escape(q.right)}: drop {q.where[0]},"
            f" {escape(q.where[1])}</details>"
            for i, q in enumerate(self.questions, 1)
        )
        return {"text/plain": repr(self), "text/html": folded, **live(box)}
