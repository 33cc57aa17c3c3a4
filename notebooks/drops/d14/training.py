"""Drop 14's training: the real 4-layer model on the GPUs or CPU of this machine, by the course's script and
by accelerate; its bytes and its seconds, predicted and counted.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from drops.measured import Step, product_speed
from helpers import toy, train
from helpers.ranks import World, current, memory
from helpers.train import Config
from three_axes import devices
from three_axes.paper import by_hand
from three_axes.plan import TOY, Job, Layout, ModelShape, estimate, sent
from three_axes.table import Table, human

TRIAL_SECONDS = 120  # for two steps of ranks that share a GPU


def world_here() -> World:
    """The world for this machine: with several GPUs a rank on each of 8, 4 or 2 of them; with one GPU eight
    ranks that share it, or four if eight cannot train on it; otherwise eight ranks on the CPU. Prints why
    ranks cannot share a GPU.
    """
    if (gpus := devices.gpus()) > 1:
        return World(max(n for n in (8, 4, 2) if n <= gpus), gpus=True, timeout=300)
    for n in (8, 4) if gpus else ():
        try:
            return _that_trains(World(n, gpus=True, timeout=300))
        except ValueError as e:  # NCCL is too old for any number of ranks
            print(e)
            break
        except RuntimeError as e:
            print(e)
    return World(8, timeout=300)


def _that_trains(world: World) -> World:
    """Return the world if it trains two steps of a small model, cut along as many axes as possible: each
    group of ranks needs memory of its own on a GPU. Otherwise close it and raise RuntimeError.
    """
    config = Config(**layout_here(world.n, Layout(dp=2, tp=2, pp=2)), hidden=32, seq_len=16, batch=8)
    try:
        world.run(second_step, config, timeout=TRIAL_SECONDS)
    except BaseException:
        world.close()
        raise
    return world


def layout_here(ranks: int, layout: Layout) -> dict[str, int]:
    """{"dp", "tp", "pp"} for the 4-layer model on 1, 2, 4 or 8 ranks. Each axis that `layout` has gets size 2
    as long as ranks are left, tp and pp first. The ranks left then go to the largest axis of `layout` that
    can grow: the model has 8 heads and 4 layers.
    """
    sizes, most = dict(dp=1, tp=1, pp=1), dict(dp=8, tp=8, pp=4)
    largest = sorted(sizes, key=layout.members, reverse=True)
    for axis in ("tp", "pp", "dp"):
        if layout.members(axis) > 1 and math.prod(sizes.values()) < ranks:
            sizes[axis] = 2
    while (left := ranks // math.prod(sizes.values())) > 1:
        axis = next(axis for axis in [*largest, "dp"] if sizes[axis] < most[axis])
        sizes[axis] *= min(left, 2)
    return sizes


def shape_of(config: Config) -> ModelShape:
    """The 4-layer model, for the planner."""
    sizes = config.layers, config.hidden, config.heads, toy.VOCABULARY
    return ModelShape("toy", *sizes, positions=config.seq_len)


def on_paper(config: Config) -> tuple[Job, Layout]:
    """A run as the planner's (job, layout)."""
    sizes = dict(dp=config.dp, tp=config.tp, pp=config.pp, microbatch=config.microbatch)
    how = dict(schedule=config.schedule, interleave=config.stages // config.pp, sequence_parallel=config.sp)
    job = Job(shape_of(config), global_batch=config.batch, seq_len=config.seq_len, framework=TOY)
    return job, Layout(**sizes, **how, zero=3)


def twin(config: Config, steps: int) -> list[float]:
    """The losses of the same steps in one process, by plain PyTorch."""
    model, text = config.model(), train.read_text(config.text)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay)
    losses = []
    for step in range(steps):
        losses.append(toy.twin_step(model, *train.batch_of(text, step, config)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.param_groups[0]["lr"] = train.learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@contextmanager
def losses_live(run: Path):
    """In this block, draw a run's losses every second from the metrics that it writes."""
    from IPython.display import Markdown, display

    from helpers import draw

    ended = threading.Event()

    def picture():
        losses = [line["loss"] for line in train.read_metrics(run)]
        if not losses:
            return Markdown("*Before the first step.*")
        return draw.loss_curves({"training": {"loss": losses}}, "Loss, step by step")

    handle = display(picture(), display_id=True)
    if handle is None:  # not in a notebook
        yield
        return

    def follow() -> None:
        while not ended.wait(1.0):
            handle.update(picture())

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        handle.update(picture())


def train_on(world: World, config: Config) -> str:
    """Train on the ranks of a world until `config.steps`, from the last checkpoint in `config.out` if there
    is one. Returns the lines that rank 0's run reports.
    """

    def run(config):
        lines: list[str] = []
        done = train.train(config, current.rank.device, lines.append).number
        return "\n".join([*lines, f"{done} steps are done."])

    with losses_live(Path(config.out)):
        return world.run(run, config)[0]


def one_step(world: World, config: Config) -> Step:
    """The second of two steps of training, for `draw.splits`. `config` has its axes filled in."""
    kept = world.run(second_step, config)
    return Step({axis: getattr(config, axis) for axis in ("pp", "dp", "tp")}, world.traffic, kept)


def three_ways(step: Step, config: Config) -> Table:
    """One step: bytes that rank 0 sends for each axis, predicted, counted and, summed up, on the wire; and
    the bytes of states that it holds.
    """
    traffic, ranks = step.traffic, len(step.kept)
    held = step.kept[0]["parameters"] + step.kept[0]["optimizer"]
    counted = Counter()
    for row in traffic.ranks[0]:
        counted[row.axis] += row.algorithmic
        if row.op == "all_reduce" and len(row.members) == ranks:
            # This is the all-reduce of the loss and the gradients' norm, which the prediction leaves out.
            counted[row.axis] -= by_hand.all_reduce_bytes(16, ranks)
    rows = [
        ["dp (FSDP)" if axis == "dp" else axis, human(size), human(counted[axis])]
        for axis, size in sent_by_first(config).items()
        if size
    ]
    rows.append(["weights and Adam's state", human(states_of_first(config)), human(held)])
    wire = traffic.wire[0]
    return Table(
        ["rank 0, one step", "predicted", "counted"],
        rows,
        ["all axes, on the wire", "", "n/a" if wire is None else human(round(wire, -4))],
        title=config.layout,
    )


def speeds(world: World, config: Config) -> Table:
    """Tokens per second of the run in `config.out`, beside the tokens per second of a step that computes
    matrix products only.
    """
    seconds = statistics.median(line["seconds"] for line in train.read_metrics(Path(config.out))[5:])
    count = min(world.n, devices.gpus() if world.gpus else os.cpu_count() or 1)
    flops = world.run(product_speed)[0] * count
    tokens = config.batch * config.seq_len
    flops_of_token = shape_of(config).flops_per_token(config.seq_len)
    bound = flops / flops_of_token
    rows = [
        ["predicted from FLOPs alone", f"{bound:,.0f}", "100%"],
        ["measured", f"{tokens / seconds:,.0f}", f"{tokens / seconds / bound:.1%}"],
    ]
    on = f"{flops / 1e9:,.0f} GFLOP/s of {count} device{'s' * (count > 1)}"
    on += ", shared: seconds mean nothing" * world.shared
    title = f"{config.layout}: {on}, {flops_of_token / 1e6:.1f} MFLOP a token"
    return Table(["tokens/s", "", "share"], rows, title=title)


def second_step(config: Config) -> dict[str, int]:
    """On a rank: run two steps, of which the second is counted. Returns the bytes held in it, by kind."""
    trainer = train.Trainer(config, current.rank.device)
    trainer.step()
    kinds: dict[str, int] = {}

    def note_kinds(*_) -> None:  # before the optimizer's step, while gradients exist
        kinds.update(memory.by_kind(trainer.model, trainer.optimizer))

    trainer.optimizer.register_step_pre_hook(note_kinds)
    dist.barrier()
    current.count_from_here()
    with memory.saved_activations(trainer.model) as held:
        trainer.step()
    return kinds | {"activations": held.peak}


def sent_by_first(config: Config) -> dict[str, float]:
    """Bytes that rank 0 sends in a step, by axis, in float32, by the planner's list of operations."""
    job, layout = on_paper(config)
    return dict.fromkeys(("tp", "dp", "pp"), 0.0) | sent(job, layout, 0)


def states_of_first(config: Config) -> float:
    """Bytes of float32 weights and of Adam's m and v on rank 0 between steps, by the planner."""
    held = estimate(*on_paper(config)).stages[0]
    return held["weights"] + held["optimizer"]


def as_launched() -> None:
    """Set the variables that a launcher sets and accelerate reads. accelerate takes LOCAL_RANK for the number
    of a GPU. The address is not used, because the group exists already.
    """
    gpu = current.rank.device.index
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank() if gpu is None else gpu),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
    }


def _accelerator():
    """An Accelerator with FSDP2 over all ranks, block by block; with data parallelism for ranks on the CPU,
    over which accelerate does not shard.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig

    here = PartialState(cpu=current.rank.device.type == "cpu")
    if here.distributed_type != DistributedType.MULTI_GPU or here.num_processes == 1:
        return Accelerator()
    by_block = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return Accelerator(
        fsdp_plugin=by_block, parallelism_config=ParallelismConfig(dp_shard_size=dist.get_world_size())
    )


class ByAccelerate:
    """The training by accelerate's own API, on the ranks of an existing group."""

    def __init__(self, config: Config):
        as_launched()
        self.config, self.text, self.number = config, train.read_text(config.text), 0
        self.accelerator = _accelerator()
        model = config.model()
        adam = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.model, self.optimizer = self.accelerator.prepare(model, adam)

    def step(self) -> float:
        """One step. Returns the mean loss of all ranks."""
        here = self.accelerator
        tokens, targets = (
            whole.chunk(here.num_processes)[here.process_index].to(here.device)
            for whole in train.batch_of(self.text, self.number, self.config)
        )
        loss = train.loss_of(self.model(tokens), targets)
        here.backward(loss)
        here.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.param_groups[0]["lr"] = train.learning_rate(self.number, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return here.reduce(loss.detach(), "mean").item()


def with_accelerate(config: Config, steps: int) -> list[float]:
    """On a rank: the losses of the first `steps` steps by accelerate."""
    training = ByAccelerate(config)
    return [training.step() for _ in range(steps)]
