"""Counting the collectives of a job: `counting()` inside ranks, and `three_axes count` on a script."""

import json
import pickle
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers import World, count_from_here, counted_so_far, peak_memory, rank_state
from helpers.ranks.current import span
from three_axes import counting, pytorch_private
from three_axes.count import counter, deadlock, watch
from three_axes.count.against import against
from three_axes.count.moves import Begun, Channel, GpuProgress, Operation, Snapshot, Waiting
from three_axes.count.report import CollectiveCount, Report
from three_axes.count.states import State, mismatched
from three_axes.ledger import Ledger
from three_axes.lines import Line
from three_axes.paper.collectives import algorithmic_bytes
from three_axes.plan import MODELS, Job, Layout
from three_axes.plan.frameworks import find_framework
from three_axes.plan.traffic import calls

ROOT = Path(__file__).resolve().parents[2]


def test_a_block_is_counted_and_nothing_outside_it(world):
    def block():
        dist.all_reduce(torch.ones(7))
        with counting() as traffic:
            dist.all_reduce(torch.ones(1000))
            with pytest.raises(RuntimeError, match="when the block has ended"):
                traffic.calls("all_reduce")
        dist.all_reduce(torch.ones(7))
        return traffic.payload, traffic.calls("all_reduce"), traffic.wire, traffic.matrix, repr(traffic)

    payload, calls, wire, matrix, shown = world.run(block)[0]
    assert payload == [4000] * 4 and calls == 1 and "no optimizer stepped" in shown
    if wire[0] is not None:
        assert all(6000 <= sent < 8000 for sent in wire) and matrix[0][3] >= 6000
    assert world.traffic.calls("all_reduce") == 3  # the World counts on, beside it


def test_axes_that_span_all_ranks_keep_their_names(world):
    def meshes():
        dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        tp = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        net = torch.nn.Linear(64, 64, bias=False)
        with counting(mesh=[dp, tp]) as traffic:
            fully_shard(net, mesh=dp)
            net(torch.ones(2, 64)).sum().backward()
            (functional.all_reduce(torch.ones(50), "sum", tp) + 1).sum()
            dist.all_reduce(torch.ones(3))  # both axes have all ranks, so its axis is "world"
        with counting(mesh=dp) as alone:
            dist.all_reduce(torch.ones(3))
        return {(r.op, r.axis): r.payload for r in traffic.ranks[0]}, alone.ranks[0][0].axis

    rows, alone = world.run(meshes)[0]
    assert rows["reduce_scatter", "dp"] == 64 * 64 * 4
    assert rows["all_reduce", "tp"] == 200 and rows["all_reduce", "world"] == 12
    assert alone == "dp"


def test_steps_end_with_the_optimizer(world):
    def steps():
        from torch.distributed.optim import ZeroRedundancyOptimizer

        net = DistributedDataParallel(torch.nn.Linear(32, 32))
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        with counting(trace=True) as traffic:
            for _ in range(5):
                net(torch.ones(2, 32)).sum().backward()
                optimizer.step()
            dist.barrier()
        if dist.get_rank():
            return None
        one = traffic.steps[0]
        return one.number, one.further, one.same, [r.op for r in one.after], traffic.json(), traffic.trace()

    number, further, same, after, told, trace = world.run(steps)[0]
    assert (number, further, same, after) == (5, 3, True, ["barrier"])
    rows = {row["collective"]: row for row in told["ranks"][2]["each"]}
    assert rows["all_reduce"]["calls"] == 1 and rows["broadcast"]["calls"] > 0  # called later in the step
    assert json.loads(json.dumps(told)) == told
    check_format(trace, 4)
    names = {(e["pid"], e["name"]) for e in trace["traceEvents"]}
    assert (3, "step 5") in names and (0, "all_reduce") in names and (1, "memory") in names


def test_a_timeline_can_be_saved(world, tmp_path):
    def step():
        with span("F", 0):
            a = dist.all_reduce(torch.ones(100_000), async_op=True)
            b = dist.all_reduce(torch.ones(100_000), async_op=True)
            a.wait(), b.wait()

    world.run(step)
    world.timeline.save(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    check_format(trace, 4)
    sent = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "all_reduce"]
    assert len(sent) == 8 and len({e["tid"] % 1000 for e in sent}) == 2  # two spans at once need two rows


def test_a_rank_keeps_its_state_and_counts_from_where_it_is_asked():
    with pytest.raises(RuntimeError, match=r"rank_state\(\) is for a function that runs on a rank"):
        rank_state()

    def first():
        rank_state()["kept"] = torch.ones(1000)
        dist.all_reduce(torch.ones(10))
        count_from_here()
        dist.all_reduce(torch.ones(20))
        return [row.payload for row in counted_so_far()]

    def second():
        peak_memory(reset=True)
        torch.ones(50_000).sum()
        return peak_memory(), len(rank_state()["kept"])

    with World(2, memory=1e6) as pair:
        assert pair.run(first) == [[80]] * 2 and pair.traffic.payload == [80] * 2
        assert all(peak >= 200_000 and kept == 1000 for peak, kept in pair.run(second))


def check_format(trace: dict, ranks: int) -> None:
    """Check that a trace has the Trace Event Format. On one row, two spans are nested or do not overlap."""
    rows: dict[tuple[int, int], list] = {}
    for event in json.loads(json.dumps(trace))["traceEvents"]:
        assert event["ph"] in "XMC" and isinstance(event["pid"], int) and event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            start, length = (round(1000 * event[key], 3) for key in ("ts", "dur"))
            assert start == int(start) and length == int(length), "whole nanoseconds, as Perfetto reads them"
            rows.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
        elif event["ph"] == "C":
            assert event["ts"] >= 0 and all(value >= 0 for value in event["args"].values())
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(rows) <= named and {pid for pid, _ in named} == set(range(ranks))
    threads = [tid for _, tid in named]  # Perfetto merges a row whose number is 0 or that of a process
    assert len(set(threads)) == len(threads) and not set(threads) & {pid for pid, _ in named}
    for spans in rows.values():
        open_ = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1]
            open_.append(end)


def test_a_block_that_raises_is_not_waited_for(world):
    def raises():
        with suppress(ValueError), counting() as traffic:
            dist.all_reduce(torch.ones(4))
            if dist.get_rank() == 1:
                raise ValueError("no good")
        return traffic.calls("all_reduce")

    assert world.run(raises) == [1] * 4


SCRIPT = """
import argparse, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
args = parser.parse_args()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
fully_shard(net, mesh=mesh["dp"])
stage = PipelineStage(net, mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=mesh.get_group("pp"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).square().mean())
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(args.steps):
    x = torch.ones(4, 32)
    schedule.step(x) if mesh.get_local_rank("pp") == 0 else schedule.step(target=x)
    optimizer.step(), optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_script_is_counted_unchanged(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    files = "--json", "counted.json", "--trace", "step.json"
    done = counted(tmp_path, *files, "train.py", "--steps", "5", ranks=4)
    assert done.returncode == 0, done.stderr
    assert "train.py: 4 ranks, 5 steps of the optimizer" in done.stdout
    assert "each of steps 3–5" in done.stdout and "differ" not in done.stdout
    told = json.loads((tmp_path / "counted.json").read_text())
    first, last = ({(r["axis"], r["collective"]): r for r in told["ranks"][i]["each"]} for i in (0, 3))
    size = 2 * (32 * 32 + 32) * 4
    assert first["dp", "reduce_scatter"]["payload"] == size and first["dp", "all_gather"]["ranks"] == [0, 1]
    assert first["pp", "send"]["calls"] == last["pp", "recv"]["calls"] == 2
    assert first["pp", "send"]["payload"] == 4 * 32 * 4 and last["dp", "all_gather"]["ranks"] == [2, 3]
    if (sent := told["ranks"][0]["wire"]) is not None:
        must = sum(row["must_send"] for row in told["ranks"][0]["total"])
        assert must < sent < 3 * must + 50_000  # gloo's reduce-scatter sends twice; messages have headers
    check_format(json.loads((tmp_path / "step.json").read_text()), 4)


def counted(tmp_path, *arguments: str, ranks: int) -> subprocess.CompletedProcess:
    return forked.command("three_axes", "count", *arguments, cwd=tmp_path, ranks=ranks)


@pytest.mark.slow
def test_a_script_that_leaves_at_once_or_fails(tmp_path):
    begin = "import os, sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    begin += "dist.all_reduce(torch.ones(5))\nprint('here', flush=True)\n"
    (tmp_path / "leaves.py").write_text(begin + "try: os._exit(0)\nexcept BaseException: sys.exit(7)")
    done = counted(tmp_path, "-m", "leaves", ranks=2)
    assert done.returncode == 0 and "no optimizer stepped" in done.stdout, done.stderr
    (tmp_path / "closes.py").write_text(begin + "dist.destroy_process_group()\nsys.stdout.close()")
    done = counted(tmp_path, "closes.py", ranks=2)
    assert done.returncode == 0 and "no optimizer stepped" in done.stderr, done.stderr
    (tmp_path / "fails.py").write_text(begin + "raise ValueError('its own')")
    done = counted(tmp_path, "fails.py", ranks=2)
    assert done.returncode and "ValueError: its own" in done.stderr and "collective" not in done.stdout


@pytest.mark.slow
def test_a_group_that_only_ddp_still_holds_is_not_freed_in_the_script(tmp_path):
    """To free it is to wait for a thread of gloo's, which may wait for Python: some runs never ended."""
    (tmp_path / "local.py").write_text(
        "import weakref, torch, torch.distributed as dist\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))\n"
        "    model(torch.ones(8, 64)).sum().backward()\n"
        "    group = weakref.ref(dist.group.WORLD)\n"
        "    dist.destroy_process_group()\n"
        "    return group\n"
        "print('kept:', main()() is not None)\n"
    )
    done = counted(tmp_path, "local.py", ranks=2)
    assert done.returncode == 0 and "kept: True" in done.stdout, done.stderr


WATCHED = {  # name -> (number of ranks, the script after its first four lines, words that it must print)
    "a rank ends first": (
        2,
        "for _ in range(4 if rank == 0 else 5):\n    dist.all_reduce(x)",
        [
            "rank 0 ended its script after all_reduce number 4 of world, float32[3]",
            "rank 1 began all_reduce number 5 of world, float32[3] last, in train.py, line 6:",
            "rank 0 did not come, for it has ended.",
        ],
    ),
    "a rank ends before it is looked at": (
        2,
        "if rank: dist.all_reduce(x)",
        ["rank 0 ended its script before any collective", "rank 0 did not come, for it has ended."],
    ),
    "a rank has left its last collective, and is elsewhere": (
        3,
        "dist.all_reduce(x)\nif rank == 2: time.sleep(3) or exit(5)\nwhile rank == 1: time.sleep(0.1)\n"
        "dist.all_reduce(x)",
        ["    rank 1 began all_reduce number 1 of world, float32[3] last, and is in train.py, line 7:"],
    ),
    "gloo aborts the process that brought fewer bytes": (
        3,
        "def tower(): dist.all_reduce(torch.ones(2000))\ndef text(): dist.all_reduce(torch.ones(100))\n"
        "if rank < 2: tower()\ntext()",
        [
            "rank 2 began all_reduce number 1 of world, float32[100] last, in train.py, line 6:",
            "ranks 0 and 1 began all_reduce number 1 of world, float32[2000] last, in train.py, line 5:",
        ],
    ),
    "a thread still acts": (
        2,
        "if rank == 0: threading.Timer(7, dist.send, (x, 1)).start()\nif rank == 1: dist.recv(x, 0)\n"
        "dist.barrier()",
        [
            "no counted operation has begun and no counted wait has ended for 5 s:",
            "rank 0 waits in barrier number 1 of world: train.py, line 7:",
            "rank 1 waits in recv number 1 from rank 0 of world, float32[3]: train.py, line 6:",
            "rank 0 waits to meet in barrier with rank 1 (line 7); rank 1 waits to receive from rank 0",
            "rank 0 has a thread 'Thread-",
        ],
    ),
    "a rank raises while others wait for it": (
        2,
        "state = {}\nif rank == 0: state['step']\ndist.all_reduce(x)",
        [
            "rank 0 raised KeyError: 'step', in train.py, line 6:",
            "rank 1 began all_reduce number 1 of world, float32[3] last, in train.py, line 7:",
        ],
    ),
    # gloo raises on rank 0 when rank 1's connection closes, and the script continues.
    "a rank is freed by another's end": (
        2,
        "if rank == 0:\n    try: dist.all_reduce(x)\n    except RuntimeError: print('goes on')",
        [],
    ),
}
# Lines 1 and 2. They end when all ranks have their connections: one that has not would raise there if another
# ended meanwhile. They wait through the store, which is not counted.
ALL_THERE = (
    "import threading, time, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo'); s = dist.distributed_c10d._get_default_store();"
    " s.set(f'there{dist.get_rank()}', ''); s.wait([f'there{r}' for r in range(dist.get_world_size())])\n"
)
# those that end by themselves
GO_ON = "a thread still acts", "a rank is freed by another's end"


@pytest.mark.parametrize("name", WATCHED)
def test_watch_prints_where_ranks_are_and_ends_a_script_that_hangs(tmp_path, name):
    size, script, said = WATCHED[name]
    (tmp_path / "train.py").write_text(f"{ALL_THERE}rank = dist.get_rank()\nx = torch.ones(3)\n{script}\n")
    done = counted(tmp_path, "--watch", "--exit", "75", "train.py", ranks=size)
    assert all(words in done.stdout for words in said), done.stdout + done.stderr
    assert (done.returncode == 0) is (name in GO_ON) and ("means nothing" in done.stdout) <= (name in GO_ON)
    assert done.stdout.count("in this job") == (len(said) > 0), "all notes are in one block"


def test_places_are_printed_once_and_again_when_they_change_or_after_a_minute(monkeypatch):
    clock, said = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), []
    for module in (watch, deadlock):
        monkeypatch.setattr(module, "time", clock)
    counter = SimpleNamespace(size=1, store=None, find_store=lambda: None)
    watched = watch.Watch(counter, said.append, None)
    watched.stop()

    def stays(seconds: int, moves: int, line: int) -> int:
        """Let the rank stay `seconds` in `line`. Returns the number of notes so far."""
        for beat in range(seconds):
            watched._judge([State(beat, Snapshot((moves,)), Line("train.py", line, "step"))])
            clock.now += 1
        return len(said)

    assert stays(10, 1, 7) == 1 and "rank 0 began no collective, and is in train.py, line 7" in said[0]
    assert stays(10, 2, 7) == 1, "a rank that moves in the same line gets no second note"
    assert stays(10, 3, 8) == 2 and "line 8" in said[1]
    assert stays(4, 4, 9) == 2 and stays(10, 5, 7) == 2
    clock.now += watch.AGAIN
    assert stays(10, 6, 7) == 3


PAIR = Channel("collective", "0", (0, 1))


@pytest.mark.parametrize("answers, ends", [(True, True), (False, False)])
def test_exit_ends_a_job_in_which_each_rank_has_waited_for_a_minute(monkeypatch, answers, ends):
    """It does not if a process was stopped, so that its rank wrote no new state."""
    clock, said, ended = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), [], []
    for module in (watch, deadlock):
        monkeypatch.setattr(module, "time", clock)
    counter = SimpleNamespace(size=2, rank=0, store=None, find_store=lambda: None)
    watched = watch.Watch(counter, said.append, lambda: ended.append(clock.now))
    watched.stop()
    watched._store = SimpleNamespace(add=lambda *_: 1, set=lambda *_: None, wait=lambda *_: None)
    stands = Snapshot((1,), Waiting((Operation(PAIR, 1, (0, 1)),)), begun={PAIR: Begun(1)})
    for second in range(100):
        beat = second if answers else 0
        if watched._judge([State(beat, stands), State(9, Snapshot((1,), ended=True))]):
            break
        clock.now += 1
    assert bool(ended) is ends and all(60 < now < 70 for now in ended)
    assert ("no rank has moved for 60 s" in said[-1]) is ends
    assert ("rank 0 waits for rank 1, which did not come: it has finished." in said[-1]) is ends


def test_unequal_arguments_of_one_collective_are_found():
    oldest = {"channel": PAIR, "nth": 3, "signature": "all_reduce of float32[2]"}
    one = State(1, Snapshot((1,)), gpu=GpuProgress(12, 2, oldest), begun={PAIR: [(12, "barrier")]})
    other = State(1, Snapshot((1,)), begun={PAIR: [(2, "barrier"), (3, "all_reduce of float32[3]")]})
    (words,) = mismatched({0: one, 1: other})
    assert "number 3 of ranks 0 and 1" in words and "rank 1: all_reduce of float32[3]" in words
    assert not [*mismatched({0: one, 1: other._replace(begun={PAIR: other.begun[PAIR][:1]})})]


def test_a_report_from_the_store_holds_only_known_classes():
    (told, missing) = (counter.RankReport(Report(rows=[CollectiveCount("send", "dp")]), rank=1), object())
    store = SimpleNamespace(wait=lambda *_: None, get=lambda rank: pickle.dumps([missing, told][int(rank)]))
    with counting() as traffic:
        pass
    traffic._counter.store = store
    assert traffic._counter.report_of(1, 0) == told
    assert traffic._counter.report_of(0, 0) is None, "a class that no report has"


def test_collectives_that_had_not_ended_are_mentioned():
    with counting() as traffic:
        pass
    traffic._mine.report.under_way = 3
    said = "nobody waited for them: rank 0 3. Their bytes on the wire are n/a"
    assert any(said in sentence for sentence in traffic.between_ranks())


def test_no_waiting_is_reported_of_ranks_that_shared_a_gpu():
    with counting() as traffic:
        pass
    traffic.between_ranks()  # gathers the reports of all ranks
    tell = lambda rank, gpu: counter.RankReport(
        Report(rows=[CollectiveCount("send", "dp", waited=1.0 + rank)]), rank=rank, gpu=gpu
    )
    for gpus, said in (("aab", True), ("abc", False), (("", "", ""), False)):
        traffic._reports = [tell(rank, gpu) for rank, gpu in enumerate(gpus)]
        traffic.missing, traffic.ranks = [], [told.report.rows for told in traffic._reports]
        told = traffic.between_ranks()
        shared = "ranks 0 and 1 shared a GPU and took turns: seconds mean nothing"
        assert (shared in told) is said and any("waited least" in s or "alike" in s for s in told) is not said


@pytest.mark.slow
def test_the_documented_run_prints_what_the_manual_shows(tmp_path):
    page = (ROOT / "docs" / "counting.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    for name, kind in (("config.json", "json"), ("train.py", "python")):
        (tmp_path / name).write_text(next(text for language, text in blocks if language == kind))
    job = "--model config.json --batch 8 --seq 64 --microbatch 2 --dp 4"
    done = counted(tmp_path, *job.split(), "train.py", ranks=4)
    shown = next(text for _, text in blocks if "steps of the optimizer" in text)
    times = r" +[\d.]+ ms|─+|, [\d.]+ to [\d.]+ s|rank \d waited.*|all waited.*"
    untimed = lambda text: re.sub(times, "", text)
    words = lambda text: [" ".join(line.split()) for line in untimed(text).strip().splitlines()]
    assert words(done.stdout) == words(shown), done.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["--model", "llama-3-8b", "train.py"], "--model needs --batch and --seq too"),
        (["--json", "no/where.json", "train.py"], "no such folder"),
        (["train.py"], "called no collective in the process that was counted. Ranks that a script starts"),
    ],
)
def test_a_run_that_cannot_be_counted_gets_a_sentence(tmp_path, arguments, sentence):
    (tmp_path / "train.py").write_text("print('nothing')")
    done = counted(tmp_path, *arguments, ranks=1)
    assert sentence in done.stdout + done.stderr and "Traceback" not in done.stderr


# -- predicted and counted -----------------------------------------------------------------------


def as_predicted(job: Job, layout: Layout) -> list[CollectiveCount]:
    """The rows that rank 0 would count if the job called exactly the collectives of the theory."""
    sent = lambda c: algorithmic_bytes(c.op, c.payload, layout.sizes[c.axis])
    numbers = lambda c: "float32" if c.op == "reduce_scatter" else "bfloat16"
    row = lambda c: CollectiveCount(c.op, c.axis, c.calls, c.payload, sent(c), types={numbers(c)})
    return [row(c) for c in calls(job, layout)]


TITAN = find_framework("torchtitan")
PIPED = dict(dp=4, pp=2, microbatch=1)


@pytest.mark.parametrize(
    "layout, change, phrase",
    [
        (dict(dp=8), lambda rows: rows, "predicted and counted agree"),
        (PIPED, lambda rows: more(rows, "all_gather", 2), "reshard_after_forward is on under a"),
        (dict(dp=8), lambda rows: once(rows), "each weight is gathered once: reshard_after_forward is off"),
        (dict(dp=8), lambda rows: more(rows, "all_gather", 2, "float32"), "its numbers are float32"),
        # Two causes, which together send about as many bytes: what was seen is said.
        (dict(dp=8), lambda rows: more(once(rows), "all_gather", 2, "float32"), "its numbers are float32"),
        (
            dict(dp=8, microbatch=1),
            lambda rows: more(rows, "reduce_scatter", 0.25, "float32"),
            "once a step, and not in each of 4 microbatches",
        ),
        (dict(dp=4, tp=2, microbatch=8), lambda rows: [r for r in rows if r.axis != "tp"], "is it split so?"),
        (
            dict(dp=8),
            lambda rows: more(rows, "reduce_scatter", 1.3, "float32"),
            "1.30 times the predicted bytes",
        ),
        (dict(dp=8), lambda rows: units(rows, 7), "its units are smaller than a layer, as where each linear"),
        (dict(dp=8), lambda rows: units(rows, 0.1), "its units are larger than a layer"),
        (dict(dp=8), lambda rows: units(rows, 1.4), "predicted and counted agree"),
        (dict(dp=8), lambda rows: [*rows, CollectiveCount("all_reduce", "dp", 1, 1e10, 2e10)], "--zero 0"),
        (dict(dp=8), lambda rows: [*rows, CollectiveCount("all_reduce", "ep", 1, 1e10, 2e10)], "no axis of"),
        (dict(dp=8), lambda rows: [*rows, CollectiveCount("all_reduce", "dp", 1, 4, 8)], "agree"),
    ],
)
def test_differences_from_the_prediction_are_explained(layout, change, phrase):
    layout = TITAN.layout(**{"microbatch": 4} | layout, zero=3)
    job = Job(MODELS["llama-3-8b"], global_batch=32, seq_len=2048, framework=TITAN)
    table, words = against(change(as_predicted(job, layout)), job, layout)
    assert words and all(phrase in word for word in words), words


def once(rows):
    """Without the second gather of each layer: the embedding and the head are gathered once in any case."""
    for row in rows:
        if row.op == "all_gather":
            layers = (row.calls - 1) / 2
            row.payload, row.algorithmic = (
                size * (layers + 1) / row.calls for size in (row.payload, row.algorithmic)
            )
            row.calls = layers + 1
    return rows


def units(rows, factor: float):
    """Multiply the calls of each row, and keep its bytes."""
    for row in rows:
        row.calls = round(row.calls * factor)
    return rows


def more(rows, op: str, factor: float, types: str = "bfloat16"):
    """Multiply the bytes of an operation's rows, and set the type of their numbers."""
    for row in rows:
        if row.op == op:
            row.payload, row.algorithmic, row.types = row.payload * factor, row.algorithmic * factor, {types}
    return rows


def test_while_a_cuda_graph_is_captured_no_work_is_queried(monkeypatch):
    """A query whether a Work has completed would end the capture with an error."""
    methods = dict(capture_begin=lambda self, pool: None, capture_end=lambda self: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), methods))
    asked, is_completed = [], dist.Work.is_completed
    monkeypatch.setattr(dist.Work, "is_completed", lambda work: asked.append(work) or is_completed(work))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def are_asked() -> bool:
        """Whether a Work is asked while two collectives begin."""
        asked.clear()
        works.extend(dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2))
        return bool(asked)

    graph, works = torch.cuda.CUDAGraph(), []
    try:
        with counting() as traffic:
            with pytest.raises(TypeError):
                graph.capture_begin()
            assert are_asked(), "no capture has begun"
            graph.capture_begin(None)
            assert not are_asked()
            graph.capture_end()
            assert are_asked()
            for work in works:
                work.wait()
        assert traffic.calls("all_reduce") == 6
    finally:
        dist.destroy_process_group()


def test_without_private_names_of_pytorch_counting_goes_on(monkeypatch):
    monkeypatch.setattr(pytorch_private, "_get_backend", None)
    for name in ("END_OF_BATCH", "RESOLVE"):
        monkeypatch.setattr(pytorch_private, name, "_no_such_name")
    monkeypatch.setattr("three_axes.count.axes.RESOLVE", "_no_such_name")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with counting() as traffic:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            traffic._counter.waits(work)
            assert "another backend" in traffic._counter.moves.may_end(), "no call ends before its timeout"
            traffic._counter.waited(work, 0.0)
        assert traffic.calls("all_reduce") == 1
    finally:
        dist.destroy_process_group()


def entries() -> dict:
    """The entries of the classes and modules of which this project replaces attributes."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    owners = [dist.Work, dist.ProcessGroup, torch.futures.Future, torch.cuda.CUDAGraph, dist.DeviceMesh, dist]
    owners += [dist.distributed_c10d, pytorch_private.functional, torch.UntypedStorage, ShardingPropagator]
    owners += [torch.nn.utils, torch.nn.utils.clip_grad, torch._C.Future, torch.optim.Optimizer]
    return {(owner, name): entry for owner in owners for name, entry in vars(owner).items()}


def test_afterwards_every_replaced_attribute_is_the_same_entry_as_before():
    """Also if its class inherits it. (A method that pybind11 defines is another object by `getattr`.)"""
    before, during = entries(), []
    for _ in range(2):
        with counting(), Ledger(), pytorch_private.before_clipping(print):
            during.append({key for key, entry in entries().items() if before.get(key) is not entry})
        now = entries()
        assert now.keys() == before.keys() and all(now[key] is before[key] for key in before)
    assert len(during[0]) > 8 and during[0] == during[1]
