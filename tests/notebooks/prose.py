"""The figures in the notebooks' prose, computed; `test_figures` compares both. The imports take a while, so
only the process that runs these tests imports this file.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import gelu

from drops import b1, b3, b5, d05, d06, d07, d08, d10, d11, d12, d13, d14
from helpers import toy
from helpers.practice.defence import Defence
from three_axes.files import rows_of
from three_axes.paper import SCHEDULES
from three_axes.paper.collectives import algorithmic_bytes as must_send
from three_axes.plan import CLUSTERS, Job, Layout, estimate, frameworks, memory, validation
from three_axes.plan.memory import stage_memory, states
from three_axes.plan.models import find_model
from three_axes.plan.traced import traced_job
from three_axes.table import human

ROOT = Path(__file__).resolve().parents[2]
# Sizes, speeds and layouts that the sentences below use.
N = sum(p.numel() for p in toy.ToyTransformer(hidden=256).parameters())
SMALL = 4 * sum(p.numel() for p in d05.paced_model().parameters())
TREE = [[int(cell.rstrip("%")) for cell in row[-2:]] for row in d13.tree_against_planner().rows[2:]]
behind = [textbook for textbook, _ in TREE]  # % by which the tree's layouts of larger models are slower
share_lost = lambda scheme: 1 - d11.published()[scheme][-1][1] / d11.published()[scheme][0][1]
DGX, PORT = CLUSTERS["dgx-h100"], d05.NETWORK.inter_node_bandwidth
NODES = d11.NODES
TITAN = rows_of("torchtitan_2024_a100.csv")[0]  # as the last row of drop 11's 8B, with recompute of operators
SO_RUN = estimate(
    Job(d11.MODEL, CLUSTERS["dgx-a100"], d11.GLOBAL, d11.SEQ, frameworks.FRAMEWORKS["torchtitan"]),
    Layout(dp=64, zero=3, recompute=TITAN["recompute"]),
)
assert (TITAN["model"], TITAN["dp"], TITAN["seq_len"]) == ("llama-3-8b", "64", str(d11.SEQ))


def zero_3(gpus: int, b: int) -> float:
    """Sequences per second of a GPU: 174.6·10⁹ parameters, ZeRO-3 of 2021, all ports of a node in use."""
    job = Job(validation.gpt(96, 12288, 96), validation.A100, 1536, 2048, validation.DEEPSPEED_2021)
    layout = Layout(dp=gpus, microbatch=b, zero=3, **validation.PLAIN)
    return job.global_batch / validation.seconds(job, layout) / gpus


EIGHT_PORTS = 1 - zero_3(1536, 1) / zero_3(384, 4)  # share of a GPU's speed that is lost
LINK, FAR = d06.ONE_NODE.intra_node_bandwidth, d06.ONE_NODE.inter_node_bandwidth

PICK = d14.fastest(d13.cost, d14.JOB)
LAYOUT = Defence(d14.the_plan(), d13.layout_of(PICK))
FP8_JOB = replace(d14.the_plan().job, precision="fp8")
IN_FP8 = [estimate(FP8_JOB, d13.layout_of(cut)).step_seconds for cut in (d14.FSDP, PICK)]  # by the planner
BY_LINES = {cut: d13.cost(d14.JOB, cut) for cut in d14.CUTS}
LLAMA = find_model("llama-3-70b")
REACHED = d13.exercises._given(list(d13.exercises._JOBS)[1])  # of an H100
FLASH_OF_C = {tokens: wide * 1e12 / REACHED.C for tokens, wide, _ in frameworks.FLASH_H100}
SIXTY_FOUR = Job(LLAMA, global_batch=64, seq_len=8192)
LEAST = max(sum(stage_memory(SIXTY_FOUR, Layout(tp=8, pp=2, recompute="full"), k).values()) for k in range(2))
TOY = sum(p.numel() for p in toy.ToyTransformer(hidden=d10.HIDDEN, seq_len=d10.LONG).parameters())
UNIT = 4 * 4 * d10.LONG * d10.HIDDEN
THEN = {what: [float(cell.rstrip("%")) for cell in then] for what, _, _, *then in d13.flips().rows}
# As drop 13 says.
assert max(map(max, THEN.values())) < 5
assert round(100 * d13.the_plan().sure.apart) == 10 == round(100 * d14.the_plan().sure.apart)
assert max(hiding for _, hiding in TREE[1:]) <= 9  # "it ties with the best on several nodes"
assert {("speed between nodes", 2), ("speed inside a node", 0.5), ("global batch", 0.5)} <= {
    (what, factor) for what, factor, _ in d13.the_plan().flips()
}
# "Little TP wins under each", says drop 13 of frameworks.
assert all(" TP 1 " in row[2] or " TP 2 " in row[2] for row in d13.by_framework().rows)
# As b1 says: "backward twice as long as forward", "ports are ten times slower"; two layers early hold three.
assert b1.SECONDS["B"] == 2 * b1.SECONDS["F"]
assert b1.TWO_NODES.intra_node_bandwidth == 10 * b1.TWO_NODES.inter_node_bandwidth
assert b1.whole_at_once(toy.fsdp_order(6, prefetch=2)) == 3
ALL, USED = (b3.parameters_on_rank(*b3.MIXTRAL[:3], n, 2, 1, 1) + 2 * 32768 * b3.HIDDEN for n in (8, 2))
assert round(b3.published()["Megatron-Core, folded"] - b3.published()["Megatron-Core"]) == 3  # "three points"
FLIGHT = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
KEPT_ENTRIES = int(re.search(r'"TORCH_NCCL_TRACE_BUFFER_SIZE"\}, (\d+)\)', FLIGHT.read_text())[1])
WATCHDOG = rows_of("nccl_watchdog_logs.csv")
B_RANKS = {log["rank"]: int(log["seq"]) for log in WATCHDOG if log["log"] == "B"}
GATHER = next(log for log in WATCHDOG if log["op"] == "_ALLGATHER_BASE")
assert int(GATHER["numel_out"]) == 4 * int(GATHER["numel_in"])  # "a fourth rank"
assert B_RANKS["0"] == B_RANKS["1"] + 2 == B_RANKS["2"] + 2  # "two numbers further", says b4
DENSE = b5.program("dense")
SCORED = [int((rows != DENSE["NOTHING"]).sum()) for rows in DENSE["batch"]()[1].chunk(2)]  # on each dp rank
assert {int(log["timeout_ms"]) for log in WATCHDOG} == {30 * 60 * 1000}  # "half an hour"
# For each drop, sentences whose figures no cell prints, with the computed figures inserted.
KEPT = stage_memory(Job(LLAMA, seq_len=8192), Layout(tp=8), 0)
FIRST_OF_FOUR = stage_memory(Job(LLAMA, seq_len=8192, global_batch=128), Layout(dp=2, tp=8, pp=4, zero=1), 0)
FLIPPED = [float(cell.rstrip("%")) for row in d13.flips().rows for cell in row[3:]]
EIGHT = d12.paper(d12.REMEDIES["1F1B, 8 stages"][0])
for microbatches in (13, 16, 32):  # "a whole step takes no less time than under ZB-H1"
    h1, h2 = (d12.paper(SCHEDULES[name].make(8, microbatches)) for name in ("ZB-H1", "ZB-H2"))
    assert h2.makespan >= h1.makespan
COMPUTED = {
    "01": [
        f"On four ranks each rank sends {must_send('all_reduce', 1, 4)} times its tensor",
        f"4·*L* = {4 * 4} all-reduces.",
        "takes a rank's 2 of the 8 examples",
    ],
    "02": [
        f"On four ranks each rank sends 6 chunks of *S*/4, so {must_send('all_reduce', 1, 4)}·*S*",
        "A model's weights, gradients and Adam's numbers take 100 GB, and a GPU holds 80",
        f"From {must_send('all_reduce', 1, 8)}·S to {must_send('all_reduce', 1, 64):.2f}·S: one eighth more",
    ],
    "03": [
        "one all-reduce forward and one backward: 4·*L* all-reduces of *e·T·h* bytes",
        "It reaches 0.55 for 2,048 and 0.99 for 16,384",
        f"gelu(1 − 1) is 0, but gelu(1) + gelu(−1) is {float(gelu(torch.tensor([1.0, -1.0])).sum()):.2f}",
    ],
    "04": [
        f"each rank sends {human(4 * 8 * 32 * 256)}, stage 0 the activation",
        f"sent {human(16 * must_send('all_reduce', 4 * 8 * 32 * 256, 4))} from every rank, "
        f"{ {12: 'twelve'}[16 * must_send('all_reduce', 1, 4) / 2] } times as much as a middle stage",
    ],
    "05": [
        (
            f"a block takes {1e3 * d05.FORWARD:.0f} ms forward and {1e3 * d05.BACKWARD:.0f} ms backward,"
            f" so four take {4e3 * (d05.FORWARD + d05.BACKWARD):.0f} ms"
        ),
        f"held back until a network of {PORT / 1e6} MB a second would have finished it",
        (
            f"its gradients, {human(must_send('all_reduce', SMALL, 4))} from each rank:"
            f" {1e3 * must_send('all_reduce', SMALL, 4) / PORT:.0f} ms on this network."
        ),
        f"25 MiB each, the first 1 MiB, unless you say otherwise; here we say {human(d05.BUCKET)}, since the"
        " toy is small",
        f"at 554·10¹² a second, {4e3 * 7e9 * 8192 / 554e12:.0f} ms. *F* is half of that,"
        f" {2e3 * 7e9 * 8192 / 554e12:.0f} ms.",
        f"2·7/8·14 GB at 342 GB a second, {1e3 * must_send('all_reduce', 14e9, 8) / 342e9:.0f} ms.",
        f"so *A*/5 shows: {1e3 * must_send('all_reduce', 14e9, 8) / 342e9 / 5:.0f} ms",
        *(
            f"| {name} | {C / 1e12:,.0f} of {gpu.device.flops / 1e12:,.0f} |"
            f" {W / 1e9:.0f} of {gpu.intra_node_bandwidth / 1e9:.0f} |"
            f" {R / 1e9:.0f} of {gpu.inter_node_bandwidth / 1e9:.0f} |"
            for name in ("A100", "H100", "B200")
            for gpu, (C, W, R) in [(CLUSTERS[f"dgx-{name.lower()}"], d13.reaches(f"dgx-{name.lower()}"))]
        ),
        f"needs {7 / 8 * 554e12 / 342e9:,.0f} tokens if all sit in one machine. Each needs"
        f" {7 / 8 * 554e12 / 34e9:,.0f} if each sits in its own.",
        "longer than a fifth: 30 % of its gradients come last",
    ],
    "06": [
        (
            f"a port has a {({10: 'tenth'})[LINK / FAR]} of a link's bandwidth (an H100:"
            f" {DGX.inter_node_bandwidth / 1e9:.0f} against {DGX.intra_node_bandwidth / 1e9:.0f} GB/s,"
            f" a {({9: 'ninth'})[DGX.intra_node_bandwidth / DGX.inter_node_bandwidth]})"
        ),
        f"{REACHED.C / 1e12:.0f}·10¹² operations, {REACHED.W / 1e9:.0f} GB/s of a link's"
        f" {DGX.intra_node_bandwidth / 1e9:.0f}, {REACHED.R / 1e9:.0f} of a port's"
        f" {DGX.inter_node_bandwidth / 1e9:.0f}",
        f"TP 8 costs {7 * REACHED.C / (3.6 * REACHED.h * REACHED.W):.0%}.".replace("%", " %"),
        f"share its 8 ports, costs {15 * REACHED.C / (3.6 * REACHED.h * 8 * REACHED.R):.0%}.".replace(
            "%", " %"
        ),
    ],
    "07": [
        "a timed wait, 30 ms a unit",
        f"One microbatch is {human(4 * 256)} here",
        f"here {3 / 11:.2%}".replace("%", " %"),
    ],
    "08": [
        f"A link inside has *W* = {d08.NODES.intra_node_bandwidth / 1e6:.0f} MB/s, a rank's port out of its"
        f" node *R* = {d08.NODES.inter_node_bandwidth / 1e6:.0f} MB/s.",
        f"an activation is {human(2 * 8192 * LLAMA.hidden)}",
        "1.51 TB",
        "537 MB",
        "13.2 GB",
        f"They have 4 bytes, which makes {human((2 + 4) * LLAMA.params / 16 * 3 / 4)}.",
    ],
    "09": [
        f"So your 13·10⁹ parameters take {human(sum(states(13e9).values()))} before the first token.",
        (
            f"Your 13B on eight GPUs: {human(sum(states(13e9).values()))} without ZeRO,"
            f" {sum(states(13e9, 8, 1).values()) / 1e9} with ZeRO-1,"
            f" {sum(states(13e9, 8, 3).values()) / 1e9:.0f} with ZeRO-3"
        ),
        f"{human(4 * 175e9)}: nearly nine devices of 80 GB",
        "The 2 GB of overhead stand for",
        (
            f"16: TP 8 · PP 2 with full recompute, {LEAST / 1e9:.1f} GB each. The states alone,"
            f" {sum(states(LLAMA.params).values()) / 1e9:,.0f} GB, are too much for eight."
        ),
        f"Llama 3 70B keeps {8 * KEPT['activations'] / (8192 * LLAMA.hidden * LLAMA.layers):.1f} in place",
        f"{6 + 4 * LLAMA.kv_heads / LLAMA.heads:.1f} + {2 + 3 * 2 * LLAMA.ffn / LLAMA.hidden:.0f} + 4",
        f"20·4·33.5·*s·b·h*/8 = {FIRST_OF_FOUR['activations'] / 1e9:.1f} GB of activations",
        f"16·3/2 = {16 * 3 / 2:.0f} times DP's bytes",
    ],
    "b1": [
        f"reaches {REACHED.C / 1e12:.0f}·10¹² operations a second, its port {REACHED.R / 1e9:.0f}·10⁹ bytes:"
        f" {round(REACHED.C / REACHED.R, -2):,.0f} tokens with one rank a node. Eight ranks in a node use its"
        f" eight ports: an eighth of that, {round(REACHED.C / REACHED.R / 8, -2):,.0f}."
    ],
    "b3": [
        f"has {ALL / 1e9:.0f}·10⁹ parameters, and a token uses {USED / 1e9:.0f}·10⁹ of them",
        "With a pipeline, TP 2 is enough where TP 4 was needed",
    ],
    "b2": ["3,259 tokens on a rank"],
    "b4": [
        f"keeps the last {KEPT_ENTRIES:,} of them",
        f"`TORCH_FR_BUFFER_SIZE={KEPT_ENTRIES}`",
        f"stand at number {WATCHDOG[0]['seq']}, and {WATCHDOG[0]['last_completed']} was the last",
        f"called as number {B_RANKS['1']:,}.",
        f"makes {int(GATHER['numel_out']):,} numbers out of {GATHER['numel_in']} from each",
    ],
    "b5": [
        f"the mean of its own tokens, {SCORED[1]} or {SCORED[0]}, and",
        f"They count {sum(SCORED) / 2 / SCORED[1]:g} times what they should, the long ones"
        f" {sum(SCORED) / 2 / SCORED[0]:g} times.",
    ],
    "14": [
        f"It leaves {(d14.CARD - BY_LINES[PICK._replace(v=5)].memory) / 1e9:.1f} of"
        f" {d14.CARD / 1e9:.1f} GB free",
        f"A GPU has {d14.CARD / 1e9:.1f} GB",
        "(An H100's product gains {:.3g} times, not 2, and attention nothing. So in FP8 the planner says"
        " {:.1f} s for FSDP and {:.1f} s for 2 · 4 · 8, where the lines say {:.2f} and {:.2f}.)".format(
            DGX.device.rate("fp8") / DGX.device.rate("bf16"),
            *IN_FP8,
            *(d13.cost(d14.JOB._replace(C=2 * d14.JOB.C), cut).seconds for cut in (d14.FSDP, PICK)),
        ),
        "has 16 microbatches, and its bubble is 7/23 of the step",
        f"on these 64 GPUs {LAYOUT.estimate.gpu_hours(15e12) / 64 / 24 / 365:.1f} years",
        f"9 · (4 · 10 + 1) = {9 * (4 * 10 + 1)}",
        f"`review` took {LAYOUT.estimate.memory_bytes / 1e9:.1f} GB, as Megatron-LM keeps them",
        "the rule of thumb is the faster by 4 %",
        f"within the {100 * d14.the_plan().sure.apart:.0f} % of a tie",
    ],
    "13": [
        f"at 400·10¹² a second, {6 * 175e9 * 300e9 / 400e12 / 31.5e6:.0f} years",
        "It keeps 40 % of the memory for activations",
        f"is ever more than {math.ceil(max(FLIPPED))} % behind",
        f"when they are less than {100 * d13.the_plan().sure.apart:.0f} % apart: that is a **tie**",
        f"{min(behind)} to {max(behind)} % slower than need be for larger ones",
        "is not exact to 2 %",
        "Two layouts are 2 % apart",
        "reaches 720·10¹² operations a second in bfloat16, and a whole step 554",
        f"16·3 = {16 * 3} does not divide 256",
        f"FlashAttention-2 reaches {FLASH_OF_C[2048]:.2f} of *C* at 2,048 tokens, and"
        f" {FLASH_OF_C[16384]:.2f} at 16,384",
    ],
    "12": [
        f"says (*p*−1)/(*m*+*p*−1) = 7/20, so {EIGHT.bubble:.0%}".replace("%", " %"),
        f"# 12 · Your pipeline has a {7 / 20:.0%} bubble".replace("%", " %"),
        "## Practice: below 15 %",
    ],
    "11": [
        "# 11 · Your throughput dropped 40 % after",
        f"Through all eight, the planner says, it would lose {EIGHT_PORTS:.0%}".replace("%", " %"),
        (
            f"A link inside a node has {NODES.intra_node_bandwidth / 1e6:.0f} MB/s, a port out of it"
            f" {NODES.inter_node_bandwidth / 1e6}. A node has four ports, and a ring runs through each:"
            f" together {4 * NODES.inter_node_bandwidth / 1e6:.0f} MB/s"
        ),
        "14 pieces of 16.4 kB over 10 MB/s, and 1 ms of latency: 23.9 ms, where it was 10.4",
        f"inside a node it is {1e3 * NODES.intra_node_latency} ms, and all six hops pay it",
        f"4·8·64·64 bytes, {human(4 * 8 * 64 * 64)}",
        "Perfect scaling would halve the 167 ms.",
        f"383 − 167/2 = {383 - 167 / 2:.0f} ms",
        f"For an H100 that is {DGX.device.flops / 1e12:.0f}·10¹²",
        f"It loses {share_lost('PTD-P'):.0%}. ZeRO-3".replace("%", " %"),
        f"It loses {share_lost('ZeRO-3'):.0%}:".replace("%", " %"),
        f"torchtitan printed {int(TITAN['tokens_per_gpu_per_s']):,} for the second",
        "with recompute of operators. With that recompute our planner says"
        f" {SO_RUN.tokens_per_second_per_gpu:,.0f}",
    ],
    "10": [
        f"{d10.MODEL.params / 1e9:.2f}·10⁹ · (4/2 + 12/8) = {human((4 / 2 + 12 / 8) * d10.MODEL.params)}",
        (
            f"*k* of the 13B is 10 + {2 + 3 * 2 * d10.MODEL.ffn / d10.MODEL.hidden:.1f} + 4 ="
            f" {14 + 2 + 3 * 2 * d10.MODEL.ffn / d10.MODEL.hidden:.1f} bytes"
        ),
        f"three tensors that are each {d10.MODEL.ffn / d10.MODEL.hidden:.1f} times as wide,"
        f" {6 * d10.MODEL.ffn / d10.MODEL.hidden:.1f}: in all {2 + 6 * d10.MODEL.ffn / d10.MODEL.hidden:.1f}",
        f"a usual batch adds {human(d10.held(d10.PADDED).memory['activations'])}",
        f"All three together fit an A100's {human(d10.CLUSTER.device.memory)}",
        f"4·1,024·5,120 / 2 = {40 * 32.2 * 4 * 1024 * 5120 / 2 / 1e9:.1f} GB",
        f"80·2³⁰ bytes, {80 * 2**30 / 1e9:.1f} GB",
        f"so activations took {human(d10.held(d10.LONGEST).memory['activations'])}",
        f"a **budget** of {d10.LADDER_BUDGET / 1e6:.0f} MB",
        f"needs {d10.predicted('nothing') / 1e6:.1f} MB",
        f"*N* = {TOY:,} parameters",
        f"{UNIT / 1e6:.3f} MB.",
        f"the output layer {2 + 3 * toy.VOCABULARY / d10.HIDDEN:.0f}",
        (
            f"12·*N* + 78 units = {12 * TOY / 1e6:.1f} + {78 * UNIT / 1e6:.1f} ="
            f" {d10.predicted('nothing') / 1e6:.1f} MB"
        ),
        f"12·*N* + 25 units = {d10.predicted('recompute') / 1e6:.1f} MB",
    ],
}


def share(idle: float, m: int = 13) -> str:
    """The idle share by drop 12's box."""
    return f"{idle / (3 * m + idle):.1%}"


# For each drop, numbers by its box's formula, as a cell prints them.
BSH = 8 * 32 * 256  # of the toy: b·s·h
RULE = lambda d, C, W: f"{(d - 1) / d * C / W:,.0f} tokens"
PARTS = dict(L=40, b=4, h=5120, t=2, k=32.2)  # of drop 10's 13B
OWN = d13.cost(*d13.as_written(d13.the_plan().job, d13.the_plan().best.layout)).seconds
BOXES = {
    "01": [human(1.5 * 4 * N), human(1.5 * 4 * 4 * 4 * BSH), human(2 * 4 * BSH)],
    "02": [human(2 * (d - 1) / d * 4 * N) for d in (2, 3, 4, 8)],
    "03": [human(4 * 4 * 2 * 3 / 4 * BSH * 4), f"{6 * N * 8 * 32 / 1e9:.2f}·10⁹"],
    "04": [human(2 * BSH * 4)],
    "05": [RULE(8, 554e12, 342e9), RULE(8, 554e12, 34e9)],
    "06": [f"{(t - 1) * REACHED.C / (3.6 * REACHED.h * REACHED.W):.0%}" for t in (2, 4, 8)],
    "07": [f"{3 / (8 + 3):.2%}"],
    "08": ["pp: groups of 16, numbers 8 apart, " + ("between nodes" if 16 * 8 > 8 else "")],
    "09": [human(N * (4 + 4 + 8 / 4)), human(N * 16), human(N * 16 / 4)],
    "10": [
        f"{PARTS['k'] * PARTS['L'] * PARTS['b'] * s * PARTS['h'] / PARTS['t'] / 1e9:.1f} GB"
        for s in (1024, 5120)
    ],
    "11": [f"{1e3 * (2 * 7 * (131072 / 8) / 10e6 + 1e-3):.1f} ms"],
    "12": [share(3 * 7), share(7)],
    "13": [],  # `test_the_box_of_drop_13` asks how near it is
    "14": ["(8 − 1)/71 of the step"],
    "b1": [f"{554e12 / (34e9 * ports):,.0f} tokens" for ports in (1, 8)],
    "b2": [f"{2 * 8 / 64 * 0.8 * 554e12 / 34e9:,.0f} tokens"],
    "b3": [human(4 * 4 * 256 * 2 * 64 * 3 / 4)],
    "b4": ["rank 1 at 4, the others at 5"],
    "b5": [f"{sum(SCORED) / 2 / SCORED[1]:g} times what they should count"],
}


def what_drop_14_says_of_its_layouts():
    cost, thumb = d13.cost, BY_LINES[d14.THUMB]
    assert PICK == d13.Cut(2, 4, 8) and d14.JOB.batch // 4 // PICK.d == 16  # "16 microbatches", of 7/23
    pick = BY_LINES[PICK]
    # The answer: "compute for the same"; TP 4 and its bubble cost less than TP 8; "no bubble, and no room"
    assert pick.work == thumb.work and pick.idle + pick.tp < thumb.idle + thumb.tp
    assert BY_LINES[d13.Cut(8, 8, 1)].idle == 0
    assert BY_LINES[d13.Cut(64, 1, 1, 2, 1, 3, 1)].work == 4 / 3 * thumb.work
    assert BY_LINES[d13.Cut(8, 8, 1)].memory > d14.CARD
    # "the rule of thumb wins" with a quarter of the batch, and where TP hides, by 4 %
    assert d14.fastest(cost, d14.JOB._replace(batch=d14.JOB.batch // 4))[:3] == d14.THUMB[:3]
    hidden = [d14.planned(cut, d14.if_tp_hides())[0] for cut in (PICK, d14.THUMB)]
    assert round(100 * (1 - hidden[1] / hidden[0])) == 4
    # "It is a tie: within a tenth of each other, by your lines and by the planner"; FSDP "a quarter more"
    for seconds in (lambda cut: cost(d14.JOB, cut).seconds, lambda cut: d14.planned(cut)[0]):
        tied = [seconds(cut) for cut in (PICK, d14.THUMB, *d14.TIED)]
        assert max(tied) < 1.1 * min(tied)
    assert 0.2 < d14.planned(d14.FSDP)[1] / BY_LINES[d14.FSDP].memory - 1 < 0.3
    # FP8: FSDP is the fastest and a tie, TP 8 "a fifth slower"; the planner "a fifth to a quarter longer"
    fp8 = d14.JOB._replace(C=2 * d14.JOB.C)
    assert d14.fastest(cost, fp8) == d14.FSDP
    fsdp, pick, eight = (cost(fp8, cut).seconds for cut in (d14.FSDP, PICK, d14.TIED[0]))
    assert pick < 1.1 * fsdp and round(eight / fsdp, 1) == 1.2
    assert round(IN_FP8[0] / fsdp, 1) == 1.2 and 1.2 < IN_FP8[1] / pick < 1.28
    # "2 · 4 · 8 in five chunks is faster still, and tight"
    assert cost(fp8, PICK._replace(v=5)).seconds < cost(fp8, d14.FSDP).seconds
    assert d14.ROOM < cost(fp8, PICK._replace(v=5)).memory < d14.CARD
    # GB200: TP 2 "ties with FSDP"; GB300: "FSDP needs no recompute"
    assert [row[1] for row in d14.changes(cost).rows][-2:] == ["8 · 2 · 4", "FSDP 64"]
    gb200 = d14.JOB._replace(**d14.CHANGES[d14.GB200])
    assert cost(gb200, d14.FSDP).seconds < 1.1 * cost(gb200, d13.Cut(8, 2, 4)).seconds
    # "nearly another tenth" for context parallelism, under Megatron-LM; "with it another layout wins"
    seconds = [float(row[3].removesuffix(" s")) for row in d14.with_cp().rows]
    assert 0.07 < 1 - seconds[1] / seconds[0] < 0.1 and seconds[3] < seconds[2]
    assert (d14.NVIDIA.dp, d14.NVIDIA.tp, d14.NVIDIA.pp) == PICK[:3]  # "the sizes that your lines chose"
    staged = Layout(dp=2, tp=4, pp=8, zero=3)  # "does not fit"
    assert sum(stage_memory(traced_job(LLAMA, 8192, staged), staged, 0).values()) > DGX.device.memory


# "On an H100 attention reaches", with cuDNN's kernel, of the 554·10¹² of products
OF_C = {tokens: wide * 1e12 / REACHED.C for tokens, wide, _ in frameworks.CUDNN_H100}
assert f"{OF_C[2048]:.2f} {OF_C[16384]:.2f}" == "0.55 0.99" and OF_C[4096] < 0.8 < OF_C[8192]
parts = {"a100": 0.80, "h100": 0.77, "b200": 0.77, "gb200": 0.77, "gb300": 0.77}  # of a lone product
for gpu, part in parts.items():
    name = f"{gpu}-nvl72" if gpu.startswith("gb") else f"dgx-{gpu}"
    assert abs(d13.reaches(name)[0] / CLUSTERS[name].device.achievable - part) < 0.006, gpu
assert d07.UNIT == 0.030 and memory.OVERHEAD == 2e9
# Sentences whose figures come from a publication -> where they are.
PRIME_RL = "PrimeIntellect-ai/prime-rl, pull request 2418 (2026-05-05): GLM-4.5-Air, 64k tokens, 8 x H200"
NEMO = "NVIDIA/NeMo, docs/source/performance/performance_long_sequence.md: speedup 1.07, 1.40 and 20.23"
PUBLISHED = {
    "11": {
        "llm-foundry's best on A100s is 64.2 %": "llm-foundry, scripts/train/benchmarking/README.md (061f2c7)"
    },
    "13": {"some 480 GB/s, is not the speed of a link": "NVIDIA/nccl-tests, issue 212 (2024-05-06)"},
    "14": {
        "it moves the activations of 40 layers to the host, on a GB300 of 20": (
            "Megatron-Bridge, llama3_workload_base_configs.py at df0289c: cpu_offloading_num_layers"
        )
    },
    "b3": {
        "They are 19 of the 33 runs that NVIDIA prints for its release 26.02 (February 2026), and all 18 for"
        " 26.08 (August): EP 8 to 64, TP 1 or 2": (
            "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md at df0289c and 4ab94df"
        ),
        "sends a token to a node once": (
            "deepseek-ai/DeepEP, hybrid_dispatch.cuh at dd758ca: ranks of the scale-out are deduplicated"
        ),
        "all-to-alls of each hide under the compute of the other": "deepseek-ai/DualPipe, README at 3da1bbe",
    },
    "b2": {
        "GLM-4.5-Air, 64 thousand tokens, 8 H200, CP 4": PRIME_RL,
        "all-to-all costs nothing (+1 % tokens in a second)": PRIME_RL + ", 85 to 84 thousand/s",
        "a ring loses a third (−32 %;": PRIME_RL + ", 57 to 84 thousand/s",
        "1.07 times as fast at 64 thousand tokens": NEMO,
        "1.40 times at 256 thousand, and 20 times at a million": NEMO,
    },
}


# Figures of the cards and of the teaching notes -> computed values; None for an invented case.
OUTSIDE = {
    "16 GB": f"{sum(states(1e9).values()) / 1e9:.0f} GB",
    "1.13 TB": human(sum(states(LLAMA.params).values())),
    "5 %": None,
    "86 GB": f"{DGX.device.memory / 1e9:.0f} GB",
    "30.9 GB": human(sum(states(LLAMA.params / 16, 4, 1).values())),
    "35 %": f"{7 / 20:.0%}".replace("%", " %"),
    "40 %": "40 %",  # drop 11's title, which its cells measure
    "1 MB": None,  # measured: the course inside a notebook of make colab
    "7 GB": None,  # measured: the same environment with PyTorch's CUDA build
    "1.6 GB": None,  # measured: an environment of the course, with PyTorch's CPU build
    "1.7 GB": None,  # measured: all processes of drop 14
    "2 GB": None,
    "2 %": None,
    "30 %": None,
}
