"""Describes a wrong answer that is no known mistake of its exercise: what was observed, and nothing more.

FORMS and NUMBERS are tables of (name, test, text). The first test that holds gives the description: it
returns the values for the braces of name and text, () if there are none, and None if it does not hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from .exercise import numbers_in
from .runs import NoValue, Run

Description = tuple[str, str] | None  # a mistake's name, and a sentence or two on what was observed
Values = tuple | None  # for the braces of a name and a text
TOLERANCE = 1e-4  # relative


def _first(table: tuple, *seen) -> Description:
    """The name and the text of the first row whose test holds."""
    for name, test, text in table:
        if (values := test(*seen)) is not None:
            return name.format(*values), text.format(*values)
    return None


def _if(holds: object) -> Values:
    return () if holds else None


MIB = 2**20 / 10**6


def multiple(times: float) -> str:
    """A factor in words, to stand before what it multiplies: '3 times', '1/512 of'."""
    near = lambda other: math.isclose(times, other, rel_tol=5 * TOLERANCE)
    if near(MIB) or near(1 / MIB):
        power = "2²⁰/10⁶" if near(MIB) else "10⁶/2²⁰"
        return f"{times:.4f} = {power} times (MiB against MB)"
    if near(round(times)):
        return f"{round(times):,} times"
    part = round(1 / times) if 0 < times < 1 else 0
    return f"1/{part:,} of" if part and near(1 / part) else f"{times:.3g} times"


# -- another form than the solution's -------------------------------------------------------------


def describe_form(got, wanted, n: int, alike: Callable) -> Description:
    """Describes an answer on n ranks whose form differs from the solution's, `wanted`. None: nothing fits."""
    if isinstance(got, NoValue):
        return got.name, got.advice
    return _first(FORMS, got, wanted, n, alike) if isinstance(wanted, torch.Tensor) else None


def _list_of_tensors(got, wanted, n, alike) -> Values:
    tensors = isinstance(got, (list, tuple)) and got and all(isinstance(one, torch.Tensor) for one in got)
    return _if(tensors and _same_numbers(torch.cat([one.flatten() for one in got]), wanted, alike))


def _another_shape(got, wanted, n, alike) -> Values:
    differs = isinstance(got, torch.Tensor) and got.shape != wanted.shape
    return (tuple(wanted.shape), tuple(got.shape)) if differs and _same_numbers(got, wanted, alike) else None


def _another_type(got, wanted, n, alike) -> Values:
    types = [str(t.dtype).removeprefix("torch.") for t in (wanted, got) if isinstance(t, torch.Tensor)]
    return tuple(types) if len(types) > 1 and _same_numbers(got, wanted, alike) else None


def _to_be_reduced(got, wanted, n, alike) -> Values:
    if not isinstance(got, torch.Tensor) or not got.numel() > wanted.numel() == 1:
        return None
    ways = {"mean": got.double().mean(), "sum": got.double().sum()}
    return next(
        ((name, got.numel()) for name, one in ways.items() if _same_numbers(one, wanted, alike)), None
    )


def _times_as_long(got, wanted, n, alike) -> Values:
    """The dimension in which one shape is n times the other, if all else is equal."""
    if not isinstance(got, torch.Tensor) or n == 1 or got.dim() != wanted.dim():
        return None
    off = [i for i, (a, b) in enumerate(zip(got.shape, wanted.shape)) if a != b]
    if len(off) != 1 or got.shape[off[0]] != n * wanted.shape[off[0]]:
        return None
    return tuple(got.shape), tuple(wanted.shape), n, off[0]


def _a_part(got, wanted, n, alike) -> Values:
    found = _times_as_long(wanted, got, n, alike) if isinstance(got, torch.Tensor) else None
    return found and (found[1], found[0], *found[2:])


def _same_numbers(got: torch.Tensor, wanted: torch.Tensor, alike: Callable) -> bool:
    got, wanted = got.detach().flatten(), wanted.detach().flatten()
    coarse = got.dtype if got.is_floating_point() else wanted.dtype
    return got.numel() == wanted.numel() and alike(got, wanted.to(coarse))


# First the right numbers in another form, then shapes, which say less.
FORMS = (
    (
        "a list of tensors",
        _list_of_tensors,
        "You return the right numbers in a list. torch.cat makes one tensor of it.",
    ),
    (
        "the right numbers in another shape",
        _another_shape,
        "The numbers are right. The shape should be {}, not {}.",
    ),
    (
        "the right numbers in another type",
        _another_type,
        "The numbers are right. Their type should be {}, not {}.",
    ),
    (
        "numbers whose {} is asked for",
        _to_be_reduced,
        "You return {1} numbers. What is asked for is their {0}.",
    ),
    (
        "the whole, not this rank's part",
        _times_as_long,
        "You return {}, where {} is asked for: {} times as much in dimension {}.",
    ),
    ("a part, not the whole", _a_part, "You return {}, where {} is asked for: 1/{} of it in dimension {}."),
)


# -- right in other tries -------------------------------------------------------------------------


def describe_tries(passed: Sequence[tuple], run: Run, names: Sequence[str]) -> Description:
    """Describes an attempt that was right in other tries, `passed`: by what they have in common and the wrong
    one has not, if that is known. names: those of a try's numbers after that of the ranks.
    """
    others = sorted({n for n, *_ in passed})
    if not set(others) - {run.n}:
        return None
    tries = [*passed, run.tried]
    listed = " and ".join(filter(None, [", ".join(map(str, others[:-1])), str(others[-1])]))
    name = f"right on {listed} ranks, not on {run.n}"
    written = [n for n in others if n != run.n and n in numbers_in(run.attempt)]
    if run.n not in others and (written or not names or len({tuple(more) for _, *more in tries}) == 1):
        text = f"Your code has the number {written[0]} in it. " if written else ""
        text = f"On {listed} ranks it was right. {text}What in your code holds only for that number?"
        return name, f"{text} `world_size` is the number of ranks."
    *divided, last = (more[0] % n == 0 for n, *more in tries)
    called = lambda tried: f"{tried[0]} ranks ({', '.join(f'{a} {b:,}' for a, b in zip(names, tried[1:]))})"
    text = f"It was right on {' and '.join(map(called, passed))}, and is not on {called(run.tried)}."
    if all(divided) and not last:
        name = f"right where the ranks divide the {names[0]}"
        text += f" {run.n} does not divide {run.tried[1]:,}."
    elif run.n in others:
        name = "right for some inputs alone"
    return name, text


# -- other numbers than the solution's ------------------------------------------------------------


def describe_numbers(mine: Run, truth: Run, key: str, alike: Callable) -> Description:
    """The first description that fits an attempt's "values" or "gradients" (`key`), which differ from the
    solution's. None: nothing fits.
    """
    return _first(NUMBERS, _Seen(mine, truth, key, alike))


class _Seen:
    """What an attempt and the solution did. cases[i]: (numbers, right numbers) of case i, one pair for each
    rank; pairs: those of all ranks and cases. Both are empty if the shapes differ.
    """

    def __init__(self, mine: Run, truth: Run, key: str, alike: Callable):
        self.mine, self.truth, self.key, self.alike, self.n = mine, truth, key, alike, mine.n
        ranks = zip(mine.ranks, truth.ranks)
        pairs = [[(_numbers(a), _numbers(b)) for a, b in zip(x[key], y[key])] for x, y in ranks]
        every = [pair for of_rank in pairs for pair in of_rank]
        fits = all(a is not None and b is not None and a.shape == b.shape for a, b in every)
        self.pairs = every if fits else []
        self.cases = list(zip(*pairs)) if fits else []
        groups = lambda run: {members for *_, members in run.kinds}
        self.met, self.should_meet = groups(mine), groups(truth)
        self.factor = self._factor()

    def right(self, rank: int, of: int | None = None) -> bool:
        """Whether a rank has the right answer of rank `of`; None: its own."""
        of = rank if of is None else of
        return self.alike(self.mine.ranks[rank][self.key], self.truth.ranks[of][self.key])

    def _factor(self) -> float | str | None:
        """The factor of all numbers; 'rank' or 'case' if each of these has another one; None: no factor."""
        of = [_times(a, b) for a, b in self.pairs]
        known = [times for times in of if times]  # without 0, where both are 0
        if not known or None in of:
            return None
        same = max(known) - min(known) <= 1e-3 * abs(known[0])
        several = any(len(b) > 1 for _, b in self.pairs)
        if same and (several or len({float(b[0]) for _, b in self.pairs}) > 1):
            return known[0]
        if any(len(b) < 2 for _, b in self.pairs):
            return None
        ranks = {f"{of[r * len(of) // self.n]:.3g}" for r in range(self.n)}
        return "rank" if len(ranks) > 1 else "case"

    def is_times(self, number: float) -> bool:
        """Whether all numbers are multiplied by this one."""
        return isinstance(self.factor, float) and math.isclose(self.factor, number, rel_tol=1e-3)


def _numbers(value) -> torch.Tensor | None:
    """All numbers of an answer as a vector, (n,); None if it has anything else."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten()
    if isinstance(value, (bool, int, float)):
        return torch.tensor([float(value)], dtype=torch.float64)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        parts = [_numbers(item) for item in value]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if known and len(known) == len(parts) else None
    return None


def _times(got: torch.Tensor, wanted: torch.Tensor) -> float | None:
    """The factor from `wanted` to `got`; 0.0 if both are 0, None if there is no such factor."""
    size = float(wanted.norm())
    if not size:
        return None if got.any() else 0.0
    times = float(got @ wanted) / size**2
    if not math.isfinite(times):
        return None
    near = torch.allclose(got, times * wanted, rtol=TOLERANCE, atol=TOLERANCE * abs(times) * size)
    return times if near else None


def _two_factors(seen: _Seen) -> str:
    """A sentence if the factor, or its inverse, is the number of ranks times another whole number; else ''.
    On two ranks every even factor is.
    """
    large = max(seen.factor, 1 / seen.factor) if seen.factor > 0 else 0.0
    other = round(large / seen.n)
    if seen.n < 3 or other < 2 or not math.isclose(large, seen.n * other, rel_tol=5 * TOLERANCE):
        return ""
    return f" {seen.n * other} is {seen.n}, the number of ranks, times {other}: there may be two mistakes."


def _left_as_given(seen: _Seen) -> list[tuple[int, int]]:
    """For each rank and case (how many numbers are wrong, how many there are), if all wrong numbers of an
    argument that the attempt should write into are as they were given; else [].
    """
    given = [x for facts in seen.mine.ranks for x in facts.get("given", [])]
    if seen.key != "values" or not seen.pairs or not given or any(x is None for x in given):
        return []
    counts = []
    for (a, b), was in zip(seen.pairs, given):
        off = ~torch.isclose(a, b, rtol=TOLERANCE, equal_nan=True)
        if not torch.equal(a[off], was.double().flatten()[off]):
            return []
        unchanged = torch.equal(a, was.double().flatten())
        counts.append((len(a) if unchanged else int(off.sum()), len(a)))
    return counts


def _nothing_written(seen: _Seen) -> Values:
    counts = _left_as_given(seen)
    return _if(counts and all(left == of for left, of in counts))


def _never_met(seen: _Seen) -> Values:
    apart = [group for group in seen.should_meet if not any(set(group) <= set(other) for other in seen.met)]
    yours = " and ".join(str(list(group)) for group in sorted(seen.met)[:4])
    return (list(min(apart)), yours) if apart else None


def _left_on_one(seen: _Seen) -> Values:
    """A collective that leaves the result on one rank, and that the solution does not call."""
    mine, truth = ({op for op, *_ in run.kinds} for run in (seen.mine, seen.truth))
    left = sorted(mine & {"reduce", "gather"} - truth)
    return (left[0],) if left and "broadcast" not in mine else None


def _reduced_otherwise(seen: _Seen) -> Values:
    """As many reductions as in the solution, but one of another kind."""
    mine, truth = (Counter(how for _, how, *_ in run.calls[0] if how) for run in (seen.mine, seen.truth))
    more, less = mine - truth, truth - mine
    one = len(more) == len(less) == 1 and "avg" not in more and more.total() == less.total()
    return (*more, *less) if one else None


def _of_other_ranks(seen: _Seen) -> Values:
    ranks = range(seen.n)
    has = [[of for of in ranks if seen.right(rank, of)] for rank in ranks]
    others = [(rank, of[0]) for rank, of in zip(ranks, has) if of and rank not in of]
    return others[0] if all(has) and others else None


def _some_ranks(seen: _Seen) -> Values:
    good = [rank for rank in range(seen.n) if seen.right(rank)]
    empty = [all(value is None for value in seen.truth.ranks[rank][seen.key]) for rank in good]
    if all(empty):  # a rank that must return nothing has not shown that its answer is right
        return None
    return f"Rank{'s' * (len(good) > 1)} {', '.join(map(str, good))}", "has" if len(good) == 1 else "have"


def _some_places(seen: _Seen) -> Values:
    """Of the places of each answer, a list, some are wrong in all answers and the others in none."""
    values, right = ([v for facts in run.ranks for v in facts[seen.key]] for run in (seen.mine, seen.truth))
    if not all(isinstance(value, (list, tuple)) for value in (*values, *right)):
        return None
    if len({len(value) for value in (*values, *right)}) != 1 or not 1 < len(right[0]) <= len(WORDS):
        return None
    of = len(right[0])
    off = [i for i in range(of) if not seen.alike([v[i] for v in values], [v[i] for v in right])]
    if len(off) == of:
        return None
    pairs = [(_numbers(a[i]), _numbers(b[i])) for a, b in zip(values, right) for i in off]
    times = [None if a is None or b is None or a.shape != b.shape else _times(a, b) for a, b in pairs]
    said = {multiple(one) for one in times if one} - {"1 times"}
    text = f" It is {said.pop()} what it should be." if None not in times and len(said) == 1 else ""
    return " and the ".join(WORDS[i] for i in off), of, text


WORDS = "first", "second", "third", "fourth", "fifth", "sixth"


def _moved(seen: _Seen) -> Values:
    """In each case the ranks together have the right numbers. Those of two cases are never taken together."""
    together = lambda numbers: torch.cat(list(numbers)).sort().values
    if not seen.pairs or max(len(b) for _, b in seen.pairs) < 3:
        return None
    pairs = [(together(a for a, _ in case), together(b for _, b in case)) for case in seen.cases]
    return _if(all(torch.allclose(a, b, rtol=TOLERANCE) for a, b in pairs))


def _disagree(seen: _Seen) -> Values:
    ranks = range(1, seen.n)
    same = lambda run: all(seen.alike(run.ranks[0][seen.key], run.ranks[r][seen.key]) for r in ranks)
    return _if(seen.n > 1 and same(seen.truth) and not same(seen.mine))


def _met_too_many(seen: _Seen) -> Values:
    more = seen.met - seen.should_meet
    return (list(max(more, key=len)),) if more else None


def _some_cases(seen: _Seen) -> Values:
    if seen.n > 1:
        return None
    pairs = list(zip(seen.mine.values, seen.truth.values))
    off = [i for i, (a, b) in enumerate(pairs) if not seen.alike(a, b)]
    asked = seen.mine.asked(off[0]).rstrip(": ").removeprefix("Asked for ")
    first = f", the first of them {asked}" if asked else ""
    name, more = "right for some inputs alone", ""
    if 2 * len(off) > len(pairs):
        name, more = "wrong for most inputs", " There may be more than one mistake."
    return (name, len(off), len(pairs), first, more) if len(off) < len(pairs) else None


# What was not done at all explains every number, so it comes first. Then what explains the numbers of all
# ranks: no number, another reduction, one factor. Then what explains only some of them: other ranks' numbers,
# right ranks, right places. Last what the numbers do not show: which ranks met, and how many cases are right.
NUMBERS = (
    (
        "the given tensor is unchanged",
        _nothing_written,
        "The tensor that your function was given is as it was, and the check reads that one. `x += y`,"
        " `x *= y`, `x.copy_(y)` and `x[...] = y` write into it. What `x = x + y` or `x.clone()` makes is"
        " another tensor, and so is what is gathered from a copy that is old.",
    ),
    (
        "a part left as it was",
        lambda seen: max(_left_as_given(seen), default=None),
        "{} of {} numbers of a rank are unchanged.",
    ),
    (
        "nothing was exchanged",
        lambda seen: _if(seen.n > 1 and seen.truth.kinds and not seen.mine.kinds),
        "No rank called a collective, so each knows only what it has itself.",
    ),
    ("ranks that never meet", _never_met, "Ranks {} never meet in one collective. Yours are over {}."),
    ("left on one rank", _left_on_one, "dist.{} gives one rank the result, and all need it."),
    (
        "inf or nan",
        lambda seen: _if(any(b.isfinite().all() and not a.isfinite().all() for a, b in seen.pairs)),
        "There is an inf or a nan in it.",
    ),
    ("{} where {} is meant", _reduced_otherwise, "dist.all_reduce takes the {} in one place, not the {}."),
    (
        "right but for rounding",
        lambda seen: _if(seen.is_times(1)),
        "Every number is right to three digits, and the check asks for more. Was something computed in"
        " float16 or bfloat16?",
    ),
    ("the wrong sign", lambda seen: _if(seen.is_times(-1)), "Every number has the wrong sign."),
    (
        "n times too large",
        lambda seen: (seen.n,) if seen.n > 1 and seen.is_times(seen.n) else None,
        "Every number is {} times what it should be, once for each rank. Is it summed where a mean is meant,"
        " or multiplied once too often?",
    ),
    (
        "n times too small",
        lambda seen: (seen.n, seen.n) if seen.n > 1 and seen.is_times(1 / seen.n) else None,
        "Every number is 1/{} of what it should be, on {} ranks. Is it divided by the ranks once too often?",
    ),
    (
        "right but for a factor",
        lambda seen: (multiple(seen.factor), _two_factors(seen)) if isinstance(seen.factor, float) else None,
        "Every number is {} what it should be.{}",
    ),
    (
        "right but for a factor",
        lambda seen: ("on each rank" if seen.factor == "rank" else "in each case",) if seen.factor else None,
        "Every number is a multiple of what it should be, {} another one.",
    ),
    ("the part of a neighbour", _of_other_ranks, "Rank {} has what rank {} should have."),
    ("right on some ranks alone", _some_ranks, "{} {} the right answer, and the others have not."),
    ("one place of several", _some_places, "Of what you return only the {} of {} is not right.{}"),
    (
        "the right numbers in other places",
        _moved,
        "All right numbers are there, and not where they should be.",
    ),
    (
        "ranks that do not agree",
        _disagree,
        "All ranks should end with the same numbers, and yours end with different ones.",
    ),
    (
        "ranks that should not meet",
        _met_too_many,
        "You call a collective over ranks {}. Which of them hold the same?",
    ),
    ("{0}", _some_cases, "{1} of {2} cases are not right{3}.{4}"),
)
