"""Train the 4-layer model for real, sharded by (dp, tp, pp, cp), on whatever is there: CPUs over gloo, GPUs
over NCCL.

    python -m helpers.train
    torchrun --nproc-per-node 8 -m helpers.train --dp 2 --tp 2 --pp 2
    accelerate launch --multi_gpu --num_processes 8 \\
        -m helpers.train --dp 2 --tp 2 --pp 2

The first is one process, the twin; the others are eight on one machine. On several machines, run the same on
each of them (two of four ranks here), where HOST is the name of one of them:

    torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m helpers.train --tp 2 --pp 2 --out /shared/run

    srun --ntasks 16 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS \\
        MASTER_ADDR=HOST MASTER_PORT=29400 \\
        python -m helpers.train --tp 2 --pp 2 --out /shared/run'

With torchrun dp is left to what is there, so when the machine other than HOST is lost, torchrun starts again
on one, and the run goes on from its last checkpoint with half the data parallelism. HOST itself keeps the
list of who is there: without it, start again.

The first line says on what the ranks train: on GPUs over NCCL where each rank can have one of its own, else
all on the CPU over gloo. gloo listens on the network that leads to the other hosts; GLOO_SOCKET_IFNAME and
NCCL_SOCKET_IFNAME name another one, as `ip addr` shows them. A rank that hears nothing for `--timeout`
seconds says so and ends; on GPUs that is the longest a step may take.

What splits what:

    dp   FSDP2 (`fully_shard`): examples, weights, gradients and
         optimizer state. `--shard 2` of `--dp 8` keeps 4 replicas
         of 2 shards each; `--shard 1` keeps the weights whole, by DDP
         where there is no tp and no pp
    cp   the tokens of each sequence, zig-zag: attention gathers the
         keys and values of all ranks that share it. They hold the
         same weights, so these are shared out over dp·cp ranks
    tp   DTensor (`parallelize_module`): the matrices of every block;
         `--sp` also what lies between them
    pp   `torch.distributed.pipelining`: the blocks;
         `--schedule 1F1B` or `GPipe`

Every layout computes the twin's step: same text, same batch, same weights. The batch of step k depends on the
seed and on k alone, so a run may go on under another layout. Text is bytes, by default this course's own
prose.

With `--out run` it writes run/metrics.jsonl, a line for each step, and every `--every` steps a checkpoint
(see `helpers.train.checkpoint`). Started again with the same `--out` it goes on from the last complete one,
and says so. One run owns its folder: a second start in it is refused while the first is under way. When
torchrun is killed, its ranks end within a second. SIGTERM and Ctrl-C end a run after the step that is under
way, with a checkpoint, and it says the command that goes on.

`--sample "The "` afterwards lets the trained model write, in one process.
"""

from importlib import import_module

HOMES = {
    "Config": "config",
    "Trainer": "trainer",
    "batch_of": "data",
    "checkpoint": "checkpoint",
    "learning_rate": "trainer",
    "loss_of": "trainer",
    "read_metrics": "metrics",
    "read_text": "data",
    "run": "launch",
    "sample": "run",
    "train": "run",
    "write": "run",
}


def __getattr__(name: str):
    """Imported when it is asked for. torch takes seconds, in which Ctrl-C would print where it stood: so
    `__main__` must run first.
    """
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{HOMES[name]}", __name__)
    return module if name == HOMES[name] else getattr(module, name)
