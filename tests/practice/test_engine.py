"""The engine that checks exercises, tried on small exercises: what it reads, runs, compares and answers."""

from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from drops import b3
from helpers import toy
from helpers.practice.engine import UNNAMED, Asked, OnRanks, edited, mistakes_of, wasteful
from helpers.practice.exercise import Answer, wrong
from helpers.practice.runs import Run, alike, first, needs_more, number
from helpers.practice.seen import describe_numbers, describe_tries
from helpers.ranks.failure import RankError, RankStatus

pytestmark = pytest.mark.usefixtures("judges_share_worlds")

inf, nan = float("inf"), float("nan")


# -- reading and comparing -------------------------------------------------------------------------


def double(x):
    """Twice x."""
    twice = x + x
    return twice


def test_a_diff_changes_whole_lines_in_their_order():
    assert edited(double, "-    twice = x + x\n+    twice = 3 * x\n")(2) == 6
    assert edited(double, "-    twice = x + x\n-    return twice\n+    return 7\n")(2) == 7
    both = "-    twice = x + x\n+    twice = x + x\n+    twice += 1\n-    return twice\n+    return -twice\n"
    assert edited(double, both)(2) == -5
    in_another_order = "-    return twice\n+    pass\n-    twice = x + x\n"
    for unknown in ("-    twice = 3 * x\n", in_another_order, "+    pass\n"):
        with pytest.raises(ValueError, match="double has no lines .* exactly as in the source"):
            edited(double, unknown)
    with pytest.raises(ValueError, match="double: 'x => y' is no diff"):
        edited(double, "x => y")


def test_a_proof_is_a_diff_or_an_error():
    with pytest.raises(ValueError, match="'a' has a proof .'costs'.; a proof is a diff or an error"):
        mistakes_of("# e\n\n## a\n\nB.\n\n- costs: `bytes`\n", "e")


@pytest.mark.parametrize(
    "a, b, same",
    [
        (1.0, 1.0 + 1e-9, True),
        (1.0, 1.0 + 1.2e-7, False),
        (True, 1.0, True),
        ("1", 1.0, False),
        (inf, inf, True),
        ([1.0, 2.0], (1.0, 2.0), True),
        ({"a": 1.0}, {"a": 1.0}, True),
        ({"a": 1.0}, {"a": 2.0}, False),
        ([1.0], 1.0, False),
        (None, None, True),
        (torch.ones(2), [1.0, 1.0], False),
        (torch.ones(2), torch.ones(3), False),
        (torch.tensor([1e6, 0.0]), torch.tensor([1e6, 10.0]), True),  # 1e-5 of the largest
        (torch.tensor([1e6, 0.0]), torch.tensor([1e6, 1e3]), False),
        (torch.tensor([nan, inf]), torch.tensor([nan, inf]), True),
        (torch.tensor([1.0]), torch.tensor([nan]), False),
    ],
)
def test_which_values_are_alike(a, b, same):
    assert alike(a, b) is same and alike(b, a) is same


def test_alike_within_a_tolerance():
    assert alike(0.25, 0.2504, 5e-4) and not alike(0.25, 0.2506, 5e-4)
    assert alike(1000.0, 1000.4, 5e-4) and not alike(1000.0, 1000.6, 5e-4)
    assert alike(torch.tensor([100.0]), torch.tensor([101.0]), 0.02)


def test_only_numbers_are_read_as_numbers():
    assert number(2) == number(torch.tensor(2)) == 2.0
    for odd in ("2", b"2", True, None, nan):
        with pytest.raises((TypeError, ValueError)):
            number(odd)


# -- asked, on paper -------------------------------------------------------------------------------


def markdown(title: str, *rows: tuple[str, str, str]) -> str:
    """A file mistakes.md. A row has a name, advice and a proof. A proof `old => new` is an edit of a line."""
    made = [f"# {title}"]
    for name, advice, proof in rows:
        old, edits, new = proof.partition(" => ")
        made += [f"## {name}", advice, f"```diff\n-    {old}\n+    {new}\n```" if edits else proof]
    return "\n\n".join(made) + "\n"


FORM = "- error: `WrongForm`"
area = Asked(
    "area",
    lambda a, b: a * b,
    hints=["Multiply."],
    minutes=1,
    cases=[(2, 3), (4, 5)],
    reads=number,
    praise="Right.",
    figures=lambda run, truth: [("area", f"{run.values[0]:g}", f"{truth.values[0]:g}")],
    finds=lambda run, truth: first({"too large": run.values[0] > 99 and f"You say {run.values[0]:g}."}),
    mistakes=markdown(
        "area",
        ("too large", "Look again.", ""),
        ("a division", "Divide nothing.", "- error: `ZeroDivision`"),
        ("no number", "Give a number.", FORM),
    ),
)


def judged(attempt) -> Answer | None:
    """Without a rank: as if one had answered."""
    does, observe = next(area.worlds())
    return area.judged(observe(attempt), does)


def test_a_wrong_answer_gets_the_first_name_that_fits():
    assert judged(lambda a, b: a * b) is None and judged(lambda a, b: float(a * b)) is None
    assert judged(lambda a, b: a + b).figures == [("area", "5", "6")]
    for attempt, name, text in (
        (lambda a, b: a + b, UNNAMED["values"], "you return 5.0. That is too small."),
        (lambda a, b: 6, "right for some inputs alone", "you return 6.0. That is too small."),
        (lambda a, b: 100, "too large", "You say 100. Look again."),
        (lambda a, b: None, "nothing returned", "Your function returned None. Give a number."),
        (lambda a, b: "six", "no number", "You return 'six'. Give a number."),
    ):
        said = judged(attempt)
        assert (said.kind, said.misconception) == ("wrong", name) and said.text.startswith(text), said


def test_what_may_be_two_mistakes_is_said_to_be():
    run = lambda times: Run((4,), [{"values": [times * torch.arange(1.0, 5)]}] * 4)
    _, text = describe_numbers(run(8), run(1), "values", alike)
    assert text.endswith("8 is 4, the number of ranks, times 2: there may be two mistakes.")


def test_numbers_in_other_places_are_those_of_the_same_case():
    how = dict(hints=[], minutes=1, praise="", mistakes="", cases=[(0,), (1,)])
    lists = Asked("lists", lambda a: [[1, 2, 4], [1, 2, 8]][a], **how)
    name = lambda attempt: lists.check(attempt).misconception
    assert name(lambda a: [[4, 1, 2], [8, 2, 1]][a]) == "the right numbers in other places"
    assert name(lambda a: [[1, 2, 8], [1, 2, 4]][a]) == "one place of several"


def test_a_tuple_of_the_readers_own_kind_is_a_tuple():
    pair = Asked("pair", lambda a: (a, 2 * a), cases=[(3,)], hints=[], minutes=1, praise="", mistakes="")
    assert pair.check(lambda a: namedtuple("Pair", "once twice")(a, 2 * a)).kind == "right"
    assert pair.check(lambda a: [namedtuple("One", "of")(a)]).text.endswith("[(3,)]. It has too few numbers.")


def test_names_are_not_called_numbers():
    names = Asked("names", lambda: ["dp", "tp"], hints=[], minutes=1, praise="", mistakes="")
    assert names.check(lambda: ["dp"]).text == "you return ['dp']. It has too few names."


def test_a_rank_is_asked_and_a_crash_has_the_name_of_its_pattern():
    assert area.check(lambda a, b: b * a).kind == "right"
    said = area.check(lambda a, b: a / 0)
    assert (said.kind, said.misconception) == ("crashed", "a division")
    assert said.text.startswith("Divide nothing.\n\n") and "ZeroDivisionError" in said.text
    said = area.check(lambda a, b: [][a])
    assert (said.kind, said.misconception) == ("crashed", None) and "IndexError" in said.text


def test_a_figure_beside_a_wrong_answer_is_one_that_failed():
    assert wrong("a", "", ("x", "6", "6"), ("y", "5", "6"), ("z", "7", "")).figures == [("y", "5", "6")]


# -- on ranks --------------------------------------------------------------------------------------


def doubled(x):
    y = 2 * toy.copy_to_tp(x)
    return y


def ones(rank, n):
    return [(torch.ones(4, requires_grad=True),)]


met = toy.copy_to_tp
on_two = partial(OnRanks, hints=["One."], minutes=1, tries=((2,),), praise="Right.")
summed = on_two(
    "the gradient summed",
    doubled,
    inputs=ones,
    gradient=lambda arguments: torch.ones(4),
    mistakes=markdown(
        "the gradient summed",
        ("thrice", "Twice was asked.", "y = 2 * toy.copy_to_tp(x) => y = 3 * toy.copy_to_tp(x)"),
        ("not summed", "Sum it.", "y = 2 * toy.copy_to_tp(x) => y = 2 * x"),
        ("no tensor", "A tensor is wanted.", FORM),
        ("too many calls", "One is enough.", ""),
        ("too many bytes", "Fewer will do.", ""),
    ),
    finds=needs_more(calls="too many calls", bytes="too many bytes"),
)


def called_twice(x):
    dist.all_reduce(torch.ones(1))
    return doubled(x)


def sends_more(x):
    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            twice = torch.cat([dy, dy])
            dist.all_reduce(twice)
            return twice[:4]

    return 2 * Enter.apply(x)


def not_waited(x):
    dist.all_reduce(torch.ones(1), async_op=True)
    return doubled(x)


@pytest.mark.parametrize(
    "attempt, name, text",
    [
        (lambda x: 3 * toy.copy_to_tp(x) - x.detach(), "right but for a factor", "the output is right, the"),
        (lambda x: 3 * x, "thrice", "On 2 ranks: Twice was asked."),
        (lambda x: x + x, "not summed", "On 2 ranks: Sum it."),
        (lambda x: (2 * x).detach(), UNNAMED["cut"], "autograd cannot get from it back"),
        (lambda x: 5 * met(x), "right but for a factor", "Every number is 2.5 times what it should be."),
        (lambda x: met(x) / 256, "right but for a factor", "Every number is 1/512 of what it should be."),
        (lambda x: 2.097152 * met(x), "right but for a factor", "1.0486 = 2²⁰/10⁶ times (MiB against MB)"),
        (lambda x: 4 * met(x), "n times too large", "2 times what it should be, once for each rank"),
        (lambda x: 1 * met(x), "n times too small", "1/2 of what it should be"),
        (lambda x: -2 * met(x), "the wrong sign", ""),
        (lambda x: 2 * met(x) / 0, "inf or nan", "an inf or a nan"),
        (lambda x: 0 * met(x) / 0, "inf or nan", "an inf or a nan"),
        (lambda x: (2 + dist.get_rank()) * met(x), "right but for a factor", "on each rank another"),
        (
            lambda x: 2 * met(x) + dist.get_rank() * x**2 * torch.arange(4),
            "right on some ranks alone",
            "Rank 0 has",
        ),
        (lambda x: x[:2], "a part, not the whole", "1/2 of it in dimension 0"),
        (lambda x: torch.cat([x, x]), "the whole, not this rank's part", "2 times as much"),
        (lambda x: (2 * x).half(), "the right numbers in another type", "float32, not float16"),
        (lambda x: 2 * x.reshape(2, 2), "the right numbers in another shape", "(4,), not (2, 2)"),
        (lambda x: list(2 * x), "a list of tensors", "torch.cat"),
        (lambda x: None if dist.get_rank() else 2 * x, "returned on some ranks alone", "None: 1."),
        (lambda x: 2 * x.double(), "not summed", ""),
        (lambda x: [2.0] * 4, "no tensor", "you return a builtins.list"),
        (lambda x: print(end=""), "nothing returned", "A tensor is wanted."),
        (called_twice, "too many calls", "On 2 ranks: One is enough."),
        (sends_more, "too many bytes", "On 2 ranks: Fewer will do."),
        (not_waited, "a message nobody waits for", "nobody waited for it"),
        (lambda x: (i for i in x), "a generator where a value is asked for", "list(…) makes a list of it"),
        (doubled, None, "Right."),
        (lambda x: toy.copy_to_tp(2 * x), None, "Right."),
    ],
)
def test_an_attempt_on_ranks_gets_the_name_of_its_mistake(attempt, name, text):
    said = summed.check(attempt)
    kind = "wrong" if name else "right" if text == "Right." else "crashed"
    assert (said.kind, said.misconception) == (kind, name) and text in said.text, said


@pytest.mark.parametrize(
    "attempt, name",
    [
        (lambda x: input(), "input on a rank"),
        (lambda x: breakpoint(), "a breakpoint on a rank"),
        (lambda x: exit(), "an exit on a rank"),
        (lambda x: world.run(doubled), "the notebook's world"),  # noqa: F821
        (lambda x: x * rank, "a name that only cells have"),  # noqa: F821
    ],
)
def test_code_for_a_notebook_crashes_on_a_rank_with_a_sentence(attempt, name):
    said = summed.check(attempt)
    assert (said.kind, said.misconception) == ("crashed", name) and said.text.startswith("`"), said


def test_every_edit_gets_its_name_and_runs_of_edits_are_kept():
    (thrice, edit), (not_summed, other) = ((row.name, *row.edits) for row in summed.rows[:2])
    assert summed.told_apart() == [(thrice, edit, "thrice"), (not_summed, other, "not summed")]
    assert {key for key in summed._known if key[1]} == {((2,), edit) for edit in summed.edits}


@pytest.mark.parametrize(
    "passed, failed, names, code, name, text",
    [
        ([(4,)], (2,), [], "0", "right on 4 ranks, not on 2", "What in your code holds only for"),
        ([(4, 40)], (2, 11), ["length"], "4", "right on 4 ranks, not on 2", "has the number 4 in it."),
        ([(4, 40)], (2, 11), ["s"], "0", "right where the ranks divide the s", "2 does not divide 11"),
        ([(4, 2), (6, 1)], (4, 1), ["p"], "0", "right for some inputs alone", "(p 2) and 6 ranks (p 1), and"),
        ([(4, 2)], (4, 1), ["p"], "0", None, ""),
    ],
)
def test_right_in_some_tries_is_told_by_what_these_have_in_common(passed, failed, names, code, name, text):
    run = Run(failed, [{}] * failed[0], attempt=eval(f"lambda: {code}"))
    said = describe_tries(passed, run, names) or (None, "")
    assert said[0] == name and text in said[1], said


def test_a_rank_that_computes_is_in_no_all_to_all_that_does_not_fit():
    rows = {"op": "all_to_all", "shape": [3, 8], "number": 2}
    status = lambda waits: RankStatus(where={"in": rows if waits else None}, box=rows)
    hang = lambda *waits: Run(
        (2, 1), [{}] * 2, error=RankError("", "timeout", [0], True, [*map(status, waits)])
    )
    named = lambda run: (b3.layer.finds(run, run) or ("",))[0]
    assert named(hang(True, True)) == "splits that do not fit" and named(hang(False, True)) == ""


def multiplied(x):
    return x @ x


product = on_two(
    "a product",
    multiplied,
    inputs=lambda rank, n: [(torch.full((8, 8), 1.0 + rank),), (torch.eye(8),)],
    flops=True,
    figures=lambda run, truth: [("work", f"{run.most('flops'):g}", f"{truth.most('flops'):g}")],
    finds=needs_more(flops="too much work"),
    mistakes=markdown("a product", ("too much work", "One product is enough.", "")),
)


def test_work_is_counted_forward_and_size_of_what_is_given():
    said = product.check(lambda x: x @ x + 0 * (x @ x))
    assert (said.misconception, said.figures) == ("too much work", [("work", "4096", "2048")])
    assert product.check(lambda x: x.mm(x)).figures == [("work", "2048", "2048")]
    for _, observe in product.worlds():
        facts = observe(multiplied).ranks[1]
    assert (facts["size"], facts["flops"], facts["case"], len(facts["values"])) == (512, 2048, 1, 2)


@pytest.mark.parametrize("needs, found", [(101, None), (102, ("too much work", ""))])
def test_a_hundredth_more_is_allowed(needs, found):
    run = lambda most: Run((1,), [{"flops": most}])
    assert product.finds(run(needs), run(100)) == found


# -- messages --------------------------------------------------------------------------------------

Row = namedtuple("Row", "op payload calls", defaults=[0])


def run_of(counted: list, came: list | None = None, ops=("send",), peers=(1,)) -> Run:
    """A run in which rank r sent counted[r] and received came[r] bytes. peers: whom each rank sent to."""
    rows = [[Row(op, 0) for op in ops] + [Row("recv", c)] for c in came or counted]
    facts = {"size": 1000, "messages": [(peer, 0.0) for peer in peers]}
    return Run((len(counted),), [facts] * len(counted), SimpleNamespace(ranks=rows, counted=counted))


RING = run_of([1500] * 4)


@pytest.mark.parametrize(
    "run, name",
    [
        (RING, None),
        (run_of([1500] * 4, ops=("send", "all_reduce")), "a ready collective does the work"),
        (run_of([700] * 4), "nothing was sent"),
        (run_of([3000] * 4), "the whole tensor, not a chunk"),
        (run_of([3000, 1000, 1000, 1000]), "everything through one rank"),
        (run_of([1600, 1000, 1000, 0], [3000, 1000, 1000, 1000]), "everything through one rank"),
        (run_of([1515] * 4), None),  # just the hundredth more that is allowed
        (run_of([1500] * 4, peers=(1, 1, 2)), "straight to every rank, no ring"),
        (run_of([750] * 4), None),  # the result is right, so the data were sent somehow
        (run_of([1300, 1000]), None),  # two ranks have no hub
    ],
)
def test_messages_that_move_too_much_have_a_name(run, name):
    n = run.n
    said = wasteful(run, run_of([2 * (n - 1) / n * 1000] * n))
    assert (said and said[0]) == name
    if name == "everything through one rank" and n == 4:
        assert "rank 0 sends or receives 3.00 kB" in said[1]


def test_the_busiest_rank_counts_and_errors_are_those_of_who_raised():
    rows = [[SimpleNamespace(calls=1)] * 2, [SimpleNamespace(calls=3)] * 3]
    run = Run((2,), [{"flops": 1}, {"flops": 3}], SimpleNamespace(counted=[5, 2], ranks=rows))
    assert [run.most(what) for what in ("flops", "bytes", "calls")] == [3, 5, 9]
    error = lambda aborted: SimpleNamespace(type="ValueError", message="no", aborted=aborted)
    seen = [SimpleNamespace(error=one) for one in (None, error(False), error(True))]
    assert Run((3,), [], error=SimpleNamespace(seen=seen)).errors == ["ValueError: no"]


stuck = on_two("stuck", doubled, inputs=ones, mistakes="", world={"timeout": 2})


def send_and_receive_elsewhere(x, peer):
    """By another tag: on two ranks as on a ring whose ranks receive from the next one."""
    sent, received = dist.isend(x, peer), dist.irecv(x.clone(), peer, tag=1)
    sent.wait(), received.wait()


@pytest.mark.parametrize(
    "first, name",
    [
        (dist.send, "everybody sends before anybody receives"),
        (send_and_receive_elsewhere, "messages that do not meet"),
        (dist.recv, "everybody waits to receive"),
        (lambda x, peer: peer and dist.recv(x, peer), "a message with one end"),
    ],
)
def test_a_hang_in_which_all_do_the_same_has_a_name(first, name):
    said = stuck.check(lambda x: first(x.detach(), 1 - dist.get_rank()))
    assert (said.kind, said.misconception) == ("crashed", name), said
