"""Describes a wrong answer that is no known mistake of its exercise: what was observed, and nothing more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from .runs import NoValue, Run

Description = tuple[str, str] | None  # a mistake's name, and a sentence or two on what was observed


# -- another form than the solution's -------------------------------------------------------------


def describe_form(got, wanted, n: int, alike: Callable) -> Description:
    """Describes an answer on n ranks whose form differs from the solution's, `wanted`. None: nothing fits."""
    if isinstance(got, NoValue):
        return got.name, got.advice
    if not isinstance(wanted, torch.Tensor):
        return None
    if isinstance(got, (list, tuple)) and got and all(isinstance(one, torch.Tensor) for one in got):
        whole = torch.cat([one.flatten() for one in got])
        if _same_numbers(whole, wanted, alike):
            return (
                "a list of tensors",
                "You return the right numbers in a list. torch.cat makes one tensor of it.",
            )
        return None
    if not isinstance(got, torch.Tensor):
        return None
    if _same_numbers(got, wanted, alike):
        if got.shape != wanted.shape:
            shapes = f"{tuple(wanted.shape)}, not {tuple(got.shape)}"
            return (
                "the right numbers in another shape",
                f"The numbers are right. The shape should be {shapes}.",
            )
        types = f"{wanted.dtype}, not {got.dtype}".replace("torch.", "")
        return "the right numbers in another type", f"The numbers are right. Their type should be {types}."
    if wanted.numel() == 1 and got.numel() > 1:
        for name, one in {"mean": got.double().mean(), "sum": got.double().sum()}.items():
            if _same_numbers(one, wanted, alike):
                text = f"You return {got.numel()} numbers. What is asked for is their {name}."
                return f"numbers whose {name} is asked for", text
    return _part_or_whole(got.shape, wanted.shape, n)


def _part_or_whole(got: Sequence[int], wanted: Sequence[int], n: int) -> Description:
    """Describes shapes of which one is n times the other, a rank's part, along one dimension."""
    off = [i for i, (a, b) in enumerate(zip(got, wanted)) if a != b]
    if n == 1 or len(got) != len(wanted) or len(off) != 1:
        return None
    shapes = f"You return {tuple(got)}, where {tuple(wanted)} is asked for"
    if got[off[0]] == n * wanted[off[0]]:
        return "the whole, not this rank's part", f"{shapes}: {n} times as much in dimension {off[0]}."
    if n * got[off[0]] == wanted[off[0]]:
        return "a part, not the whole", f"{shapes}: 1/{n} of it in dimension {off[0]}."
    return None


def _same_numbers(got: torch.Tensor, wanted: torch.Tensor, alike: Callable) -> bool:
    got, wanted = got.detach().flatten(), wanted.detach().flatten()
    coarse = got.dtype if got.is_floating_point() else wanted.dtype
    return got.numel() == wanted.numel() and alike(got, wanted.to(coarse))


# -- other numbers than the solution's ------------------------------------------------------------


def describe_numbers(mine: Run, truth: Run, key: str, alike: Callable) -> Description:
    """The first description that fits an attempt's "values" or "gradients" (`key`), which differ from the
    solution's. None: nothing fits.
    """
    got, wanted = ([[_numbers(v) for v in facts[key]] for facts in run.ranks] for run in (mine, truth))
    of = _Descriptions(mine, truth, key, alike, got, wanted)
    tests = of.as_given, of.nothing_exchanged, of.never_met, of.left_on_one, of.not_finite
    tests += of.reduced_otherwise, of.factor, of.added, of.of_other_ranks, of.some_ranks
    tests += of.places, of.moved, of.disagree, of.met_too_many, of.many_numbers
    tests += (of.some_cases,)
    return next((found for test in tests if (found := test())), None)


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


class _Descriptions:
    """Each method tests whether one description fits. got, wanted: the numbers of each rank and case, of the
    attempt and of the solution.
    """

    def __init__(self, mine: Run, truth: Run, key: str, alike: Callable, got: list, wanted: list):
        self.mine, self.truth, self.key, self.alike = mine, truth, key, alike
        self.n, self.got, self.wanted = mine.n, got, wanted
        pairs = [pair for ranks in zip(got, wanted) for pair in zip(*ranks)]
        fits = all(a is not None and b is not None and a.shape == b.shape for a, b in pairs)
        self.pairs = pairs if fits else []  # numbers of different shape are not described

    def right(self, rank: int, of: int | None = None) -> bool:
        """Whether a rank has the right answer of rank `of`; None: its own."""
        of = rank if of is None else of
        return self.alike(self.mine.ranks[rank][self.key], self.truth.ranks[of][self.key])

    def not_finite(self) -> Description:
        bad = [not bool(a.isfinite().all()) for a, b in self.pairs if b.isfinite().all()]
        if not any(bad):
            return None
        text = "There is an inf or a nan in it: from a division by 0, the log of 0, or exp of a large number."
        return "inf or nan", text

    def as_given(self) -> Description:
        """An argument that the attempt should write into is unchanged where it is wrong."""
        given = [x for facts in self.mine.ranks for x in facts.get("given", [])]
        if self.key != "values" or not self.pairs or any(x is None for x in given):
            return None
        trios = [(a, b, was.double().flatten()) for (a, b), was in zip(self.pairs, given)]
        off = [~torch.isclose(a, b, rtol=1e-4, equal_nan=True) for a, b, _ in trios]
        left = [torch.equal(a[wrong], was[wrong]) for (a, _, was), wrong in zip(trios, off)]
        if not given or not all(left):
            return None
        if all(torch.equal(a, was) for a, _, was in trios):
            text = (
                "The tensor that your function was given is unchanged. `x += y`, `x *= y`, `x.copy_(y)` and"
                " `x[...] = y` write into a tensor. `x = x + y` makes a new tensor, which the check does"
                " not read."
            )
            return "nothing was written", text
        many = max(int(wrong.sum()) for wrong in off)
        return ("a part left as it was", f"{many} of {off[0].numel()} numbers of a rank are unchanged.")

    def nothing_exchanged(self) -> Description:
        if self.mine.kinds or not self.truth.kinds or self.n == 1:
            return None
        return "nothing was exchanged", "No rank called a collective, so each knows only what it has itself."

    def _groups(self, run: Run) -> set[tuple[int, ...]]:
        return {members for *_, members in run.kinds}

    def never_met(self) -> Description:
        mine = self._groups(self.mine)
        groups = self._groups(self.truth)
        apart = [group for group in groups if not any(set(group) <= set(other) for other in mine)]
        if not apart:
            return None
        met = " and ".join(str(list(group)) for group in sorted(mine)[:4])
        text = f"Ranks {list(min(apart))} never meet in one collective. Yours are over {met}."
        return "ranks that never meet", text

    def met_too_many(self) -> Description:
        more = self._groups(self.mine) - self._groups(self.truth)
        if not more:
            return None
        text = f"You call a collective over ranks {list(max(more, key=len))}. Which of them hold the same?"
        return "ranks that should not meet", text

    def factor(self) -> Description:
        """One factor for all numbers, or a factor for each rank and case, if these have several numbers."""
        of = [_times(a, b) for a, b in self.pairs]
        if not of or None in of or not any(b.any() for _, b in self.pairs):
            return None
        known = [times for times in of if times]  # without 0, where both are 0
        same = bool(known) and max(known) - min(known) <= 1e-3 * abs(known[0])
        enough = sum(len(b) for _, b in self.pairs) > 1 and len({float(b[0]) for _, b in self.pairs}) > 1
        if not same or not (enough or any(len(b) > 1 for _, b in self.pairs)):
            if any(len(b) < 2 for _, b in self.pairs) or not known:
                return None
            ranks = [of[r * len(of) // self.n] for r in range(self.n)]
            where = "on each rank another" if len(set(map(_short, ranks))) > 1 else "in each case another"
            return "right but for a factor", f"Every number is a multiple of what it should be, {where} one."
        return _called(known[0], self.n)

    def added(self) -> Description:
        """The same number is added to all."""
        off = [a - b for a, b in self.pairs]
        if not off or sum(map(len, off)) < 3:
            return None
        all_ = torch.cat(off)
        if all_[0].abs() < 1e-6 or not torch.allclose(all_, all_[0].expand_as(all_), rtol=1e-4):
            return None
        return "right but for a number added", f"Every number is off by the same: {_short(float(all_[0]))}."

    def left_on_one(self) -> Description:
        """The result is on one rank only, by a collective that the solution does not call."""
        ops = [{op for op, *_ in run.kinds} for run in (self.mine, self.truth)]
        left = sorted(ops[0] & {"reduce", "gather"} - ops[1])
        if not left or "broadcast" in ops[0]:
            return None
        return "left on one rank", f"dist.{left[0]} gives one rank the result, and all need it."

    def reduced_otherwise(self) -> Description:
        """As many reductions as in the solution, but of another kind."""
        mine, truth = (Counter(how for _, how, *_ in run.calls[0] if how) for run in (self.mine, self.truth))
        more, less = mine - truth, truth - mine
        if len(more) != 1 or len(less) != 1 or "avg" in more or more.total() != less.total():
            return None
        (took,), (meant,) = more, less
        return (
            f"{took} where {meant} is meant",
            f"dist.all_reduce takes the {took} in one place, not the {meant}.",
        )

    def many_numbers(self) -> Description:
        """The largest collective has more than twice the numbers of the solution's largest."""
        most = [
            max((numbers for calls in run.calls for *_, numbers in calls), default=0)
            for run in (self.mine, self.truth)
        ]
        if not 2 * most[1] < most[0]:
            return None
        return "more numbers than needed", f"A collective of yours has {most[0]:,} numbers. Fewer are enough."

    def of_other_ranks(self) -> Description:
        ranks = range(self.n)
        has = [[of for of in ranks if self.right(rank, of)] for rank in ranks]
        if not all(has) or all(rank in of for rank, of in zip(ranks, has)):
            return None
        rank = next(rank for rank, of in zip(ranks, has) if rank not in of)
        text = f"Rank {rank} has what rank {has[rank][0]} should have."
        return "the part of a neighbour", text

    def some_ranks(self) -> Description:
        good = [rank for rank in range(self.n) if self.right(rank)]
        empty = [all(value is None for value in self.truth.ranks[rank][self.key]) for rank in good]
        if all(empty):  # a rank that must return nothing has not shown that its answer is right
            return None
        listed = _ranks(good)
        text = f"{listed} {'has' if len(good) == 1 else 'have'} the right answer, and the others have not."
        return "right on some ranks alone", text

    def places(self) -> Description:
        """Of the places of each answer, a list, some are wrong in all answers and the others in none."""
        values = [value for facts in self.mine.ranks for value in facts[self.key]]
        right = [value for facts in self.truth.ranks for value in facts[self.key]]
        if not all(isinstance(value, (list, tuple)) for value in (*values, *right)):
            return None
        if len({len(value) for value in (*values, *right)}) != 1 or not 1 < len(right[0]) <= 6:
            return None
        off = [
            i for i in range(len(right[0])) if not self.alike([v[i] for v in values], [v[i] for v in right])
        ]
        if len(off) == len(right[0]):
            return None
        text = f"Of what you return only {_places(off, len(right[0]))} is not right."
        pairs = [(_numbers(a[i]), _numbers(b[i])) for a, b in zip(values, right) for i in off]
        if all(a is not None and b is not None and a.shape == b.shape for a, b in pairs):
            times = {_short(factor) if (factor := _times(a, b)) else "" for a, b in pairs} - {"0", ""}
            whole = all(_times(a, b) is not None for a, b in pairs)
            text += f" It is {times.pop()} times what it should be." if whole and len(times) == 1 else ""
        return "one place of several", text

    def moved(self) -> Description:
        sort = lambda numbers: torch.cat(list(numbers)).sort().values
        if not self.pairs or max(len(b) for _, b in self.pairs) < 3:
            return None
        if not torch.allclose(sort(a for a, _ in self.pairs), sort(b for _, b in self.pairs), rtol=1e-4):
            return None
        return (
            "the right numbers in other places",
            "All right numbers are there, and not where they should be.",
        )

    def disagree(self) -> Description:
        ranks = range(1, self.n)
        same = lambda run: all(self.alike(run.ranks[0][self.key], run.ranks[r][self.key]) for r in ranks)
        if self.n == 1 or not same(self.truth) or same(self.mine):
            return None
        text = "All ranks should end with the same numbers, and yours end with different ones."
        return "ranks that do not agree", text

    def some_cases(self) -> Description:
        if self.n > 1:
            return None
        pairs = list(zip(self.mine.values, self.truth.values))
        off = [i for i, (a, b) in enumerate(pairs) if not self.alike(a, b)]
        if len(off) == len(pairs):
            return None
        asked = self.mine.asked(off[0]).rstrip(": ").removeprefix("Asked for ")
        first = f", the first of them {asked}" if asked else ""
        return "right for some inputs alone", f"{len(off)} of {len(pairs)} cases are not right{first}."


def _times(got: torch.Tensor, wanted: torch.Tensor) -> float | None:
    """The factor from `wanted` to `got`; 0.0 if both are 0, None if there is no such factor."""
    size = float(wanted.norm())
    if not size:
        return None if got.any() else 0.0
    times = float(got @ wanted) / size**2
    return times if torch.allclose(got, times * wanted, rtol=1e-4, atol=1e-4 * abs(times) * size) else None


def _called(times: float, n: int) -> Description:
    """The description for a factor that is not 1."""
    near = lambda other: abs(times - other) <= 1e-3 * abs(other)
    if near(-1):
        return "the wrong sign", "Every number has the wrong sign."
    if n > 1 and near(n):
        text = f"Every number is {n} times what it should be, once for each rank."
        return (
            "n times too large",
            f"{text} Is it summed where a mean is meant, or multiplied once too often?",
        )
    if n > 1 and near(1 / n):
        text = f"Every number is 1/{n} of what it should be, on {n} ranks."
        return "n times too small", f"{text} Is it divided by the ranks once too often?"
    return "right but for a factor", f"Every number is {_short(times)} times what it should be."


def _short(number: float) -> str:
    return f"{number:.3g}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}".capitalize()


def _places(places: Sequence[int], of: int) -> str:
    words = "first", "second", "third", "fourth", "fifth", "sixth"
    return f"the {' and the '.join(words[i] for i in places)} of {of}"
