"""Makes a poster as HTML: what each way to split a training job cuts, sends and holds. A browser prints it on
one page of A4 in landscape. `three_axes.plan` computes its figures.
"""

from __future__ import annotations

from helpers import draw
from three_axes.paper import SCHEDULES, by_hand, paper
from three_axes.plan import MODELS, Job, Layout, estimate, sent
from three_axes.table import Table, human

SENDS = Table(
    ["", "cuts", "each GPU sends (bytes)", "when", "hidden by", "each GPU holds (bytes)"],
    [
        ["DP", "the batch", "gradients, all-reduced: 2·(d−1)/d · 2N", "once a step", "most of it by backward",
         "all: 16·N, and the activations of its b"],
        ["ZeRO-1", "the optimizer's states too", "the same, as reduce-scatter and all-gather", "once a step",
         "a part by backward", "4·N + 12·N/d"],
        ["FSDP, ZeRO-3", "weights, gradients, states", "weights twice, gradients once: 3·(d−1)/d · 2N",
         "each microbatch, in each layer", "the layer before", "16·N/d, and one layer whole"],
        ["TP", "each matrix: columns, then rows", "4 all-reduces a layer: 8·(t−1)/t · 2bsh",
         "each microbatch, in each layer", "nothing: keep it in NVLink", "16·N/t, its share inside a layer"],
        ["TP with SP", "the tokens between matrices too", "gathers and scatters: 10·(t−1)/t · 2bsh a layer",
         "the same", "products cut in pieces", "16·N/t, activations/t"],
        ["PP", "the layers, into stages", "2bsh to the next stage, 2bsh to the previous", "each microbatch",
         "other microbatches' work", "16·N/p, up to p microbatches (1F1B)"],
        ["CP", "the tokens of a sequence", "K and V of its tokens to all others", "in each layer",
         "attention, in a ring", "all weights, activations/c"],
        ["EP", "the experts", "each token to its experts and back", "in each layer with experts",
         "nothing by itself", "1/e of the experts"],
    ],
)  # fmt: skip
LETTERS = (
    "N parameters · b sequences of s tokens in a microbatch, m microbatches in a step · h hidden size · d, t,"
    " p, c, e ranks along DP, TP, PP, CP, EP · bytes a GPU, 2 a number. An all-reduce of S bytes on n ranks"
    " sends 2·(n−1)/n · S; a reduce-scatter, an all-gather or an all-to-all half as many; a send S."
)


def figures() -> Table:
    """What each scheme costs one GPU: Llama-3-8B on 8 H100s, 32 sequences of 4096 tokens."""
    job = Job(MODELS["llama-3-8b"], global_batch=32, seq_len=4096)
    schemes = {
        "DP 8": Layout(dp=8),
        "ZeRO-1, DP 8": Layout(dp=8, zero=1),
        "FSDP (ZeRO-3), DP 8": Layout(dp=8, zero=3),
        "TP 8 with SP": Layout(tp=8),
        "PP 8, 1F1B": Layout(pp=8),
        "DP 2 · TP 2 · PP 2": Layout(dp=2, tp=2, pp=2),
    }
    rows = []
    for name, layout in schemes.items():
        cuts = layout.dp, layout.tp, layout.pp, layout.zero
        e, states = estimate(job, layout), by_hand.states_bytes(job.model.params, *cuts)
        sizes = [human(size) for size in (sum(states), e.memory_bytes, sum(sent(job, layout).values()))]
        rows.append([name, *sizes, f"{e.time['bubble'] / e.step_seconds:.0%}", f"{e.step_seconds:.2f} s"])
    columns = ["Llama-3-8B on 8 H100s", "states", "memory, fullest", "sent in a step", "bubble", "step"]
    title = f"batch {job.global_batch} × {job.seq_len} tokens, microbatch 1, by three_axes.plan"
    return Table(columns, rows, title=title)


def schedules(p: int = 8, m: int = 16) -> Table:
    """Idle share and microbatches held for each schedule, from a simulation: forward 1, backward 2."""
    rows = []
    for name, record in SCHEDULES.items():
        timeline = paper(record.make(p, m, 2))
        chunks = f", v = {timeline.schedule.v}" * (timeline.schedule.v > 1)
        rows.append([name + chunks, f"{timeline.bubble:.1%}", f"{timeline.held:.3g}"])
    title = f"p = {p}, m = {m}; held: microbatches in flight on the fullest rank"
    return Table(["schedule", "bubble", "held"], rows, title=title)


def parts() -> dict[str, str]:
    """The parts that data/site/cheatsheet.html.j2 puts on the page, as HTML."""
    tables = {"sends": SENDS, "figures": figures(), "schedules": schedules()}
    return {"cuts": draw.cuts().html(), "letters": LETTERS} | {k: t._repr_html_() for k, t in tables.items()}
