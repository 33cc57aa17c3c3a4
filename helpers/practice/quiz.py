"""Seven questions across the course. A wrong answer says why, and which part of which drop to read again."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ..live import live, question


@dataclass(frozen=True)
class Question:
    """options: answer -> '' for the right one, else why it is not. where: (drop, heading) that shows it."""

    text: str
    options: dict[str, str]
    where: tuple[str, str]

    @property
    def right(self) -> str:
        return next(option for option, why in self.options.items() if not why)

    def judge(self, option: str) -> str:
        """What to say to an answer. Raises ValueError for one that is not offered."""
        if option not in self.options:
            raise ValueError(
                f"{option!r} is not an answer; choose one of {', '.join(map(repr, self.options))}"
            )
        drop, heading = self.where
        why = self.options[option]
        return f"No: {why} Read again: drop {drop}, {heading!r}." if why else "Right."


QUESTIONS = (
    Question(
        "A rank sends 1.5 times its gradients once a step, and nothing else. Four ranks. What runs?",
        {
            "data parallelism": "",
            "tensor parallelism": "that would send in every layer, and activations.",
            "a pipeline": "that would send to a neighbour only, once for each microbatch.",
        },
        ("01", "What moved"),
    ),
    Question(
        "The output of a split MLP is right, the gradient of its input is wrong on every rank. What is"
        " missing?",
        {
            "an all-reduce forward": "then the output would be wrong.",
            "an all-reduce backward": "",
            "a larger batch": "the batch is the same on all ranks and has nothing to do with it.",
        },
        ("03", "Backward"),
    ),
    Question(
        "GPipe becomes 1F1B, with the same p and m. What falls?",
        {
            "the bubble": "it is (p−1)/(m+p−1) for both.",
            "the microbatches held": "",
            "both": "the bubble stays; only what is held falls.",
        },
        ("07", "1F1B: one forward, one backward"),
    ),
    Question(
        "Eight GPUs to a node, d·t·p = 4·8·2. Which groups leave the node?",
        {
            "all three": "TP has stride 1 and size 8: it fills a node and stays inside.",
            "dp and pp": "",
            "only dp": "pp has stride 8: the next stage is on the next node.",
        },
        ("08", "Who goes where"),
    ),
    Question(
        "N parameters, mixed precision with Adam, ZeRO-1 on d ranks, no TP or PP. Bytes on a rank?",
        {
            "16N/d": "that is ZeRO-3; ZeRO-1 divides the optimizer's 12 only.",
            "4N + 12N/d": "",
            "2N + 14N/d": "that is ZeRO-2, which divides gradients too.",
        },
        ("09", "Sixteen bytes a parameter"),
    ),
    Question(
        "All ranks run out of memory in one step, and its sequences were longer. The cheapest remedy?",
        {
            "more data parallelism": "each rank keeps its share of a batch, and the whole model.",
            "ZeRO-3": "it cuts states; here the activations rose.",
            "a smaller microbatch": "",
        },
        ("10", "A ladder of remedies"),
    ),
    Question(
        "Two layouts differ by 1 % in the plan. What do you do?",
        {
            "take the first": "the planner errs by more than that.",
            "measure both, or take the simpler one": "",
            "buy a faster network": "perhaps neither waits for it; ask which axis waits first.",
        },
        ("13", "How far to trust it"),
    ),
)


class Quiz:
    """Questions with buttons where a kernel runs, with folded answers where none does.

    `score` counts what was right at the first try.
    """

    def __init__(self, questions: tuple[Question, ...] = QUESTIONS):
        self.questions = questions
        self.first: dict[int, str] = {}  # question -> the first answer given to it

    @property
    def score(self) -> int:
        return sum(self.questions[i].right == answer for i, answer in self.first.items())

    def answer(self, number: int, option: str) -> str:
        """Answer question 1, 2, …; what there is to say to it."""
        verdict = self.questions[number - 1].judge(option)
        self.first.setdefault(number - 1, option)
        if len(self.first) == len(self.questions):
            verdict += f" {self.score} of {len(self.questions)} right at the first try."
        return verdict

    def __repr__(self) -> str:
        return "\n".join(
            f"{i}. {q.text}\n" + "\n".join(f"   ○ {o}" for o in q.options)
            for i, q in enumerate(self.questions, 1)
        )

    def _repr_mimebundle_(self, **_):
        import ipywidgets as widgets

        rows = []
        for i, asked in enumerate(self.questions, 1):
            line = widgets.HTML()

            def answered(option: str, i=i, line=line) -> None:
                line.value = escape(self.answer(i, option))

            rows += [*question(f"{i}. {asked.text}", asked.options, None, answered), line]
        box = widgets.VBox(rows)
        folded = "".join(
            f"<details><summary>{i}. {escape(q.text)}"
            f" ({escape(' · '.join(q.options))})</summary>{escape(q.right)}: drop {q.where[0]},"
            f" {escape(q.where[1])}</details>"
            for i, q in enumerate(self.questions, 1)
        )
        return {"text/plain": repr(self), "text/html": folded, **live(box)}
