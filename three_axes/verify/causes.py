"""Why the ranks' tensors differ from those of the twin, which is the whole model on one device. A cause is
named if one thing explains the difference: a missing sum or mean, a sum too many, one factor, or how often
the rows of the batch count. Otherwise the cause says on which ranks the tensor differs, and along which axis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .shards import Mesh

TOKENS = 512  # at most so many of a rank's tokens are compared with the twin's
NEAR = 2e-3  # a factor nearer to 1 is printed as its difference from 1
NOTHING = 1e-300  # the least denominator, so that no division is by 0
# The tolerance up to which single tensors are tried as the cause of a wrong norm. In coarser numbers one of
# many tensors fits by chance.
FINE = 1e-6


@dataclass(frozen=True)
class Cause:
    """Why tensors differ. kind: 'not summed', 'scaled' and so on. axes: those concerned. text: is printed."""

    kind: str
    axes: tuple[str, ...] = ()
    text: str = ""


UNEXPLAINED = Cause(
    "unexplained", text="wrong on all ranks, and no sum, mean or factor of theirs is the twin's"
)


def apart(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """|a − b| / |b|, where |b| counts as at least `least`. NaN if a or b has NaN."""
    a, b = a.double().flatten(), b.double().flatten()
    difference = float((a - b).norm())
    return difference / max(float(b.norm()), least, NOTHING) if difference else 0.0


def factor(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(c, |a − c · b| / |a|) for the c that makes the difference smallest."""
    a, b = a.double().flatten(), b.double().flatten()
    c = float(a @ b) / max(float(b @ b), NOTHING)
    return c, float((a - c * b).norm()) / max(float(a.norm()), NOTHING)


def ranks_text(ranks: Iterable[int]) -> str:
    """'rank 3', or 'ranks 0, 2'."""
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def rows_text(rows: Sequence[int]) -> str:
    """'row 3', 'rows 1–2', 'rows 1, 3': counted from 1, for rows that are numbered from 0."""
    numbers = sorted(i + 1 for i in rows)
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"rows {numbers[0]}–{numbers[-1]}"
    return f"rows {', '.join(map(str, numbers))}"


def classes_text(classes: Mapping[int, object]) -> str:
    """'ranks 0, 2 | 1, 3': ranks of one class together, classes separated by |."""
    members: dict[object, list[str]] = {}
    for rank, kind in sorted(classes.items()):
        members.setdefault(kind, []).append(str(rank))
    return f"ranks {' | '.join(map(', '.join, members.values()))}"


def along(axes: Iterable[str]) -> str:
    """'dp and tp'; 'no axis' for no axes."""
    return " and ".join(axes) or "no axis"


def differing(kind: str, text: str, classes: Mapping[int, object], mesh: Mesh) -> Cause:
    """A cause for values that should be equal on all ranks. classes: rank -> a key of its value."""
    axes = tuple(mesh.differing(classes))
    return Cause(kind, axes, f"{text} along {along(axes)} ({classes_text(classes)})")


def scaled(factors: Mapping[int, float], mesh: Mesh) -> Cause:
    """A cause for tensors that are a multiple of the twin's. factors: rank -> factor."""
    values = list(factors.values())
    if max(values) - min(values) > 1e-4 * max(map(abs, values)):
        classes = {rank: "right" if abs(c - 1) < 1e-7 else times(c) for rank, c in factors.items()}
        phrase = ", ".join(f"{words} on rank {rank}" for rank, words in classes.items())
        return differing("scaled", f"{phrase}: differs", classes, mesh)
    axes, words = size_text(values[0], mesh)
    return Cause("scaled", axes, f"{times(values[0])}{words}")


def times(c: float) -> str:
    """'0.5 times the twin's'; for a factor near 1 the difference: '3.6e-05 of it more than the twin's'."""
    if abs(c - 1) >= NEAR:
        return f"{c:.4g} times the twin's"
    return f"{abs(c - 1):.2g} of it {'more' if c > 1 else 'less'} than the twin's"


def size_text(c: float, mesh: Mesh) -> tuple[tuple[str, ...], str]:
    """(axes of a size n where c is n or 1/n; the same as text); ((), '') if there are none."""
    for power, words in ((1, "the size of"), (-1, "1 over the size of")):
        size = lambda axes, power=power: mesh.size(axes) ** power
        fits = [axes for axes in mesh.sets_of_axes() if math.isclose(size(axes), c, rel_tol=1e-4)]
        if fits:
            return fits[0], f", {words} {' or '.join(' · '.join(axes) for axes in fits)}"
    return (), ""


@dataclass
class Parts:
    """The ranks' parts of one tensor.

    got, wanted: rank -> the part that it holds, and should hold; flat. where: rank -> the indices of the
    part's elements in the whole tensor. tolerance: the relative difference below which tensors count as
    equal. usual: the root mean square of the whole tensor. The difference of a part with a smaller root mean
    square is taken relative to `usual`.
    """

    mesh: Mesh
    tolerance: float
    usual: float = 0.0
    got: dict[int, torch.Tensor] = field(default_factory=dict)
    wanted: dict[int, torch.Tensor] = field(default_factory=dict)
    where: dict[int, torch.Tensor] = field(default_factory=dict)

    def off(self, least: float = 0.0) -> float:
        """The largest relative difference of any rank, infinite for NaN; 0 if no rank has a part. least: as
        in `apart`.
        """
        return max((self._off(rank, least) for rank in self.got), default=0.0)

    def _off(self, rank: int, least: float = 0.0) -> float:
        least = max(least, self.usual * math.sqrt(len(self.wanted[rank])))
        off = apart(self.got[rank], self.wanted[rank], least)
        return math.inf if math.isnan(off) else off

    def cause(self) -> Cause:
        """The first cause that fits: a factor, a missing sum or mean, an error on some ranks alone; otherwise
        UNEXPLAINED.
        """
        fits = {rank: factor(self.got[rank], self.wanted[rank]) for rank in self.got}
        multiples = all(rest <= self.tolerance and c for c, rest in fits.values())
        if multiples and any(abs(c - 1) > self.tolerance for c, _ in fits.values()):
            return scaled({rank: c for rank, (c, _) in fits.items()}, self.mesh)
        for axes in self.mesh.sets_of_axes():
            if cause := self._not_reduced(axes):
                return cause
        right = {rank: self._off(rank) <= self.tolerance for rank in self.got}
        if any(right.values()):
            right_ones = ranks_text(rank for rank in right if right[rank])
            return differing("some ranks", f"right on {right_ones} alone: differs", right, self.mesh)
        return UNEXPLAINED

    def _not_reduced(self, axes: tuple[str, ...]) -> Cause | None:
        """A cause if the sum or the mean over these axes is what each rank should have."""
        factors = []
        for group in self.mesh.groups(axes, sorted(self.got)):
            if any(not torch.equal(self.where[rank], self.where[group[0]]) for rank in group):
                return None  # these ranks hold different elements
            total = sum((self.got[rank].double() for rank in group), torch.zeros(()))
            fits = [factor(total, self.wanted[rank]) for rank in group]
            if any(rest > self.tolerance for _, rest in fits):
                return None
            factors += [c for c, _ in fits]
        over = along(axes)
        if all(math.isclose(c, 1, rel_tol=1e-4) for c in factors):
            return Cause("not summed", axes, f"never summed over {over}: its ranks' sum is the twin's")
        if all(math.isclose(c, self.mesh.size(axes), rel_tol=1e-4) for c in factors):
            return Cause("not averaged", axes, f"never averaged over {over}: its ranks' mean is the twin's")
        return None

    def cause_of_update(self) -> Cause:
        """The cause of a wrong update. The parts are the changes of the weights."""
        still = {rank: not self.got[rank].any() and bool(self.wanted[rank].any()) for rank in self.got}
        if any(still.values()):
            ranks = ranks_text(rank for rank in still if still[rank])
            return Cause("not updated", tuple(self.mesh.differing(still)), f"not changed at all on {ranks}")
        cause = self.cause()
        if cause.kind not in ("some ranks", "unexplained"):
            return cause
        for classes in self.copies().values():
            if len(set(classes.values())) > 1:
                return differing("copies differ", "its copies step differently", classes, self.mesh)
        return cause

    def copies(self) -> dict[bytes, dict[int, bytes]]:
        """Indices of a part, as bytes -> rank that holds this part -> its numbers, as bytes."""
        copies: dict[bytes, dict[int, bytes]] = {}
        for rank, tensor in self.got.items():
            copies.setdefault(self.where[rank].numpy().tobytes(), {})[rank] = tensor.numpy().tobytes()
        return copies


def of_rows(
    got: torch.Tensor, wanted: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float, each: int
) -> Cause | None:
    """A cause if a gradient is a weighted sum of the gradients of the batch's rows, as the twin's is, but
    with other weights. parts: the gradients of parts of the batch, of `each` rows.
    """
    places = [i for i, part in enumerate(parts) if part.isfinite().all() and part.any()]  # not padding alone
    if not places:
        return None
    basis = torch.stack([parts[i].double().flatten() for i in places], 1)
    mine, twins = (_weights(basis, t.double().flatten(), tolerance) for t in (got, wanted))
    if mine is None or twins is None or (twins.abs() < 1e-9).any():
        return None
    ratios = [round(float(r), 3) for r in mine / twins]
    if len(set(ratios)) == 1:
        return None
    runs: list[list] = []
    for i, ratio in zip(places, ratios):
        if runs and runs[-1][1:] == [i - 1, ratio]:
            runs[-1][1] = i
        else:
            runs.append([i, i, ratio])
    named = lambda first, last: rows_text(range(first * each, (last + 1) * each))
    often = lambda ratio: "once" if ratio == 1 else f"{ratio:g} times"
    phrase = ", ".join(f"{named(a, b)} {often(ratio)}" for a, b, ratio in runs if ratio)
    if 0.0 in ratios:
        gone = ", ".join(named(a, b) for a, b, ratio in runs if not ratio)
        in_all = len(parts) * each
        return Cause("rows missing", text=f"{gone} of {in_all} missing; {phrase} what they should count")
    of_means = min(ratios) < 1 < max(ratios)
    why = ": a mean of means, of shares with unequal numbers of tokens?" if of_means else ""
    return Cause("rows weighted", text=f"{phrase} what they should count{why}")


def _weights(basis: torch.Tensor, vector: torch.Tensor, tolerance: float) -> torch.Tensor | None:
    """The weights with which columns of `basis` sum to `vector`; None if none do, or if any vector would."""
    if basis.shape[1] >= len(vector) or not (basis.isfinite().all() and vector.isfinite().all()):
        return None
    weights = torch.linalg.lstsq(basis, vector.unsqueeze(1)).solution.squeeze(1)
    return weights if apart(basis @ weights, vector) <= max(tolerance, 1e-7) else None


def of_norms(
    got: Mapping[int, float],
    wanted: float,
    mesh: Mesh,
    tolerance: float,
    squares_of: Mapping[str, float],
    in_parts: Mapping[tuple[str, ...], Collection[str]],
) -> Cause:
    """The cause of a wrong norm in gradient clipping. squares_of: name -> the sum of squares of the twin's
    gradient. in_parts: axes -> the names of the gradients that ranks along these axes hold in parts. Each of
    these ranks has a copy of the other gradients.
    """
    near = lambda a, b: math.isclose(a, b, rel_tol=2 * max(tolerance, 1e-7))  # of squares
    squares = {rank: norm**2 for rank, norm in got.items()}
    copies_of = {
        axes: wanted**2 - sum(map(squares_of.__getitem__, names)) for axes, names in in_parts.items()
    }
    for axes, copies in copies_of.items():
        if near(copies, wanted**2):
            continue  # these axes hold next to nothing in parts
        averaged = copies + (wanted**2 - copies) / mesh.size(axes)
        if all(near(square, averaged) for square in squares.values()):
            text = f"the squares of what {along(axes)} holds in parts were averaged over it, not summed"
            return Cause("squares averaged", axes, text)
        groups = mesh.groups(axes, sorted(got))
        totals = [sum(squares[rank] for rank in group) - (len(group) - 1) * copies for group in groups]
        if all(near(total, wanted**2) for total in totals):
            text = f"of each rank's part alone: the squares were never summed over {along(axes)}"
            return Cause("norm of a part", axes, text)
    for axes, copies in copies_of.items():
        counted = {f"all that {along(axes)} has copies of": copies}
        counted |= squares_of if tolerance <= FINE else {}
        for what, some in counted.items():
            too_large = wanted**2 + (mesh.size(axes) - 1) * some
            if not near(too_large, wanted**2) and all(near(square, too_large) for square in squares.values()):
                text = f"the squares of {what} were counted {mesh.size(axes)} times, over {along(axes)}"
                return Cause("squares counted often", axes, text)
    cause = scaled({rank: norm / wanted for rank, norm in got.items()}, mesh)
    if len({f"{norm:.6g}" for norm in got.values()}) > 1:
        return Cause("norm of a part", cause.axes, f"{cause.text}, so ranks clip differently")
    return cause


# -- outputs of modules ----------------------------------------------------------------------------


def of_output(got: Mapping[int, list], whole: list, mesh: Mesh, tolerance: float) -> Cause | None:
    """Why a module's output on a rank is not a part (tokens and features) of its output in the twin. None if
    it is, or if the shapes do not allow a comparison. got: rank -> its outputs, one for each call. whole: the
    twin's.
    """
    near = lambda far: far is not None and bool((far <= tolerance).all())
    every = {rank: _distances(parts, whole) for rank, parts in got.items()}
    off = {rank: far for rank, far in every.items() if far is not None}
    if len(off) < len(got) or all(map(near, off.values())):
        return None
    if bad := [rank for rank, parts in got.items() if not all(part.isfinite().all() for part in parts)]:
        return Cause("not finite", text=f"not a finite number on {ranks_text(bad)}")
    for axes in mesh.sets_of_axes():
        groups = mesh.groups(axes, sorted(got))
        if all(near(_sum_off([got[rank] for rank in group], whole)) for group in groups):
            text = f"never summed over {along(axes)}: the sum of its ranks' outputs is the twin's"
            return Cause("output not summed", axes, text)
    right = {rank: tuple((far <= tolerance).tolist()) for rank, far in off.items()}
    if not any(map(any, right.values())):
        return UNEXPLAINED
    phrase = ", ".join(f"{sum(mine)} of {len(mine)} tokens of rank {rank}" for rank, mine in right.items())
    return Cause("some tokens", tuple(mesh.differing(right)), f"right for {phrase}")


def _sum_off(parts: list[list[torch.Tensor]], whole: list[torch.Tensor]) -> torch.Tensor | None:
    """`_distances` of the sum of several ranks' outputs; None for a single rank, or for unequal shapes."""
    shapes = {tuple(call.shape for call in calls) for calls in parts}
    same = len(parts) > 1 and len(shapes) == 1
    return _distances([sum(calls) for calls in zip(*parts)], whole) if same else None


def _distances(parts: list[torch.Tensor], whole: list[torch.Tensor]) -> torch.Tensor | None:
    """For each of at most `TOKENS` tokens of a rank, the distance to the nearest of the twin's tokens,
    relative to their mean length. A rank may have only some of the tokens, and only some of each token's
    features. None if the shapes do not fit.
    """
    mine, theirs = _tokens(parts), _tokens(whole)
    if mine is None or theirs is None or theirs.shape[1] % mine.shape[1]:
        return None
    mine = mine[torch.linspace(0, len(mine) - 1, min(len(mine), TOKENS)).long()]
    length = float(theirs.norm(dim=1).mean()) * math.sqrt(mine.shape[1] / theirs.shape[1])
    exact = "donot_use_mm_for_euclid_dist"
    far = [torch.cdist(mine, some, compute_mode=exact).amin(1) for some in theirs.split(mine.shape[1], 1)]
    best = min(far, key=lambda distances: float(distances.max()))
    return best.nan_to_num(math.inf) / max(length, NOTHING)


def _tokens(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """(tokens, features): the outputs of all calls of a module; None if their features differ in number."""
    parts = [part.double() for part in parts if part.dim() > 1]
    if not parts or len({part.shape[-1] for part in parts}) > 1:
        return None
    return torch.cat([part.flatten(0, -2) for part in parts])
