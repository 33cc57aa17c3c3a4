"""Functions for the cells of drop b3's notebook; its exercises use some of them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from helpers.ranks import World, current, memory
from helpers.toy import experts
from three_axes.count import Timeline, Traffic
from three_axes.files import rows_of
from three_axes.table import Table


def tokens(t: int, h: int) -> torch.Tensor:
    """This rank's tokens, (t, h), different on every rank."""
    return torch.randn(t, h, generator=torch.Generator().manual_seed(100 + dist.get_rank()))


# Eight ranks, two meshes over them. Outermost axis first.
FOLDED = {"attention": {"dp": 4, "tp": 2}, "experts": {"edp": 2, "ep": 4}}
ROW = 2e-4  # emulated seconds of one row, a token's copy, in an expert
# Name -> (the most rows that an expert takes from a rank, None: all; rate at which the bias moves)
POLICIES = {"none dropped": (None, 0.0), "capacity": (16, 0.0), "balancing bias": (None, 0.03)}


def layer_traffic(world: World, t: int = 256, h: int = 64) -> Traffic:
    """The bytes of one expert layer, top-2 of four experts on four ranks, forward and backward."""

    def run():
        layer = experts.split_experts(experts.Experts(h))
        x = tokens(t, h).requires_grad_()
        y, _ = experts.expert_parallel(layer, x)
        y.sum().backward()

    world.run(run)
    return world.traffic


def _paced(layer, rows, counts):
    with current.span("F"):
        time.sleep(ROW * len(rows))
        return experts.run_experts(layer, rows, counts)


def timeline_of(world: World, skew: float, t: int = 256, h: int = 64) -> Timeline:
    """The timeline of one forward of an expert layer, with emulated compute and the bytes kept for backward.

    skew: is added to expert 0's score for every token, for the choice of experts alone.
    """

    def run():
        layer = experts.split_experts(experts.Experts(h))
        layer.bias[0] = skew
        x = tokens(t, h)
        experts.expert_parallel(layer, x)  # a warm-up
        current.count_from_here()
        dist.barrier()
        with memory.saved_activations(layer):
            experts.expert_parallel(layer, x, compute=_paced)[0].sum()

    world.run(run)
    return world.timeline


def _train(capacity: int | None, rate: float, steps: int = 60, t: int = 32, h: int = 16) -> list[float]:
    """On a rank: train an expert layer on four kinds of tokens, of which one is common.

    Returns means over the last 20 steps: the loss, the share of the copies that were dropped, and the rows of
    the fullest expert in units of the mean.
    """
    torch.manual_seed(0)
    centres, answers = torch.randn(4, h), torch.randn(4, h, h) / h**0.5
    layer = experts.split_experts(experts.Experts(h))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    chance = torch.Generator().manual_seed(1 + dist.get_rank())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    of_steps = []
    for _ in range(steps):
        kind = torch.tensor([0.55, 0.25, 0.15, 0.05]).multinomial(t, True, generator=chance)
        x = centres[kind] + 0.3 * torch.randn(t, h, generator=chance)
        target = (x[:, None] @ answers[kind])[:, 0]
        y, load = experts.expert_parallel(layer, x, capacity=capacity)
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        experts.average_expert_gradients(layer, dist.group.WORLD, alone)
        optimizer.step()
        kept = load if capacity is None else load.clamp(max=capacity)
        sums = torch.cat([loss.detach()[None], load, kept])
        dist.all_reduce(sums)
        loss, load, kept = sums[0] / dist.get_world_size(), sums[1:5], sums[5:]
        experts.even_out(layer, load, rate)
        of_steps.append([float(loss), float(1 - kept.sum() / load.sum()), float(kept.max() / load.mean())])
    return torch.tensor(of_steps[-20:]).mean(0).tolist()


def policies(world: World) -> Table:
    """An uneven router without a remedy, with a capacity, and with a balancing bias: dropped copies, rows of
    the fullest expert, loss.
    """
    rows = []
    for name, (capacity, rate) in POLICIES.items():
        loss, dropped, fullest = world.run(_train, capacity, rate)[0]
        rows.append([name, f"{dropped:.0%}", f"{fullest:.1f}", f"{loss:.2f}"])
    columns = ["policy", "dropped", "fullest expert, mean = 1", "loss"]
    return Table(columns, rows, title="60 steps; means of the last 20")


def published() -> dict[str, float]:
    """Layout -> MFU in %, of Mixtral 8x22B on 128 H100: Liu et al. 2025 (MoE Parallel Folding), Table 3."""
    named = {"MCore": "Megatron-Core", "MCore w/ Folding": "Megatron-Core, folded"}
    return {
        named.get(row["method"], row["method"]): float(row["mfu_pct"])
        for row in rows_of("moe_folding_2025_table3.csv")
        if row["model"] == "Mixtral-8x22B"
    }


def dispatched(T: int, h: int, k: int, ep: int) -> float:
    """Numbers that a rank sends to dispatch T tokens of h numbers to k experts each, over ep ranks."""
    return T * k * h * (ep - 1) / ep


def answer(T: int, h: int, k: int, ep: int) -> tuple[str, str, str]:
    """The arguments of `guess.reveal`: these numbers in halves of T·h."""
    why = f"*T·k·h*·(*ep*−1)/*ep*: *k* copies of each token, and of them {ep - 1}/{ep} go to other ranks."
    return f"{2 * dispatched(T, h, k, ep) / (T * h):.0f}/2 · T·h", why, "Computed"
