"""`three_axes explain` on traces of torch.profiler: arithmetic of intervals, a trace made by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from traces import by_hand, nccl, x

from three_axes.__main__ import main
from three_axes.explain import explain
from three_axes.explain.collectives import operation
from three_axes.explain.reading import read
from three_axes.explain.split import both, length, union, without
from three_axes.foreign import Unreadable

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1])))


def marked(spans) -> np.ndarray:
    """The moments from 0 to 99 that lie in one of the spans."""
    line = np.zeros(100, bool)
    for start, end in spans:
        line[int(start) : int(end)] = True
    return line


@given(SPANS, SPANS)
def test_intervals_are_sets_of_moments(a, b):
    one, two = union(a), union(b)
    assert length(one) == marked(a).sum()
    assert length(both(one, two)) == (marked(a) & marked(b)).sum()
    assert length(without(one, two)) == (marked(a) & ~marked(b)).sum()


@pytest.mark.parametrize(
    "name, op",
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send or all_to_all"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("nccl:all_to_all", "all_to_all"),
        ("gloo:recv", "recv"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
    ],
)
def test_collectives_are_known_by_every_name(name, op):
    assert operation(name) == op


def write(path: Path, events: list, **beside) -> str:
    """Write a trace. beside: further keys of the file. Returns its path."""
    path.write_text(json.dumps({"schemaVersion": 1, **beside, "traceEvents": events, "traceName": "x"}))
    return str(path)


def test_every_moment_is_in_one_part(tmp_path):
    made = explain([write(tmp_path / "t.json", by_hand(), distributedInfo={"rank": 3})])
    (one,) = made.splits
    parts = {part: round(1e6 * seconds) for part, seconds in one.parts.items()}
    expected = dict(compute=300 + 80 + 40 + 100, optimizer=120, copies=30, bubble=40, idle=50)
    expected |= {"exposed tp": 100, "exposed pp": 40, "waiting for data": 30, "waiting for Python": 20 + 50}
    assert (one.rank, one.steps, parts) == (3, 1, expected)
    assert one.seconds == pytest.approx(1e-3) and sum(parts.values()) == 1000
    assert one.hidden == pytest.approx(100 / 280)
    assert one.collectives[0].payload == 2000 and one.collectives[0].sent == 3000
    assert "0.0 GB/s" in repr(made) and made.advice[0].seconds >= made.advice[-1].seconds
    assert len(made.advice) == 5 and "(drop 06)" in repr(made)


def test_the_slowest_of_several_ranks(tmp_path):
    of_rank = lambda r: (tmp_path / f"rank{r}.json", by_hand(200 if r == 2 else 0))
    files = [write(*of_rank(r), distributedInfo={"rank": r}) for r in (1, 2, 0)]
    made = explain(files)
    assert [s.rank for s in made.splits] == [0, 1, 2]
    assert any("rank 2 works longer" in a.text for a in made.advice)
    fast, slow = made.splits[0].working, made.splits[2].working
    assert slow - fast == pytest.approx(200e-6)
    assert (
        "rank 2 is the slowest: without waiting for others it works"
        f" {slow / fast:.2f} times as long as the median of the other ranks"
    ) in repr(made)
    with pytest.raises(Unreadable, match="are both of rank 1"):
        explain([files[0], write(tmp_path / "other.json", by_hand(), distributedInfo={"rank": 1})])


def test_a_rank_that_waits_for_its_own_python_is_named(tmp_path):
    late = by_hand()
    late[0]["dur"] = 3000  # the step
    late += [x("cuda_runtime", "cudaLaunchKernel", 2900, 5, 1, correlation=9)]
    late += [x("kernel", "gemm", 2910, 90, correlation=9)]
    events = {0: by_hand(), 1: by_hand(), 2: late}
    files = [write(tmp_path / f"{r}.json", made, distributedInfo={"rank": r}) for r, made in events.items()]
    told = [advice.text for advice in explain(files).advice]
    assert any(text.startswith("rank 2 waits for its own Python, the other ranks do not: ") for text in told)


def test_waiting_for_a_late_rank_is_separated_from_the_transfer(tmp_path):
    """Ten meetings: rank 1 comes 300 µs late, and each takes 50 µs once both are there."""

    def of_rank(rank: int, late: float, n: int = 10) -> str:
        kernels = [nccl("allreduce", "dp", 10**6, 1000 * i + late, 350 - late) for i in range(n)]
        for kernel in kernels:
            kernel["args"]["Process Group Name"] = "7"
        events = [x("kernel", "gemm", 1000 * i + 400, 100) for i in range(n)] + kernels
        told = {"rank": rank, "world_size": 4}
        return write(tmp_path / f"{rank}.json", events, distributedInfo=told)

    made = explain([of_rank(0, 0), of_rank(1, 300)])
    (skew,) = made.skews
    assert skew.waited == pytest.approx({0: 10 * 300e-6, 1: 0}) and skew.transfer == pytest.approx(10 * 50e-6)
    assert (skew.latest, skew.last[1], made.missing()) == (1, 10, [2, 3])
    shown = repr(made)
    assert "traces of 2 of 4 ranks are missing (ranks 2 and 3)" in shown
    assert "rank 1 came last to 10 of them" in shown
    slow = explain([of_rank(0, 0), of_rank(1, 0)])
    assert "GB/s in the median" not in repr(slow) and not slow.skews[0].waited[0]
    odd = explain([of_rank(0, 0), of_rank(1, 300, n=9)])
    many = explain([of_rank(rank, 0) for rank in range(5)])
    assert not many.skews and "several groups of one name" in repr(many), "nccl()'s groups have 4 ranks"
    assert not odd.skews and "inconclusive: who waits for whom along dp" in repr(odd)


def test_two_folders_are_compared(tmp_path, capsys):
    for folder, slow in (("before", 0), ("after", 200)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "rank0.json", by_hand(slow), distributedInfo={"rank": 0})
    folders = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert main(["explain", *folders]) == 0
    first = capsys.readouterr().out.splitlines()[3]
    assert first.split() == ["compute", "0.5", "ms", "0.7", "ms", "+0.2", "ms"]
    assert main(["explain", *folders, "--json"]) == 0
    before, after = json.loads(capsys.readouterr().out)["before_and_after"]["together"]
    assert after - before == pytest.approx(200e-6)


def test_a_step_is_as_long_as_its_mark_where_the_gpu_keeps_up(tmp_path):
    def seconds(start: float) -> float:
        steps = [x("user_annotation", f"ProfilerStep#{i}", 1000 * i, 1000, 1) for i in range(2)]
        kernels = [x("kernel", "gemm", start + 1000 * i, 800) for i in range(2)]
        return explain([write(tmp_path / "t.json", [*steps, *kernels])]).splits[0].seconds

    assert seconds(100) == pytest.approx(2e-3) and seconds(1500) == pytest.approx(1.8e-3)


def test_devices_that_are_not_read_are_mentioned(tmp_path):
    events = [x("mtia_runtime", "launch", 0, 5), x("cpu_op", "aten::mm", 0, 100)]
    assert "not known: what mtia devices did" in repr(explain([write(tmp_path / "t.json", events)]))


def test_calls_that_are_no_whole_number_a_step_are_counted(tmp_path):
    steps = [x("user_annotation", f"ProfilerStep#{i}", 1000 * i, 1000, 1) for i in range(6)]
    events = [*steps, x("kernel", "gemm", 0, 6000), nccl("allreduce", "dp", 100, 500, 100)]
    assert "1 in 6 steps" in repr(explain([write(tmp_path / "t.json", events)]))


def test_an_older_trace_says_less(tmp_path):
    events = [
        x("Kernel", "gemm", 0, 100, correlation=1),
        x("Runtime", "cudaLaunchKernel", 0, 5, 1),
        x("kernel", "ncclKernel_SendRecv_RING", 100, 50, 20),
        x("kernel", "ncclKernel_AllReduce_RING", 150, 50, 20),
    ]
    made = explain([write(tmp_path / "worker3.json", events)])
    assert {c.op for c in made.splits[0].collectives} == {"send or all_to_all", "all_reduce"}
    shown = repr(made)
    for what in ("the axis of some", "bytes and bandwidth", "whether a SendRecv", "where a step ends"):
        assert f"not known: {what}" in shown
    told = x("user_annotation", "nccl:all_to_all", 0, 50, 1)
    launch = x("cuda_runtime", "cudaLaunchKernelExC", 10, 5, 1, correlation=9)
    events[2]["args"] = {"correlation": 9}
    made = explain([write(tmp_path / "worker3.json", [*events, told, launch])])
    assert {c.op for c in made.splits[0].collectives} == {"all_to_all", "all_reduce"}


def test_events_are_read_across_the_borders_of_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("three_axes.explain.reading.CHUNK", 50)
    file = write(tmp_path / "t.json", by_hand(), distributedInfo={"rank": 1})
    whole = read(file)
    assert len(whole.gpu) == 9 and len(whole.launches) == 5 and whole.rank == 1


def test_ranks_over_gloo_are_explained(world, tmp_path, capsys):
    def record(folder):
        from torch.profiler import ProfilerActivity, profile

        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 200))
        optimizer = torch.optim.AdamW(net.parameters())
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(2):
                net(torch.ones(20, 200)).sum().backward()
                optimizer.step()
                seen.step()
        seen.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json.gz")

    world.run(record, str(tmp_path), timeout=60)
    capsys.readouterr()  # the profiler prints as well
    files = [str(tmp_path / f"rank{r}.json.gz") for r in range(4)]
    assert main(["explain", *files, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in told["ranks"]] == [0, 1, 2, 3]
    for one in told["ranks"]:
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"], rel=1e-3)
        assert one["parts"]["optimizer"] > 0 and one["communication"] > 0 and 0 <= one["hidden"] <= 1


def test_an_injected_delay_is_recovered(world, tmp_path):
    """Rank 2 is 200 ms late for four all-reduces. The ranks also time the delays with one clock."""

    def record(folder):
        import time

        from torch.profiler import ProfilerActivity, profile

        tensor, came = torch.ones(1000), []
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(4):
                tensor.mul(2)
                if dist.get_rank() == 2:
                    time.sleep(0.2)
                came.append(time.monotonic())
                dist.all_reduce(tensor)
        seen.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json")
        return came

    came = world.run(record, str(tmp_path), timeout=60)
    (skew,) = explain([str(tmp_path / f"rank{r}.json") for r in range(4)]).skews
    assert (skew.latest, skew.calls) == (2, 4)
    for rank in (0, 1, 3):
        late = sum(at - mine for at, mine in zip(came[2], came[rank]))
        assert late > 0.7 and skew.waited[rank] - skew.waited[2] == pytest.approx(late, rel=0.1)


def test_a_collective_that_its_kernels_name_does_not_say_is_unknown(tmp_path):
    generic = x("kernel", "ncclDevKernel_Generic_4(ncclDevArgs<1ul>)", 100, 300, 20)
    made = explain([write(tmp_path / "t.json", [x("kernel", "gemm", 0, 100), generic])])
    shown = " ".join(repr(made).split())
    assert "not known: which collective ncclDevKernel_Generic_4 is; its kernel's name does not say" in shown
    assert "ncclDevKernel_Generic_4 that no computation hides: its kernel's name is of no collective" in shown
    assert made.splits[0].collectives[0].sent is None


@pytest.mark.parametrize(
    "name, part, advice",
    [
        ("Memcpy HtoD (Pageable -> Device)", "copies", "pinned memory with non_blocking=True"),
        ("Memcpy DtoH (Device -> Pinned)", "copies", "though pinned: fewer of them"),
        (
            "Memcpy DtoD (Device -> Device)",
            "copies on the device",
            "copies within the GPU that nothing hides",
        ),
        ("Memset (Device)", "copies on the device", "copies within the GPU that nothing hides"),
    ],
)
def test_copies_within_the_device_are_separated_from_copies_to_the_host(tmp_path, name, part, advice):
    kind = "gpu_memset" if name.startswith("Memset") else "gpu_memcpy"
    events = [x("kernel", "gemm", 0, 100), x(kind, name, 100, 300)]
    made = explain([write(tmp_path / "t.json", events)])
    (one,) = made.splits
    assert one.parts[part] == pytest.approx(300e-6) and sum(one.parts.values()) == pytest.approx(one.seconds)
    assert advice in made.advice[0].text


def test_without_a_backward_no_advice_names_microbatches(tmp_path):
    def advised(*operators: str) -> str:
        cpu = [x("cpu_op", name, 10 * i, 5, 1) for i, name in enumerate(operators)]
        sent = [nccl("send", "pp", 500, 1000 * i, took) for i, took in ((1, 20), (2, 300))]
        waits = [x("cuda_runtime", "cudaLaunchKernel", 2900, 5, 1, correlation=1)]
        kernels = [x("kernel", "gemm", 0, 100), x("kernel", "gemm", 3000, 100, correlation=1)]
        made = explain([write(tmp_path / "t.json", [*cpu, *waits, *kernels, *sent])])
        return " ".join(advice.text for advice in made.advice)

    assert advised("aten::mm", "MmBackward0").count("microbatches") == 2
    served = advised("aten::mm", "aten::softmax")
    assert "microbatches" not in served and "larger batches" in served and "batches under way" in served


def test_what_was_launched_before_the_recording_is_left_out(tmp_path):
    """Three of 13 public traces begin with such kernels (AMD-AGI/TraceLens, tests/traces, November 2026)."""
    early = [x("kernel", "gemm", -900 + 200 * i, 150, 7, correlation=100 + i) for i in range(4)]
    files = [write(tmp_path / f"{len(events)}.json", events) for events in (by_hand(), early + by_hand())]
    usual, longer = (explain([file]).splits[0] for file in files)
    assert longer.parts == usual.parts and longer.seconds == usual.seconds
