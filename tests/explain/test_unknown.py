"""`three_axes explain` does not guess what a trace lacks: launches, names of kernels, steps, or ranks."""

import json
from pathlib import Path

import pytest
from traces import nccl, x

from three_axes.explain import explain
from three_axes.explain.kernels import COMMUNICATES, COMPUTES, UNRECOGNISED, known
from three_axes.explain.report import Explained
from three_axes.table import ranks


def explained(folder: Path, events: list[dict], rank: int = 0, **beside) -> Explained:
    """What `explain` finds in a trace with these events."""
    return explain([write(folder, events, rank, **beside)])


def write(folder: Path, events: list[dict], rank: int = 0, **beside) -> str:
    """Write a rank's trace. beside: further keys of the file. Returns its path."""
    file = folder / f"rank{rank}.json"
    file.write_text(json.dumps({"distributedInfo": {"rank": rank}, **beside, "traceEvents": events}))
    return str(file)


def launched(i: int, at: float, start: float, lasts: float, name="gemm", call=5.0) -> list[dict]:
    """A kernel, and the host's call that launched it and took `call` µs."""
    launch = x("cuda_runtime", "cudaLaunchKernel", at, call, 1, correlation=i)
    return [launch, x("kernel", name, start, lasts, 7, correlation=i)]


def marked(lasts: float, n: int = 1) -> list[dict]:
    """The profiler's marks of n steps of `lasts` µs each."""
    return [x("user_annotation", f"ProfilerStep#{i}", i * lasts, lasts, 1) for i in range(n)]


def test_idle_has_no_cause_where_launches_are_missing(tmp_path):
    events = marked(1000) + [x("kernel", "gemm", 100 * i, 60) for i in range(10)]
    made = explained(tmp_path, events)
    assert made.splits[0].parts["idle, cause not known"] == pytest.approx(400e-6)
    assert not made.splits[0].parts["idle"] and not made.advice
    shown = " ".join(repr(made).split())
    assert "not known: what the GPU waited for in 40.0% of the time" in shown
    assert "nothing takes more than one hundredth of the time beside computing and what is not known" in shown


@pytest.mark.parametrize(
    "gap, said",
    [
        (10, "idles for moments between kernels that had been launched, as long as a kernel takes to start"),
        (300, "what it waits for is not in the trace"),
    ],
)
def test_idle_time_after_a_launch_is_explained_by_its_length(tmp_path, gap, said):
    events = [e for i in range(10) for e in launched(i, 2 * i - 100, (100 + gap) * i, 100, call=1)]
    made = explained(tmp_path, events)
    assert made.splits[0].parts["idle"] == pytest.approx(9 * gap / 1e6)
    assert said in made.advice[0].text and "synchronisation" not in repr(made)


def test_a_long_call_of_cuda_is_not_counted_as_python(tmp_path):
    events = launched(1, 0, 10, 1000)
    events += [x("cuda_runtime", "cudaMalloc", 1100, 5000, 1, correlation=2), *launched(3, 6200, 6210, 1000)]
    made = explained(tmp_path, events)
    parts = made.splits[0].parts
    assert parts["waiting for CUDA"] == pytest.approx(5000e-6)
    assert parts["waiting for Python"] == pytest.approx(200e-6)
    assert "most of the time in cudaMalloc" in made.advice[0].text


@pytest.mark.parametrize(
    "name, does, operation",
    [
        ("void dpsk::ep::internode::dispatch<false, 8, false, 8>(int4*, float*)", COMMUNICATES, "dispatch"),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)", COMMUNICATES, "combine"),
        ("void deep_ep::internode_ll::dispatch<true, 7168>(void*)", COMMUNICATES, "dispatch"),
        ("void dpsk::ep::internode::cached_notify<false>(int, int)", COMMUNICATES, "notify"),
        ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*)", UNRECOGNISED, ""),
        ("void vllm::cross_device_reduce_1stage<half, 8>(vllm::RankData*)", COMMUNICATES, "all_reduce"),
        ("void (anonymous namespace)::one_shot_all_reduce_kernel<f, 16, 8>(f**)", COMMUNICATES, "all_reduce"),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>()",
            COMMUNICATES,
            "all_reduce",
        ),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int)", COMMUNICATES, "reduce_scatter"),
        ("EpDispatchIntraNodeKernel_bf16", COMMUNICATES, "dispatch"),
        ("mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*)", COMMUNICATES, ""),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATES, ""),
        ("gemm_one_shot_all_reduce_kernel", UNRECOGNISED, ""),
        ("void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, f>(int)", COMPUTES, ""),
        ("void cutlass::device_kernel<dpsk::ep::internode::dispatch>(int)", COMPUTES, ""),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(int)", COMPUTES, ""),
        ("Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16", COMPUTES, ""),
        ("void at_cuda_detail::cub::DeviceScanKernel<int>(int)", COMPUTES, ""),
        ("broadcast_tokens", UNRECOGNISED, ""),
        ("mega_moe_kernel", UNRECOGNISED, ""),
        ("flashcomm::send", UNRECOGNISED, ""),
        ("void flash::flash_fwd_splitkv_kernel<int>(int)", COMPUTES, ""),
        ("void flash::compute_attn_ws<int>(int)", COMPUTES, ""),
    ],
)
def test_a_kernel_does_what_its_name_says(name, does, operation):
    assert known(name) == (does, operation)


def test_kernels_that_are_not_recognised_have_a_row(tmp_path):
    """Of 1,000 µs an unknown kernel takes 200, half of them beside a collective; another takes 9."""
    events = marked(1000) + launched(1, 0, 0, 500)
    events += launched(2, 5, 500, 200, "void secret::exchange<8>(int*)")
    events += launched(3, 6, 700, 9, "void secret::small(int*)") + [nccl("allreduce", "dp", 100, 600, 200)]
    made = explained(tmp_path, events)
    (one,) = made.splits
    parts = {part: round(1e6 * s) for part, s in one.parts.items() if s}
    assert parts["compute"] == 509 and parts["not recognised"] == 200 and parts["exposed dp"] == 91
    shown = " ".join(repr(made).split())
    assert "not recognised 0.2 ms 20.0%" in shown and "50.0% under kernels that are not recognised" in shown
    assert "not recognised: secret::exchange (20.0%); these kernels may compute or communicate" in shown


def test_no_collective_is_no_proof_that_none_ran(tmp_path):
    alone = "no collective was recorded: one rank alone"
    assert alone in repr(explained(tmp_path, launched(1, 0, 10, 100)))
    of_64 = {"distributedInfo": {"rank": 0, "world_size": 64}}
    shown = repr(explained(tmp_path, launched(1, 0, 10, 100), **of_64))
    assert alone not in shown and "though the job has 64 ranks" in shown
    assert shown.startswith("traces of 63 of 64 ranks are missing (ranks 1–63)")
    assert alone not in repr(explained(tmp_path, launched(1, 0, 10, 100, "secret")))


def test_copies_between_gpus_are_no_copies_within_one(tmp_path):
    events = [*launched(1, 0, 10, 100), x("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 110, 300)]
    made = explained(tmp_path, events)
    assert made.splits[0].collectives[0].op == "copy between GPUs"
    assert "copies on the device" not in made.splits[0].parts and "contiguous" not in repr(made)


def test_gloo_beside_a_gpu_is_communication(tmp_path):
    gloo = x("user_annotation", "gloo:all_reduce", 150, 500, 2)
    events = [*launched(1, 0, 10, 100), gloo, *launched(2, 660, 670, 30)]
    parts = explained(tmp_path, events).splits[0].parts
    assert parts["exposed group not said"] == pytest.approx(500e-6)


@pytest.mark.parametrize(
    "events, beside",
    [
        ([], {"deviceProperties": [{"id": 0, "name": "A100"}]}),
        ([], {"distributedInfo": {"rank": 0, "backend": "nccl"}}),
        ([x("cuda_runtime", "cudaLaunchKernel", 5, 5, 1, correlation=1)], {}),
        ([x("mtia_runtime", "launch", 0, 5)], {}),
    ],
)
def test_nothing_is_advised_on_the_hosts_part_alone(tmp_path, events, beside):
    host = [x("cpu_op", "aten::mm", 0, 100, 1), x("cpu_op", "aten::mm", 900, 100, 1)]
    made = explained(tmp_path, host + events, **beside)
    assert not made.advice and "nothing is advised: the trace has the host's part alone" in repr(made)
    assert explained(tmp_path, host).advice


def test_advice_has_the_figure_of_its_row(tmp_path):
    """all_gather is exposed for 300 of 1,000 µs, all_reduce for 100, along the same axis."""
    events = marked(1000) + launched(1, 0, 0, 600)
    events += [nccl("all_gather", "dp", 10**6, 600, 300), nccl("allreduce", "dp", 10**6, 900, 100)]
    made = explained(tmp_path, events)
    shown = " ".join(repr(made).split())
    assert "1. 30.0%: all_gather along dp" in shown and "2. 10.0%: all_reduce along dp" in shown
    rows = {row[0]: float(row[5].split()[0]) for row in made.collectives().rows}
    for op, advice in zip(("all_gather", "all_reduce"), made.advice):
        assert 1e3 * advice.seconds == pytest.approx(rows[op]) and advice.text.startswith(op)
    sizes = [nccl("allreduce", "dp", n, 600 + 50 * i, 50) for i, n in enumerate((10, 20, 30))]
    (one,) = explained(tmp_path, marked(1000) + launched(1, 0, 0, 600) + sizes).advice[1:]
    assert one.text.startswith("all_reduce along dp, its 3 sizes together,")
    assert one.seconds == pytest.approx(150e-6)


def test_a_bubble_is_not_counted_twice(tmp_path):
    sent = [nccl("send", "pp", 500, 600, 50), nccl("send", "pp", 500, 700, 250)]
    made = explained(tmp_path, marked(1000) + launched(1, 0, 0, 600) + sent)
    assert [round(1e6 * a.seconds) for a in made.advice if "waiting" not in a.text][:2] == [200, 100]
    assert made.splits[0].exposed["send", "pp"] == pytest.approx(100e-6)


def test_calls_are_of_a_step_only_where_steps_are_known(tmp_path):
    sent = [nccl("allreduce", "dp", 1000, 600 + 3 * i, 2) for i in range(36)]
    without = explained(tmp_path, launched(1, 0, 0, 600) + sent)
    assert "calls a step" not in repr(without) and " a step of" not in repr(without)
    assert "schedule=" in repr(without) and "call profiler.step() after each" not in repr(without)
    within = explained(tmp_path, marked(1000) + launched(1, 0, 0, 600) + sent)
    assert "calls a step" in repr(within) and "36 a step of 2.00 kB" in repr(within)


def test_advice_on_small_messages_is_given_only_where_they_take_the_time(tmp_path):
    sent = [nccl("allreduce", "dp", 1000, 600 + i, 0.5) for i in range(40)]
    sent += [nccl("allreduce", "dp", 10**8, 650 + 100 * i, 100) for i in range(3)]
    assert "join them" not in repr(explained(tmp_path, marked(1000) + launched(1, 0, 0, 600) + sent))


def test_advice_says_if_no_computation_can_hide_a_collective(tmp_path):
    events = marked(1000) + launched(1, 0, 0, 3) + [nccl("all_gather", "dp", 10**6, 3, 990)]
    text = explained(tmp_path, events).advice[0].text
    assert "there is nothing to hide it under, for only 0.0 of 1.0 ms are computed" in text


def of_ranks(folder: Path, *events: list[dict]) -> Explained:
    return explain([write(folder, one, rank) for rank, one in enumerate(events)])


def test_a_difference_below_a_hundredth_makes_no_rank_the_slowest(tmp_path):
    def of(computes: float, others: str = "gemm") -> list[dict]:
        rest = nccl("allreduce", "dp", 1000, computes, 1000 - computes)
        return [*marked(1000), *launched(1, 0, 0, computes, others), rest]

    even = of_ranks(tmp_path, of(500), of(505), of(495))
    assert "no rank is the slowest" in repr(even) and even.json()["slowest"] is None
    uneven = of_ranks(tmp_path, of(500), of(515), of(495))
    assert "rank 1 is the slowest: without" in repr(uneven) and uneven.json()["slowest"] == 1
    strange = of_ranks(tmp_path, of(500), of(615, "secret"), of(495))
    assert "not known: which rank is the slowest" in repr(strange)
    assert not any("works longer" in advice.text for advice in strange.advice)


def test_no_waiting_is_reported_in_an_all_to_all(tmp_path):
    def of(rank: int, op: str) -> list[dict]:
        sent = nccl(op, "ep", 1000, 100, 300 if rank else 50)
        sent["args"]["Process Group Name"] = "7"
        return [x("kernel", "gemm", 0, 100), sent]

    made = of_ranks(tmp_path, of(0, "all_to_allv"), of(1, "all_to_allv"))
    assert not made.skews and "not known: who waits for whom in an all_to_all" in repr(made)
    made = of_ranks(tmp_path, of(0, "allreduce"), of(1, "allreduce"))
    assert made.skews and "all_to_all" not in repr(made)


def test_ranks_are_named_by_their_runs():
    assert ranks([0, 1, 2, 4, 5, 6, 7]) == "ranks 0–2 and 4–7"
    assert ranks([5, 3, 1, 2]) == "ranks 1–3 and 5" and ranks([0, 2, 3]) == "ranks 0, 2 and 3"
    assert ranks([4]) == "rank 4" and ranks([4, 5]) == "ranks 4 and 5" and ranks([1, 2, 3]) == "ranks 1–3"


def test_graphs_are_not_advised_where_they_are_used(tmp_path):
    apart = [e for i in range(10) for e in launched(i, 2 * i - 100, 110 * i, 100, call=1)]
    late = launched(11, 2000, 2010, 100)
    assert repr(explained(tmp_path, apart + late)).count("CUDA graphs") == 2
    graph = [x("cuda_runtime", "cudaGraphLaunch", 1900, 5, 1, correlation=12)]
    assert "CUDA graphs" not in repr(explained(tmp_path, apart + late + graph))


def test_kernels_that_are_not_recognised_may_hide_a_collective(tmp_path):
    sent = nccl("all_gather", "dp", 10**6, 500, 500)
    text = explained(tmp_path, marked(1000) + launched(1, 0, 0, 500, "_fwd_kernel") + [sent]).advice[0].text
    assert "nothing to hide" not in text


def test_several_gpus_of_one_process_are_not_separated(tmp_path):
    kernels = [x("kernel", "gemm", 0, 100) | {"pid": gpu} for gpu in (0, 1)]
    shown = repr(explained(tmp_path, kernels))
    assert "not known: what each of the 2 GPUs of rank 0 did" in shown
    assert "GPUs of rank" not in repr(explained(tmp_path, kernels[:1]))


@pytest.mark.parametrize(
    "names, gpus, doubt",
    [
        (["rank0.json", "rank1.json"], [0, 0], True),
        (["rank0.json", "rank1.json"], [0, 1], False),
        (["host_12.345.pt.trace.json", "host_13.346.pt.trace.json"], [0, 0], True),
        (["a_12.345.pt.trace.json", "b_12.345.pt.trace.json"], [0, 0], False),  # of two machines
        (["a_12.345.pt.trace.json", "a_13.345.pt.trace.json"], [0, 1], False),
    ],
)
def test_a_gpu_that_ranks_may_have_shared_is_mentioned(tmp_path, names, gpus, doubt):
    """The file's name is what `tensorboard_trace_handler` gives it."""
    files = []
    for rank, (name, gpu) in enumerate(zip(names, gpus)):
        told = {"distributedInfo": {"rank": rank, "world_size": 2}}
        told["traceEvents"] = [x("kernel", "gemm", 0, 9) | {"pid": gpu}]
        (tmp_path / name).write_text(json.dumps(told))
        files.append(str(tmp_path / name))
    assert ("not known: whether ranks 0 and 1 shared a GPU" in repr(explain(files))) is doubt


def steps_of(spans: list[tuple[str, float]], gap: float, last: float, gpu: bool) -> list[dict]:
    """Three steps of operators or kernels, (name, µs), with `gap` µs between them, and `last` after them."""
    events, at = [], 0.0
    for step in range(3):
        began = at
        for i, (name, lasts) in enumerate(spans):
            number = 1 + i + step * len(spans)
            launch = x("cuda_runtime", "cudaLaunchKernel", at - 1, 1, 1, correlation=number)
            kind = "kernel" if gpu else "cpu_op"
            events += [launch] * gpu + [x(kind, name, at, lasts, 1, correlation=number)]
            at += lasts + gap
        at += last - gap
        events.append(x("user_annotation", f"ProfilerStep#{step}", began, at - began, 1))
    return events


@pytest.mark.parametrize("gpu, names", [(False, ["aten::add", "aten::randn"]), (True, ["gemm", "softmax"])])
def test_waiting_for_python_is_told_by_its_longest_gaps_or_by_the_number_of_short_ones(tmp_path, gpu, names):
    first, last = names[1], names[0]
    work = [(first, 50.0), *[(last, 50.0)] * 9]
    of = lambda *made: explained(tmp_path, steps_of(*made, gpu)).advice[0].text
    long = of(work, 5, 40_000)
    assert "one long gap a step, of 40 ms" in long and f"between {last} and {first}: look what" in long
    assert "microbatches" not in long and "torch.compile" not in long
    many = of([(last, 9.0)] * 4000, 5, 5)
    what = "kernels" if gpu else "operators"
    assert f"4,000 {what} a step of 9 µs in the mean: fewer and larger ones, by larger" in many
    assert "look what" not in many
    # One long gap is named beside many short ones, if it is most of the waiting.
    assert "one long gap a step, of 80 ms" in of([(last, 9.0)] * 4000, 5, 80_000)
    several = of(work, 5_000, 5_000)  # no single one: what Python did is not guessed
    assert "30 long gaps in 3 steps, of 5 ms each" in several and "is not in the trace" in several


def test_the_latest_rank_is_named_only_if_it_was_last_more_often_than_by_chance(tmp_path):
    """Four ranks and 56 all-reduces. Each is last in a quarter of them, or rank 2 in 20 more."""

    def of(rank: int, more: int) -> list[dict]:
        last = lambda call: (2 if call < more else call % 4) == rank
        sent = [nccl("allreduce", "dp", 1000, 500 * i, 100 if last(i) else 400) for i in range(56)]
        for call in sent:
            call["args"]["Process Group Name"] = "7"
        return [*marked(28_000), *launched(1, 0, 28_000, 500), *sent]

    even = of_ranks(tmp_path, *(of(rank, 4) for rank in range(4)))
    assert even.skews[0].last[2] == 17 and even.skews[0].latest is None
    assert "no rank came last clearly more often than the others (at most 17 times)" in repr(even)
    assert "mostly for rank" not in repr(even) and "no rank came last clearly" in even.advice[0].text
    late = of_ranks(tmp_path, *(of(rank, 28) for rank in range(4)))
    assert late.skews[0].latest == 2 and "rank 2 came last to 35 of them" in repr(late)
    assert "mostly for rank 2: look what makes that late" in repr(late)
