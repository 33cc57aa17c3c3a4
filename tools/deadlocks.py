"""Hold the proof of deadlocks against all that can happen: `python tools/deadlocks.py [--programs 20000]
[--ranks 0] [--seed 0]`.

A random program gives 2 to 4 ranks collectives in several groups, sends, receives, and waits for what was
begun. Every interleaving of it is followed. Where all who have not finished stand, the proof must say so
exactly if none of them can take a step, and from there no way may lead to the program's end.

--ranks: so many programs are run on real ranks as well, beside a busy process for each core. Those that end
must end, the others must be told. Prints how long after the last movement that was, in the median.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from three_axes.count.deadlock import Deadlock, prove
from three_axes.count.moves import Begun, Channel, Moves, Operation, sides_of
from three_axes.paper.collectives import needs

NUMBERS = 100  # in each tensor
COLLECTIVES = ("all_reduce", "barrier", "broadcast", "reduce")


class Begin(NamedTuple):
    channel: Channel
    op: str
    root: int  # or peer
    waits: bool  # for its end, at once


class Wait(NamedTuple):
    begun: int  # which of this rank's operations, from 0


Program = list[list[Begin | Wait]]  # for each rank


def random_program(draw: random.Random) -> Program:
    """Mostly what fits together, with some steps moved or lost: of others hardly one would end."""
    n = draw.choice([2, 2, 3, 3, 4])
    world = tuple(range(n))
    of_group = {}  # each has one operation: else most programs would disagree before they stand
    ranks: list[list[Begin]] = [[] for _ in world]
    for _ in range(draw.randint(1, 5 if n < 4 else 3)):
        if draw.random() < 0.5:
            members = draw.choice([world, *itertools.combinations(world, 2)])
            channel = Channel("collective", str(members), members)
            op, root = of_group.setdefault(members, (draw.choice(COLLECTIVES), draw.choice(members)))
        else:
            source, target = draw.sample(world, 2)
            channel, op = Channel("send", "world", world, source, target, draw.choice([0, 0, 1])), None
        for rank, its in sides_of(channel).items():
            peer = root if op else target if its.kind == "send" else source
            ranks[rank].append(Begin(its, op or its.kind, peer, draw.random() < 0.6))
    for steps in ranks:
        if steps and draw.random() < 0.3:
            steps.insert(draw.randrange(len(steps)), steps.pop())
        if steps and draw.random() < 0.1:
            steps.pop(draw.randrange(len(steps)))
    return [_with_waits(steps, draw) for steps in ranks]


def _with_waits(steps: list[Begin], draw: random.Random) -> list[Begin | Wait]:
    """What is not waited for at once is waited for later: at the latest at the end, as a call does."""
    out: list[Begin | Wait] = []
    begun: list[int] = []
    for number, step in enumerate(steps):
        out.append(step)
        begun += [] if step.waits else [number]
        if begun and draw.random() < 0.3:
            out.append(Wait(begun.pop(draw.randrange(len(begun)))))
    return out + list(map(Wait, begun))


# -- the model ------------------------------------------------------------------------------------


class Rank:
    """One rank's program as a row of moments: what it has begun by then, and what it stands in."""

    def __init__(self, me: int, steps: list[Begin | Wait]):
        self._moves, begun = Moves(), []
        self.looks, self.stands = [], []
        self._note(None)
        for step in steps:
            if isinstance(step, Begin):
                channel, op, root, _ = step
                place = channel.members.index
                places = needs(op, len(channel.members), place(me), place(root), NUMBERS, held=True)
                number = self._moves.begin(channel, op if channel.kind == "collective" else "a message")
                begun.append(Operation(channel, number, tuple(channel.members[r] for r in places)))
                self._note(None)
            if isinstance(step, Wait) or step.waits:
                operation = begun[step.begun if isinstance(step, Wait) else -1]
                self._moves.stand([operation])
                self._note(operation)
                self._moves.go_on()
                self._note(None)

    def _note(self, operation: Operation | None) -> None:
        look = self._moves.look()
        begun = {channel: Begun(its.count, its.first[:]) for channel, its in look.begun.items()}
        self.looks.append(look._replace(begun=begun))
        self.stands.append(operation)


class Model:
    """All interleavings of a program. A state says how many moments each rank has passed."""

    def __init__(self, program: Program):
        self.ranks = [Rank(me, steps) for me, steps in enumerate(program)]
        self.end = tuple(len(rank.looks) - 1 for rank in self.ranks)
        self.ends = cache(self._ends)

    def steps(self, state: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What may come next."""
        return [
            (*state[:r], at + 1, *state[r + 1 :])
            for r, at in enumerate(state)
            if at < self.end[r] and self._may_leave(self.ranks[r].stands[at], state)
        ]

    def _may_leave(self, operation: Operation | None, state: tuple[int, ...]) -> bool:
        if operation is None:
            return True
        sides = sides_of(operation.channel)
        of = {r: self.ranks[r].looks[state[r]].begun.get(sides[r], Begun()).count for r in operation.needs}
        return all(count >= operation.number for count in of.values())

    def proven(self, state: tuple[int, ...]) -> Deadlock | None:
        looks = [rank.looks[at] for rank, at in zip(self.ranks, state)]
        return prove(looks, {r for r, at in enumerate(state) if at == self.end[r]})

    def reached(self) -> set[tuple[int, ...]]:
        """Every state that some interleaving comes to."""
        start = (0,) * len(self.ranks)
        seen, open_ = {start}, [start]
        while open_:
            new = set(self.steps(open_.pop())) - seen
            seen |= new
            open_ += new
        return seen

    def _ends(self, state: tuple[int, ...]) -> bool:
        """Whether some interleaving comes from here to the end."""
        return state == self.end or any(map(self.ends, self.steps(state)))


def check(program: Program) -> bool | None:
    """Whether the program always ends; None where ranks bring different collectives to one meeting. Raises
    AssertionError where the proof is wrong.
    """
    model, stuck = Model(program), []
    for state in model.reached():
        proof = model.proven(state)
        if proof and proof.kind == "disagree":
            return None
        is_stuck = state != model.end and not model.steps(state)
        assert (proof is not None) == is_stuck, (program, state, proof)
        if is_stuck:
            stuck.append(state)
            unfinished = {r for r, at in enumerate(state) if at < model.end[r]}
            assert set(proof.ranks) <= unfinished and not model.ends(state), (program, state, proof)
    return not stuck


# -- on real ranks --------------------------------------------------------------------------------


def run(program: Program) -> None:
    """On a rank: its part of the program."""
    import torch
    import torch.distributed as dist

    groups, works = {"world": dist.group.WORLD}, []
    for channel in sorted({s.channel for steps in program for s in steps if isinstance(s, Begin)}, key=str):
        if channel.group not in groups:
            groups[channel.group] = dist.new_group(channel.members)
    for step in program[dist.get_rank()]:
        if isinstance(step, Begin):
            channel, op, root, _ = step
            x, group = torch.ones(NUMBERS), groups[channel.group]
            if op in ("send", "recv"):
                works.append((dist.isend if op == "send" else dist.irecv)(x, root, tag=channel.tag))
            else:
                given = {"barrier": (), "all_reduce": (x,)}.get(op, (x, root))
                works.append(getattr(dist, op)(*given, group=group, async_op=True))
        if isinstance(step, Wait) or step.waits:
            works[step.begun if isinstance(step, Wait) else -1].wait()


def on_ranks(programs: Iterator[Program], count: int) -> list[float]:
    """Run so many on real ranks. Seconds from the last movement to the message, of each that cannot end."""
    from helpers.ranks.failure import RankError
    from helpers.ranks.world import World

    worlds = {n: World(n, timeout=60) for n in (2, 3, 4)}
    seconds = []
    for program in itertools.islice(programs, count):
        ends = check(program)
        try:
            worlds[len(program)].run(run, program)
            assert ends is not False, program
        except RankError as e:
            assert not ends and (e.kind == "deadlock" or ends is None), (program, str(e))
            last = [s.where["in"]["at"] for s in e.seen if s.where and s.where["in"]]
            seconds += [time.monotonic() - max(last)] if ends is False else []
    for world in worlds.values():
        world.close()
    return seconds


def _busy() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    found = [check(random_program(draw)) for _ in range(args.programs)]
    print(
        f"{args.programs} programs: {found.count(True)} always end, {found.count(False)} need not,"
        f" {found.count(None)} disagree. The proof was right in every state."
    )
    if args.ranks:
        others = [multiprocessing.Process(target=_busy, daemon=True) for _ in range(os.cpu_count())]
        for other in others:
            other.start()
        seconds = on_ranks((random_program(draw) for _ in itertools.count()), args.ranks)
        for other in others:
            other.kill()
        median, most = statistics.median(seconds), max(seconds)
        print(f"{args.ranks} on ranks: {len(seconds)} were told that could not end, and no other.")
        print(f"Seconds after the last movement: {median:.2f} in the median, {most:.2f} at most.")


if __name__ == "__main__":
    main()
