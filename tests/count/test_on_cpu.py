"""Scripts that name CUDA, as public training scripts do, run unchanged on CPUs and are counted."""

import json
import subprocess
import sys

import forked
import pytest

# Scripts as people publish them, each after BEGIN.
BEGIN = """
import os, torch, torch.distributed as dist
from torch import nn
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
"""
DDP = """
from torch.distributed import init_process_group
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
torch.cuda.set_device(local)
init_process_group(backend="nccl", device_id=torch.device("cuda", local))
torch.cuda.manual_seed(3)
model = torch.compile(nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 1)).to(local))
model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")
data = TensorDataset(torch.randn(32, 32), torch.randn(32, 1))
stream, begun, ended = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
sampler = DistributedSampler(data)
loads = dict(pin_memory=True, num_workers=1, multiprocessing_context="fork")
for x, y in DataLoader(data, batch_size=4, sampler=sampler, **loads):
    begun.record()
    with torch.cuda.stream(stream):
        on_gpu, y = x.to(local, non_blocking=True), y.cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    on_gpu.mul_(2)
    assert not torch.equal(on_gpu, x), "a tensor that goes to a GPU is a copy"
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(on_gpu), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    ended.record()
    torch.cuda.synchronize()
mean = torch.tensor(float(rank), device="cuda")
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert mean == 0.5 and begun.elapsed_time(ended) > 0 and torch.cuda.max_memory_allocated() > 1e6
torch.save(model.state_dict(), f"{rank}.pt")
torch.load(f"{rank}.pt", f"cuda:{local}")
torch.load(f"{rank}.pt", map_location={"cuda:0": f"cuda:{local}"})
dist.barrier(device_ids=[local])
dist.destroy_process_group()
"""
FSDP2 = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
kind = torch.accelerator.current_accelerator()
device = torch.device(f"{kind}:{local}")
torch.accelerator.set_device_index(local)
dist.init_process_group(backend=dist.get_default_backend_for_device(device), device_id=device)
mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
with torch.device("meta"):
    model = nn.Linear(32, 32)
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
fully_shard(model, mesh=mesh, mp_policy=half)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
drawn = torch.Generator(device="cuda").manual_seed(1)
for _ in range(4):
    model(torch.randn(4, 32, device="cuda", generator=drawn)).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.device_mesh import init_device_mesh
torch.cuda.set_device(local)
dist.init_process_group("cpu:gloo,cuda:nccl")
mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
model = FSDP(nn.Linear(64, 64), device_mesh=mesh, device_id=torch.cuda.current_device(), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(8, 64).cuda()).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
"""
PIPELINE = """
device = "cuda:%d" % local
dist.init_process_group("nccl")
tp = [dist.new_group([0], backend="nccl"), dist.new_group([1], backend="nccl")][rank]
w = torch.randn(8, 8, device=device, requires_grad=True)
optimizer = torch.optim.Adam([w])
for _ in range(4):
    x = torch.randn(4, 8).pin_memory().cuda() if rank == 0 else torch.empty(4, 8, device=device)
    if rank:
        dist.recv(x, 0)
    y = x @ w
    dist.all_reduce(y.detach(), group=tp)
    if rank == 0:
        dist.send(y.detach(), 1)
    y.sum().backward()
    optimizer.step()
    torch.cuda.empty_cache()
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
model = nn.Linear(16, 4)
data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.randint(4, (32,)))
data = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
for x, y in data:
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""
FUTURES = """
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
model = nn.Linear(64, 64, bias=False).to(f"cuda:{local}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    gradient = model.weight.grad
    mine, average = torch.empty_like(gradient[:32]), dist.ReduceOp.AVG
    future = dist.reduce_scatter_tensor(mine, gradient, op=average, async_op=True).get_future()
    future.wait()
    future = dist.all_gather_into_tensor(gradient, mine, async_op=True).get_future()
    future.then(lambda done: None).wait()
    optimizer.step()
    optimizer.zero_grad()
"""
GRADIENTS = 4 * (32 * 64 + 64 + 64 + 1)


@pytest.mark.parametrize(
    "script, row, payload",
    [
        (DDP, ("world", "all_reduce"), GRADIENTS),
        (FSDP2, ("dp", "reduce_scatter"), 2 * 33 * 32),
        (FSDP1, ("dp", "reduce_scatter"), 4 * 65 * 64),
        (PIPELINE, ("pp", "send"), 4 * 4 * 8),
        (FUTURES, ("world", "reduce_scatter"), 4 * 64 * 64),
        (ACCELERATE, ("world", "all_reduce"), 4 * 17 * 4),
    ],
    ids=["ddp", "fsdp2", "fsdp1", "pipeline", "futures", "accelerate"],
)
def test_a_script_that_names_cuda_is_counted_on_processors(tmp_path, script, row, payload):
    (tmp_path / "train.py").write_text(BEGIN + script)
    axes = ["--axes", "pp=2,tp=1"] if script is PIPELINE else []
    options = "--cpu", "--json", "counted.json", *axes, "train.py"
    done = forked.command("three_axes", "count", *options, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cuda is the CPU") == 1 and "4 steps of the optimizer" in done.stdout
    told = json.loads((tmp_path / "counted.json").read_text())
    each = {(r["axis"], r["collective"]): r["payload"] for r in told["ranks"][0]["each"]}
    assert each[row] == payload and not any("calls" in said for said in told["between_ranks"])
    assert ("rank 1, a step" in done.stdout) == (script is PIPELINE), "each stage has its table"


@pytest.mark.slow
def test_a_traceback_begins_with_the_scripts_own_line(tmp_path):
    (tmp_path / "train.py").write_text("def fails():\n    raise KeyError('theirs')\nfails()")
    for command in ("count", "verify"):
        words = [sys.executable, "-m", "three_axes", command, "train.py"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        lines = [line for line in done.stderr.splitlines() if line.lstrip().startswith("File")]
        assert done.returncode == 1 and len(lines) == 2, done.stderr
        assert "train.py" in lines[0] and "in fails" in lines[1]


def test_a_use_of_cuda_that_cpus_cannot_replace_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.CUDAGraph()")
    done = forked.command("three_axes", "count", "--cpu", "train.py", cwd=tmp_path)
    assert done.returncode and "--cpu has no answer for what this line asks of CUDA" in done.stderr


@pytest.mark.parametrize(
    "axes, sentence",
    [
        ("tp=[[0,1]]", "give a mesh, the outermost axis first"),
        ("pp=2,tp=2", "is of 4 ranks"),
        ("dp=2,dp=2", "names an axis twice"),
    ],
)
def test_wrong_axes_are_refused(tmp_path, axes, sentence):
    (tmp_path / "train.py").write_text("")
    done = forked.command("three_axes", "count", "--axes", axes, "train.py", cwd=tmp_path, ranks=2)
    assert done.returncode == 2 and sentence in done.stderr
