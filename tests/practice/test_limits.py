"""How long an attempt may take, and the answer if it takes longer: a busy machine is not a mistake."""

import os
import subprocess
import sys

import pytest
import torch
from edits import edited
from test_exercises import EXERCISES

from drops import d02
from helpers.practice import runs
from helpers.practice.engine import Asked, OnRanks
from helpers.practice.exercise import INSIDE, stopped
from helpers.ranks.failure import RankError, RankStatus
from helpers.ranks.messages import Error

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("judges_share_worlds")]

WORDS = dict(hints=["?"], minutes=1, praise="", mistakes="")  # required by an exercise, and not tested here


def failed(kind: str, *seen: RankStatus) -> RankError:
    return RankError("no end\nThe ranks are alive.", kind, [0], True, list(seen))


def standing(line=None, op=None) -> RankStatus:
    """The status of a rank that runs this line of the attempt and waits in this operation; None: in none."""
    return RankStatus(where={"running": 1, "line": line, "stack": [], "in": op and {"op": op}})


@pytest.mark.parametrize(
    "error, kind, said",
    [
        (failed("timeout", standing(), standing()), "not counted", "none was in your code"),
        (failed("timeout", standing(), RankStatus()), "not counted", "one is in a single long operation"),
        (failed("timeout", standing(line=("a.py", 1, "f"))), "crashed", "Does every loop of yours end?"),
        (failed("raised", RankStatus(Error("Endless", "10 s", [], False))), "crashed", "Does every loop"),
        (failed("timeout", standing(line=("a.py", 1, "f"), op="recv")), None, ""),
        (failed("raised", RankStatus(Error("ValueError", "no", [], False))), None, ""),
    ],
)
def test_the_answer_to_a_call_that_was_stopped(error, kind, said):
    answer = stopped(error)
    assert (answer and answer.kind) == kind and said in getattr(answer, "text", "")


def test_many_printed_lines_are_given_as_the_reason():
    lines = "\n".join(map(str, range(800)))
    said = f"{lines}\n… 100 kB in 19,000 lines left out …\n{lines}\n"
    endless = RankStatus(Error("Endless", "10 s", [], False), said=said)
    assert "A rank printed 20,601 lines" in stopped(failed("raised", endless)).text


def test_a_solution_that_does_not_end_is_not_counted(capsys):
    def fails():
        raise RuntimeError("the course's own mistake")

    broken = OnRanks("broken", fails, tries=((1,),), inputs=lambda rank, n: [()], **WORDS)
    answer = broken.check(lambda: 1)
    assert answer.kind == "not counted" and "The solution itself" in answer.text


def test_an_error_of_pytorchs_own_has_a_sentence_before_it():
    """Autograd's engine refuses a backward that returns another shape: no line of the attempt raises."""

    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return dy[:1]

    ones = dict(inputs=lambda rank, n: [(torch.ones(3, requires_grad=True),)])
    ones |= dict(gradient=lambda arguments: torch.ones(3))
    twice = OnRanks("twice", lambda x: 2 * x, tries=((1,),), **ones, **WORDS)
    answer = twice.check(lambda x: Halves.apply(x))
    assert answer.kind == "crashed" and answer.text.startswith(INSIDE), answer


def test_waiting_uses_no_processor_time(monkeypatch):
    monkeypatch.setattr(runs, "LEAST", 1)  # the kernel's: ranks have their own
    slow = edited(d02.weighted_average, "total = => import time; time.sleep(1.5)⏎    total =")
    assert d02.average.check(slow).kind == "right"


@pytest.mark.slow
def test_a_loop_without_an_end_is_ended_by_its_processor_time():
    count = Asked("count", lambda: 1, **WORDS)

    def endless():
        while True:
            try:
                pass
            except Exception:
                pass

    answer = count.check(endless)
    assert answer.kind == "crashed" and "Does every loop of yours end?" in answer.text
    assert "10 s of processor time" in answer.text


@pytest.fixture(scope="module")
def busy():
    """One computing process for each core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


TIMED = ("d02.ring", "d04.loop", "d05.overlapped", "d11.placing", "d12.choice", "b4.mended")


@pytest.mark.parametrize(
    "name, times",
    [
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in TIMED),
        *(pytest.param(name, 3, marks=pytest.mark.exhaustive) for name in EXERCISES),
    ],
)
def test_every_solution_passes_beside_a_busy_machine(name, times, busy):
    for _ in range(times):
        answer = EXERCISES[name].check(EXERCISES[name].reference)
        assert answer.kind == "right", answer
