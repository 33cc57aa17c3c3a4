"""Events of a trace of torch.profiler, made by hand."""


def x(cat: str, name: str, ts: float, dur: float, tid=7, **args) -> dict:
    """An event that begins at `ts` and takes `dur`, both in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


def nccl(name: str, axis: str, n: int, ts: float, dur: float, tid=20) -> dict:
    """The kernel of a collective along an axis: `n` numbers in a group of four ranks."""
    arguments = {"Collective name": name, "In msg nelems": n, "Out msg nelems": n, "Group size": 4}
    arguments |= {"dtype": "BFloat16", "Process Group Description": f"mesh_{axis}"}
    return x("kernel", "ncclDevKernel_X", ts, dur, tid, **arguments)


def by_hand(slow: float = 0) -> list[dict]:
    """A step of 1,000 µs, or `slow` µs more. The time in each of its parts can be computed by hand."""
    launch = lambda i, ts: x("cuda_runtime", "cudaLaunchKernel", ts, 5, 1, correlation=i)
    kernel = lambda i, ts, dur, name="gemm": x("kernel", name, ts, dur, 7, correlation=i)
    return [
        x("user_annotation", "ProfilerStep#7", 0, 1000 + slow, 1),
        *(launch(1, 0), kernel(1, 100, 300)),  # computes 100–400
        nccl("allreduce", "tp", 1000, 300, 200),  # tp 300–500, 100 of it exposed
        nccl("send", "pp", 500, 500, 20),  # a send takes 20, the next one 60: it waits 40
        *(launch(2, 0), kernel(2, 520, 80)),  # computes 520–600
        nccl("send", "pp", 500, 600, 60),
        *(launch(3, 700), kernel(3, 710, 40)),  # idle 660–710, since its launch came late
        x("user_annotation", "enumerate(DataLoader)#_Single.__next__", 660, 30, 1),
        *(launch(4, 610), kernel(4, 800, 100 + slow)),  # idle 750–800, though it was launched
        x("user_annotation", "Optimizer.step#AdamW.step", 890 + slow, 60, 1),
        *(launch(5, 900 + slow), kernel(5, 950 + slow, 120)),  # the optimizer
        x("gpu_memcpy", "Memcpy HtoD", 1070 + slow, 30, 9, correlation=6),
    ]
