"""Random programs of ranks: a model follows all their interleavings.

A program has 2 to 4 ranks. It calls collectives in several groups, sends, and receives (some from any rank),
and waits for operations that it started. It has no second thread and no time limit.

`check` follows every interleaving. If the states of the ranks read as a hang, no rank may be able to take a
step, also when messages on their way have arrived. If nothing can happen and a rank has not ended, they must
read as a hang, unless a receive from any rank might take a send.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import NamedTuple

from three_axes.count.deadlock import Deadlock, read
from three_axes.count.moves import Begun, Channel, Moves, Operation, Snapshot, Waiting, any_source, sides_of
from three_axes.paper.collectives import needs

NUMBERS = 100  # elements of each tensor
COLLECTIVES = ("all_reduce", "barrier", "broadcast", "reduce")


class Begin(NamedTuple):
    """A step that starts an operation."""

    channel: Channel
    op: str
    root: int  # the root, or the other rank of a message
    waits: bool  # whether the next step of the rank waits for the end of the operation


class Wait(NamedTuple):
    """A step that waits for the end of an operation."""

    begun: int  # the operation's place among those that this rank has started, from 0


Step = Begin | Wait
Program = list[list[Step]]  # the steps of each rank


def random_program(draw: random.Random) -> Program:
    """A program whose operations mostly match: of fully random ones hardly any would end."""
    n = draw.choice([2, 2, 3, 3, 4])
    world = tuple(range(n))
    of_group = {}  # group -> its only collective; with several, ranks would disagree before they are blocked
    from_anybody = {}  # (target, tag) -> whether the target receives these messages from any rank
    ranks: list[list[Step]] = [[] for _ in world]
    for _ in range(draw.randint(1, 6 if n < 4 else 4)):
        if draw.random() < 0.5:
            members = draw.choice([world, *itertools.combinations(world, 2)])
            channel = Channel("collective", f"{members}", members)
            op, root = of_group.setdefault(members, (draw.choice(COLLECTIVES), draw.choice(members)))
        else:
            source, target = draw.sample(world, 2)
            channel, op = Channel("send", "world", world, source, target, draw.choice([0, 0, 1])), None
        sides = sides_of(channel)
        if not op and from_anybody.setdefault((target, channel.tag), draw.random() < 0.25):
            sides[target] = any_source(channel)
        for rank, its in sides.items():
            peer = root if op else target if its.kind == "send" else source
            ranks[rank].append(Begin(its, op or its.kind, peer, draw.random() < 0.6))
    for steps in ranks:
        if steps and draw.random() < 0.3:
            steps.insert(draw.randrange(len(steps)), steps.pop())
        if steps and draw.random() < 0.1:
            steps.pop()
    return [_with_waits(steps, draw) for steps in ranks]


def _with_waits(steps: list[Step], draw: random.Random) -> list[Step]:
    """Add a wait for each operation that does not wait at once: somewhere later, or at the rank's end."""
    out: list[Step] = []
    begun: list[int] = []
    for number, step in enumerate(steps):
        out.append(step)
        begun += [] if step.waits else [number]
        if begun and draw.random() < 0.3:
            out.append(Wait(begun.pop(draw.randrange(len(begun)))))
    return out + list(map(Wait, begun))


# -- the model ------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """What a rank has started so far, and what it waits for. If `waiting` is None, it does not wait."""

    begun: dict[Channel, Begun]
    begins: tuple[Operation, ...] = ()
    waiting: Waiting | None = None


def moments(me: int, steps: list[Step]) -> list[Moment]:
    """The moments through which rank `me` passes."""
    moves, begun, out = Moves(), [], []

    def note(waiting: Waiting | None = None) -> None:
        copy = {channel: Begun(its.count, its.last.copy()) for channel, its in moves.begun.items()}
        out.append(Moment(copy, tuple(begun), waiting))

    note()
    for step in steps:
        if isinstance(step, Begin):
            channel, place = step.channel, step.channel.members.index
            of, at = step.op.removesuffix("_any"), (place(me), place(step.root))
            places = needs(of, len(channel.members), *at, NUMBERS, held=True)
            number = moves.begin(channel, step.op if channel.kind == "collective" else "a message")
            begun.append(Operation(channel, number, tuple(channel.members[r] for r in places)))
            note()
        if isinstance(step, Wait) or step.waits:
            note(Waiting((begun[step.begun if isinstance(step, Wait) else -1],)))
            note()
    return out


State = tuple[int, ...]


class Model:
    """All interleavings of a program. A state has the number of moments that each rank has passed. After
    these it has, at the places of `takes`, the number of messages that receives from any rank took from each
    source.
    """

    def __init__(self, program: Program):
        self.n = len(program)
        self.moments = [moments(r, steps) for r, steps in enumerate(program)]
        received = {c: None for of in self.moments for c in of[-1].begun if c.kind == "recv_any"}
        pairs = [(c, source) for c in received for source in c.members if source != c.target]
        self.takes = {pair: self.n + i for i, pair in enumerate(pairs)}
        self.start = (0,) * (self.n + len(pairs))

    def has_ended(self, rank: int, state: State) -> bool:
        """Whether the rank has passed all its moments."""
        return state[rank] == len(self.moments[rank]) - 1

    def steps(self, state: State) -> list[State]:
        """The states that may follow this state: a rank takes a step, or a receive takes a message."""
        ranks = [r for r in range(self.n) if not self.has_ended(r, state) and self._may_leave(r, state)]
        taken = [i for (channel, source), i in self.takes.items() if self._may_take(channel, source, state)]
        return [(*state[:i], state[i] + 1, *state[i + 1 :]) for i in ranks + taken]

    def can_go_on(self, state: State) -> bool:
        """Whether a rank can take a step, now or when receives have taken messages."""
        return any(s[: self.n] != state[: self.n] or self.can_go_on(s) for s in self.steps(state))

    def _taken(self, channel: Channel, state: State) -> int:
        """The number of messages that a channel of receives from any rank has taken."""
        return sum(state[i] for (its, _), i in self.takes.items() if its == channel)

    def _may_take(self, channel: Channel, source: int, state: State) -> bool:
        sends = channel._replace(kind="send", source=source)
        sent, posted = self._count(source, sends, state), self._count(channel.target, channel, state)
        return sent > state[self.takes[channel, source]] and posted > self._taken(channel, state)

    def _may_leave(self, rank: int, state: State) -> bool:
        waiting = self.moments[rank][state[rank]].waiting
        return waiting is None or self._is_over(waiting.operations[0], state)

    def _count(self, rank: int, channel: Channel, state: State) -> int:
        return self.moments[rank][state[rank]].begun.get(channel, Begun()).count

    def look(self, rank: int, state: State) -> Snapshot:
        """What the recorder would report of the rank."""
        moment, ended = self.moments[rank][state[rank]], self.has_ended(rank, state)
        if not (ended or moment.waiting):
            return Snapshot(())
        waited = moment.waiting.operations if moment.waiting and not ended else ()
        stands = Waiting(tuple(self._as_seen(rank, o, state) for o in waited)) if waited else None
        return Snapshot((), stands, ended, moment.begun)

    def open(self, rank: int, state: State) -> list[Operation]:
        """The operations that the rank has begun and that have not ended."""
        begins = self.moments[rank][state[rank]].begins
        return [operation for operation in begins if not self._is_over(operation, state)]

    def _is_over(self, operation: Operation, state: State) -> bool:
        """Whether all ranks that the operation needs have started it. A receive from any rank is over if its
        channel has taken enough messages.
        """
        channel = operation.channel
        if channel.kind == "recv_any":
            return self._taken(channel, state) >= operation.number
        if (place := self.takes.get((any_source(channel), channel.source))) is not None:
            return state[place] >= operation.number
        sides = sides_of(channel)
        return all(self._count(r, sides[r], state) >= operation.number for r in operation.needs)

    def _as_seen(self, rank: int, operation: Operation, state: State) -> Operation:
        """The operation with the number of messages that receives from any rank have taken, if the recorder
        knows it. It does not know the number if earlier receives of the channel may not have ended.
        """
        if operation.channel.kind == "recv_any":
            begun = self._count(rank, operation.channel, state)
            if self._taken(operation.channel, state) >= begun - (operation.number == begun):
                return operation._replace(received=begun - 1)
        return operation

    def reading(self, state: State) -> Deadlock | None:
        return read([self.look(r, state) for r in range(self.n)])

    def reached(self) -> set[State]:
        """Every state that some interleaving reaches."""
        seen, open_ = {self.start}, [self.start]
        while open_:
            new = set(self.steps(open_.pop())) - seen
            seen |= new
            open_ += new
        return seen


def check(program: Program) -> None:
    """Raises AssertionError if the reading is wrong in some state of the program."""
    model = Model(program)
    reading = cache(model.reading)
    for state in model.reached():
        found, nexts = reading(state), model.steps(state)
        ends = all(model.has_ended(r, state) for r in range(model.n))
        if not (found or nexts or ends):
            # As far as the recorder knows, a receive from any rank might take a send: there is no reading.
            channels = [operation.channel for r in range(model.n) for operation in model.open(r, state)]
            unlike = any(c.kind == "recv_any" or (any_source(c), c.source) in model.takes for c in channels)
            assert unlike, ("not read as a hang", program, state)
        assert not (ends and found), ("has ended", program, state)
        assert not (found and model.can_go_on(state)), ("it can go on", program, state, str(found))
