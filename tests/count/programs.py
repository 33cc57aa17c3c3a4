"""Random programs of ranks: a model follows all their interleavings, and real ranks run them.

A program has 2 to 4 ranks. It calls collectives in several groups, sends, and receives (some from any rank),
and waits for operations that it started. A rank may have a second thread that does some of this; the thread
may sleep first, and the rank may join it. An operation may have a limit, after which its wait ends. A main
thread may wait for ever.

`check` follows every interleaving of a program. If a hang is proven, no rank may be able to take a step. If
no rank can take a step, and each rank has ended or is blocked without a second thread, the hang must be
proven.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import ChainMap
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from three_axes.count.deadlock import Deadlock, prove
from three_axes.count.moves import (
    NEVER,
    PATIENT,
    Begun,
    Channel,
    Look,
    Moves,
    Operation,
    Waiting,
    anybodys,
    sides_of,
)
from three_axes.paper.collectives import needs

NUMBERS = 100  # elements of each tensor
COLLECTIVES = ("all_reduce", "barrier", "broadcast", "reduce")
SHORT = 0.7  # seconds of a limit and of a sleep


class Begin(NamedTuple):
    channel: Channel
    op: str
    root: int  # the root, or the other rank of a message
    waits: bool  # whether the next step of the thread waits for the end of the operation
    limit: float = NEVER


class Wait(NamedTuple):
    begun: int  # the operation's place among those that this thread has started, from 0


class Sleep(NamedTuple): ...


class Start(NamedTuple): ...


class Join(NamedTuple): ...


class Rest(NamedTuple):
    """The main thread waits for a lock that is never released."""


Step = Begin | Wait | Sleep | Start | Join | Rest
Program = list[list[list[Step]]]  # for each rank the steps of its main and its second thread (may be empty)


def random_program(draw: random.Random) -> Program:
    """A program whose operations mostly match, with some steps moved or removed. If all steps were random,
    hardly any program would end.
    """
    n = draw.choice([2, 2, 3, 3, 4])
    world = tuple(range(n))
    of_group = {}  # group -> its only collective; with several, ranks would disagree before they are blocked
    from_anybody = {}  # (target, tag) -> whether the target receives these messages from any rank
    ranks: list[list[list[Step]]] = [[[], []] for _ in world]
    threaded = draw.random() < 0.5
    for _ in range(draw.randint(1, 5 if n < 4 else 3)):
        aside = threaded and draw.random() < 0.4  # some ranks do it in their second thread
        where = {r: aside and draw.random() < 0.7 for r in world}
        name = " aside" if aside else ""
        if draw.random() < 0.5:
            members = draw.choice([world, *itertools.combinations(world, 2)])
            channel = Channel("collective", f"{members}{name}", members)
            op, root = of_group.setdefault(members, (draw.choice(COLLECTIVES), draw.choice(members)))
        else:
            source, target = draw.sample(world, 2)
            tag = draw.choice([0, 0, 1]) + 2 * aside
            channel, op = Channel("send", "world", world, source, target, tag), None
        sides = sides_of(channel)
        if not op and from_anybody.setdefault((target, tag), draw.random() < 0.25):
            sides[target] = anybodys(channel)
        for rank, its in sides.items():
            peer = root if op else target if its.kind == "send" else source
            limit = SHORT if draw.random() < 0.04 else NEVER
            begin = Begin(its, op or its.kind, peer, draw.random() < 0.6, limit)
            # One thread of a rank has all operations of a channel, so that these have one order.
            other = any(isinstance(s, Begin) and s.channel == its for s in ranks[rank][1])
            main = any(isinstance(s, Begin) and s.channel == its for s in ranks[rank][0])
            ranks[rank][other or (where[rank] and not main)].append(begin)
    for threads in ranks:
        for steps in threads:
            if steps and draw.random() < 0.3:
                steps.insert(draw.randrange(len(steps)), steps.pop())
            if steps and draw.random() < 0.1:
                steps.pop()
    made = [_with_threads(*(_with_waits(steps, draw) for steps in threads), draw) for threads in ranks]
    for main, _ in made:
        if draw.random() < 0.04:
            main.insert(draw.randint(0, len(main)), Rest())
    return made


def _with_waits(steps: list[Step], draw: random.Random) -> list[Step]:
    """Add a wait for each operation that does not wait at once: somewhere later, or at the end of
    the thread.
    """
    out: list[Step] = []
    begun: list[int] = []
    number = -1
    for step in steps:
        out.append(step)
        if isinstance(step, Begin):
            number += 1
            begun += [] if step.waits else [number]
        if begun and draw.random() < 0.3:
            out.append(Wait(begun.pop(draw.randrange(len(begun)))))
    return out + list(map(Wait, begun))


def _with_threads(main: list[Step], other: list[Step], draw: random.Random) -> list[list[Step]]:
    if not other:
        return [main, other]
    if draw.random() < 0.4:
        other = [Sleep(), *other]
    at = draw.randint(0, len(main))
    main = [*main[:at], Start(), *main[at:]]
    if draw.random() < 0.6:
        main.insert(draw.randint(at + 1, len(main)), Join())
    return [main, other]


# -- the model ------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """What a thread has started so far, and what it waits for. If `waiting` is None, it does not wait, or
    waits for something that the recorder does not know.
    """

    begun: dict[Channel, Begun]
    begins: tuple[Operation, ...] = ()
    waiting: Waiting | None = None
    joins: bool = False
    rests: bool = False


def moments(me: int, steps: list[Step]) -> list[Moment]:
    """The moments through which a thread of rank `me` passes."""
    moves, begun, out = Moves(), [], []

    def note(waiting: Waiting | None = None, joins: bool = False, rests: bool = False) -> None:
        copy = {channel: Begun(its.count, its.last.copy()) for channel, its in moves.begun.items()}
        out.append(Moment(copy, tuple(begun), waiting, joins, rests))

    note()
    for step in steps:
        if isinstance(step, Begin):
            channel, place = step.channel, step.channel.members.index
            places = needs(
                step.op.removesuffix("_any"),
                len(channel.members),
                place(me),
                place(step.root),
                NUMBERS,
                held=True,
            )
            others = tuple(channel.members[r] for r in places)
            number = moves.begin(channel, step.op if channel.kind == "collective" else "a message")
            operation = Operation(channel, number, others, step.limit)
            begun.append(operation)
            note()
            if step.waits:
                note(Waiting((operation,)))
                note()
        elif isinstance(step, Wait):
            note(Waiting((begun[step.begun],)))
            note()
        else:
            note(None, isinstance(step, Join), isinstance(step, Rest))
            note()
    return out


class Model:
    """All interleavings of a program. A state has the number of moments that each thread has passed. After
    these it has, at the places of `takes`, the number of messages that receives from any rank took from each
    source.
    """

    def __init__(self, program: Program):
        self.n = len(program)
        self.threads = [moments(r, steps) for r, threads in enumerate(program) for steps in threads]
        self.end = tuple(len(thread) - 1 for thread in self.threads)
        # For each rank, the moment of its main thread at which its second thread starts.
        self.starts = [self._at(r, steps) for r, (steps, _) in enumerate(program)]
        received = {c: None for thread in self.threads for c in thread[-1].begun if c.kind == "recv_any"}
        pairs = [(c, source) for c in received for source in c.members if source != c.target]
        self.takes = {pair: len(self.threads) + i for i, pair in enumerate(pairs)}
        self.start = (0,) * (len(self.threads) + len(pairs))

    @staticmethod
    def _at(me: int, steps: list[Step]) -> int:
        before = next((i for i, step in enumerate(steps) if isinstance(step, Start)), len(steps))
        return len(moments(me, steps[:before]))

    def _runs(self, thread: int, state: tuple[int, ...]) -> bool:
        """Whether the thread has been started, and has not ended."""
        is_started = not thread % 2 or state[thread - 1] >= self.starts[thread // 2]
        return is_started and state[thread] < self.end[thread]

    def steps(self, state: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The states that may follow this state."""
        threads = [t for t in self.all if self._runs(t, state) and self._may_leave(t, state)]
        taken = [i for (channel, source), i in self.takes.items() if self._may_take(channel, source, state)]
        return [(*state[:i], state[i] + 1, *state[i + 1 :]) for i in threads + taken]

    @property
    def all(self) -> range:
        """The threads' places in a state."""
        return range(len(self.threads))

    def _taken(self, channel: Channel, state: tuple[int, ...]) -> int:
        """The number of messages that a channel of receives from any rank has taken."""
        return sum(state[i] for (its, _), i in self.takes.items() if its == channel)

    def _may_take(self, channel: Channel, source: int, state: tuple[int, ...]) -> bool:
        sends = channel._replace(kind="send", source=source)
        sent = self._begun(source, state).get(sends, Begun()).count
        posted = self._begun(channel.target, state).get(channel, Begun()).count
        return sent > state[self.takes[channel, source]] and posted > self._taken(channel, state)

    def _may_leave(self, thread: int, state: tuple[int, ...]) -> bool:
        moment = self.threads[thread][state[thread]]
        if moment.joins:
            return state[thread + 1] == self.end[thread + 1]
        if moment.waiting is None:
            return not moment.rests
        (operation,) = moment.waiting.operations
        return operation.limit < NEVER or self._has_ended(operation, state)

    def _begun(self, rank: int, state: tuple[int, ...]) -> ChainMap:
        return ChainMap(*(self.threads[t][state[t]].begun for t in (2 * rank, 2 * rank + 1)))

    def look(self, rank: int, state: tuple[int, ...]) -> Look:
        """What the recorder would report of the rank: its main thread, and whether a second thread runs."""
        main, other = 2 * rank, 2 * rank + 1
        ended = state[main] == self.end[main]
        stands = None if ended else self.threads[main][state[main]].waiting
        if not (ended or stands):
            return Look(0)
        has_thread = self._runs(other, state)
        is_short = stands is not None and any(o.limit < PATIENT for o in stands.operations)
        seen = self._as_seen(rank, stands, state) if stands else None
        open_ = self._open(rank, state, stands)
        is_short |= any(o.limit < PATIENT for o in open_)
        why = "has a thread" * has_thread + "has a limit" * is_short
        return Look(0, seen, ended, dict(self._begun(rank, state)), open_, why)

    def _open(self, rank: int, state: tuple[int, ...], stands: Waiting | None) -> tuple[Operation, ...]:
        """The operations that the main thread has started, does not wait for now, and that have not ended."""
        before = self.threads[2 * rank][: state[2 * rank] + 1]
        begun = {o[:2]: o for moment in before for o in moment.begins}
        waited = stands.operations[0][:2] if stands else None
        return tuple(o for key, o in begun.items() if key != waited and not self._has_ended(o, state))

    def _has_ended(self, operation: Operation, state: tuple[int, ...]) -> bool:
        """Whether all ranks that the operation needs have started it. A receive from any rank has ended if
        its channel has taken enough messages.
        """
        channel = operation.channel
        if channel.kind == "recv_any":
            return self._taken(channel, state) >= operation.number
        if (place := self.takes.get((anybodys(channel), channel.source))) is not None:
            return state[place] >= operation.number
        sides = sides_of(channel)
        counts = [self._begun(r, state).get(sides[r], Begun()).count for r in operation.needs]
        return all(count >= operation.number for count in counts)

    def _as_seen(self, rank: int, waiting: Waiting, state: tuple[int, ...]) -> Waiting:
        """The wait with the number of messages that receives from any rank have taken, if the recorder knows
        it. It does not know the number if earlier receives of the channel may not have ended.
        """
        operations = []
        for operation in waiting.operations:
            if operation.channel.kind == "recv_any":
                begun = self._begun(rank, state)[operation.channel].count
                if self._taken(operation.channel, state) >= begun - (operation.number == begun):
                    operation = operation._replace(received=begun - 1)
            operations.append(operation)
        return waiting._replace(operations=tuple(operations))

    def proven(self, state: tuple[int, ...]) -> Deadlock | None:
        return prove([self.look(r, state) for r in range(self.n)])

    def reached(self) -> set[tuple[int, ...]]:
        """Every state that some interleaving reaches."""
        seen, open_ = {self.start}, [self.start]
        while open_:
            new = set(self.steps(open_.pop())) - seen
            seen |= new
            open_ += new
        return seen


def check(program: Program) -> bool:
    """Whether the program always ends. Raises AssertionError if the proof is wrong in some state."""
    model = Model(program)
    proven, always = cache(model.proven), True
    for state in model.reached():
        proof, nexts = proven(state), model.steps(state)
        ends = not any(model._runs(t, state) for t in model.all)
        looks = [model.look(r, state) for r in range(model.n)]
        if not (proof or nexts or ends) and all((k.stands or k.ended) and not k.why for k in looks):
            # As far as the recorder knows, a receive from any rank might take a send: no proof is possible.
            channels = [
                o.channel for look in looks for o in (look.stands or Waiting(())).operations + look.open
            ]
            unlike = any(c.kind == "recv_any" or (anybodys(c), c.source) in model.takes for c in channels)
            assert unlike, ("not proven", program, state)
        assert not (ends and proof), ("has ended", program, state)
        always &= ends or bool(nexts)
        assert not (proof and nexts), ("it may move", program, state, str(proof))
    return always


# -- on real ranks --------------------------------------------------------------------------------


def can_run(program: Program) -> bool:
    """Whether `run` can run the whole program, and a hang of it would be proven."""
    steps = [step for threads in program for steps in threads for step in steps]
    begun = [step for step in steps if isinstance(step, Begin)]
    if any(step.limit < NEVER for step in begun) or any(isinstance(step, (Start, Rest)) for step in steps):
        return False
    return not any(step.op == "recv_any" for step in begun) or check(program)


def run(program: Program) -> None:
    """Run this rank's part of the program."""
    import torch
    import torch.distributed as dist

    groups = {"world": dist.group.WORLD}
    of_all = [s for threads in program for steps in threads for s in steps if isinstance(s, Begin)]
    for name, members in sorted({(s.channel.group, s.channel.members) for s in of_all}):
        if name not in groups:
            groups[name] = dist.new_group(members)
    main, other = program[dist.get_rank()]

    def execute(steps: list[Step]) -> None:
        works = []
        for step in steps:
            if isinstance(step, Begin):
                x, group, peer = torch.ones(NUMBERS), groups[step.channel.group], step.root
                if step.op in ("send", "recv", "recv_any"):
                    begin = dist.isend if step.op == "send" else dist.irecv
                    works.append(begin(x, None if step.op == "recv_any" else peer, tag=step.channel.tag))
                else:
                    given = {"barrier": (), "all_reduce": (x,)}.get(step.op, (x, peer))
                    works.append(getattr(dist, step.op)(*given, group=group, async_op=True))
            elif isinstance(step, Sleep):
                time.sleep(SHORT)
            elif isinstance(step, Start):
                thread.start()
            elif isinstance(step, Join):
                thread.join()
            elif isinstance(step, Rest):
                threading.Event().wait()
            if isinstance(step, Wait) or (isinstance(step, Begin) and step.waits):
                works[step.begun if isinstance(step, Wait) else -1].wait()

    thread = threading.Thread(target=execute, args=(other,), daemon=True)
    execute(main)
    if thread.ident is not None:
        thread.join()


def on_ranks(programs: Iterable[Program]) -> list[float]:
    """Run programs on real ranks. Returns, for each that hangs, the seconds from the last start of an
    operation to the error.
    """
    from helpers.ranks.failure import RankError
    from helpers.ranks.world import World

    worlds, seconds = {n: World(n, timeout=60) for n in (2, 3, 4)}, []
    for program in programs:
        ends = check(program)
        try:
            worlds[len(program)].run(run, program)
            assert ends, program
        except RankError as e:
            assert not ends and e.kind == "deadlock", (program, str(e))
            last = [s.where["in"]["at"] for s in e.seen if s.where and s.where["in"]]
            seconds += [time.monotonic() - max(last)] if last else []
    for world in worlds.values():
        world.close()
    return seconds
