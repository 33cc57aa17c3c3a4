"""Devices, networks and clusters, with the published numbers on which time and memory depend.

Speeds are those that the maker prints, in bytes per second, per GPU and in one direction; NVIDIA prints
NVLink's for both directions. The shares that programs reach are the efficiencies in `plan.cost.Constants`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ..checks import check_fields, is_file, named, positive, read_object, unknown, whole

# Generation -> how the names of its devices begin.
GENERATIONS = {"A100": ("a100",), "Hopper": ("h100", "h200", "h20"), "Blackwell": ("b", "gb")}


def generation(name: str) -> str:
    """The generation of a device; "" for one without published runs in this project."""
    return next((one for one, begins in GENERATIONS.items() if name.startswith(begins)), "")


@dataclass(frozen=True)
class Device:
    """One GPU. flops: printed dense half-precision FLOP/s, by which MFU divides. achievable: FLOP/s measured
    for matrix products, at most flops. bandwidth: printed bytes/s of its own memory. achievable_bandwidth:
    bytes/s measured for streaming through that memory, 0 without a measurement: the planner then uses a share
    of `bandwidth`. memory: its real bytes, more than in the card's name. fp8, achievable_fp8, fp4,
    achievable_fp4: like flops and achievable, for narrower numbers; 0 if it has none. assumed: whether
    `achievable` is assumed, not measured. Raises ValueError for numbers that are out of range in these units,
    and for an achievable rate above the printed one.
    """

    name: str
    flops: float
    achievable: float
    bandwidth: float
    memory: float
    assumed: bool = False
    fp8: float = 0.0
    achievable_fp8: float = 0.0
    fp4: float = 0.0
    achievable_fp4: float = 0.0
    achievable_bandwidth: float = 0.0

    @property
    def generation(self) -> str:
        """A100, Hopper or Blackwell; "" for another."""
        return generation(self.name)

    def rate(self, name: str) -> float:
        """FLOP/s that products of bf16, fp8 or fp4 reach, measured or assumed; 0 if the device has none."""
        return self.achievable if name == "bf16" else getattr(self, f"achievable_{name}")

    def __post_init__(self):
        called = f"device {self.name!r}: "
        for field in ("fp8", "achievable_fp8", "fp4", "achievable_fp4"):
            positive(called + field, getattr(self, field), zero=True, least=1e9, unit="FLOP/s")
        for field in ("flops", "achievable"):
            positive(called + field, getattr(self, field), least=1e9, unit="FLOP/s")
        for field, zero in (("bandwidth", False), ("achievable_bandwidth", True)):
            positive(called + field, getattr(self, field), zero=zero, least=1e6, unit="bytes/s")
        positive(called + "memory", self.memory, least=1e6, unit="bytes")
        if not isinstance(self.assumed, bool):
            raise ValueError(f"{called}assumed must be true or false, not {self.assumed!r}")
        if self.achievable > self.flops:
            more = f"{self.achievable:g} is more than the printed flops {self.flops:g}"
            raise ValueError(f"{called}achievable {more}")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Nodes of GPUs and what connects them: bandwidths in bytes/s, per GPU and in one direction; latencies in
    seconds for one message.

    rails: ports of a node that one group can use at once: all, unless the software makes only one ring.
    busbw: (nodes, bytes/s) measured for each rank of an all-reduce over so many whole nodes (as nccl-tests
    print it), fewest nodes first. Fabrics slow down as they grow; without busbw each port keeps its speed.
    busbw_gather: the same for all-gathers and reduce-scatters, where it differs. all_to_all: bytes/s through
    the link and through the port, measured for an all-to-all; 0 without a measurement. host_bandwidth,
    host_memory_bandwidth: bytes/s of a GPU's link to its host (PCIe 4.0, 16 lanes), and its share of the
    host's memory (sixteen channels of DDR4-3200 for eight GPUs). Raises ValueError for numbers out of range.
    """

    name: str
    gpus_per_node: int = 8
    intra_node_bandwidth: float = 300e9
    inter_node_bandwidth: float = 25e9
    intra_node_latency: float = 5e-6
    inter_node_latency: float = 15e-6
    rails: int = 64
    busbw: tuple[tuple[int, float], ...] = ()
    busbw_gather: tuple[tuple[int, float], ...] = ()
    all_to_all: tuple[float, float] = (0.0, 0.0)
    host_bandwidth: float = 32e9
    host_memory_bandwidth: float = 51e9

    def __post_init__(self):
        called = f"{type(self).__name__.lower()} {self.name!r}: "
        for field in ("gpus_per_node", "rails"):
            whole(called + field, getattr(self, field))
        for field in ("host_bandwidth", "host_memory_bandwidth"):
            positive(called + field, getattr(self, field), least=1e5, unit="bytes/s per GPU")
        for field in ("intra_node_bandwidth", "inter_node_bandwidth"):
            positive(called + field, getattr(self, field), least=1e5, unit="bytes/s per GPU, one direction")
        for field in ("intra_node_latency", "inter_node_latency"):
            positive(called + field, getattr(self, field), zero=True, most=1.0, unit="seconds")
        try:
            link, port = self.all_to_all
            positive("link", link, zero=True, least=1e5)
            positive("port", port, zero=True, least=1e5)
        except (TypeError, ValueError):
            wrong = f"bytes/s of link and port, (3e11, 4e10) say, not {self.all_to_all!r}"
            raise ValueError(f"{called}all_to_all is {wrong}") from None
        for field in ("busbw", "busbw_gather"):
            _check_speeds(called + field, getattr(self, field))


def _check_speeds(called: str, pairs) -> None:
    try:
        for nodes, speed in pairs:
            whole("nodes", nodes, 2)
            positive("bytes/s", speed, least=1e5)
        rising = sorted({nodes for nodes, _ in pairs}) == [nodes for nodes, _ in pairs]
    except (TypeError, ValueError):
        rising = False
    if not (rising and isinstance(pairs, tuple)):
        raise ValueError(
            f"{called} must be pairs of nodes (2 or more, rising) and bytes/s, ((2, 3.6e11), (4, 1.6e11))"
            f" say, not {pairs!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Cluster(Network):
    """A network with a device at each of its ends.

    gpu_hours_between_interruptions: mean GPU-hours between unexpected interruptions; Llama 3's 16,384 H100s
    had 419 in 54 days (Meta 2024, section 3.3.4). storage_bandwidth: bytes/s of one GPU's share when a
    checkpoint is written; Llama 3's cluster had 2 TB/s for all, section 3.3.1.
    """

    device: Device
    gpu_hours_between_interruptions: float = 16384 * 54 * 24 / 419
    storage_bandwidth: float = 2e12 / 16384

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.device, Device):
            raise ValueError(
                f"cluster {self.name!r}: device must be a Device, DEVICES['h100-80gb'] say, not"
                f" {self.device!r}"
            )
        called = f"cluster {self.name!r}: "
        hours = self.gpu_hours_between_interruptions
        positive(called + "gpu_hours_between_interruptions", hours, least=1.0, unit="hours of one GPU")
        positive(called + "storage_bandwidth", self.storage_bandwidth, least=1e3, unit="bytes/s per GPU")

    def memory_speed(self, name: str, share: float) -> float:
        """Bytes/s of the GPU's memory (gpu), the host's (host), or the link between them (link): as measured,
        or else `share` of the printed speed.
        """
        printed = {"host": self.host_memory_bandwidth, "link": self.host_bandwidth}
        measured = self.device.achievable_bandwidth if name == "gpu" else 0.0
        return measured or share * printed.get(name, self.device.bandwidth)


MIB = 2**20


# Streams of a B200 were measured at 0.666 of what is printed (SimuMax, configs/system/b200_bf16_ceperm.json).
_HBM3E: dict[str, Any] = dict(bandwidth=8e12, achievable_bandwidth=0.666 * 8e12)


def _assumed(name: str, flops: float, bandwidth: float, memory: float, **more) -> Device:
    """A device without a measurement of products: three quarters of the printed FLOP/s are assumed."""
    more |= {f"achievable_{one}": 0.75 * more[one] for one in ("fp8", "fp4") if one in more}
    return Device(name, flops, 0.75 * flops, bandwidth, memory, assumed=True, **more)


USUAL = 720 / 794.5  # an H100's bfloat16 rate in shapes of transformers, as a share of its best shape's


def _fp8(printed: float, best: float) -> dict[str, Any]:
    """A device's fields for FP8. printed, best: FLOP/s on the data sheet, and measured in the best shape."""
    return dict(fp8=printed, achievable_fp8=USUAL * best)


def _blackwell(name: str, flops: float, best: float, memory: float, fp8: float, fp4: float) -> Device:
    """A Blackwell device. best, fp8: FLOP/s measured in the best shape; FP8 is printed at twice `flops`. fp4:
    printed FLOP/s. Nobody has published a measured product of FP4: three quarters of the printed rate are
    assumed in the best shape, as FP8 reaches.
    """
    narrow: dict[str, Any] = dict(fp4=fp4, achievable_fp4=USUAL * 0.75 * fp4, **_fp8(2 * flops, fp8))
    return Device(name, flops, USUAL * best, memory=memory, **narrow, **_HBM3E)


# Printed: the makers' data sheets, dense, half precision with float32 sums. Memory: as nvidia-smi and
# rocm-smi show it. Achievable: an A100, 271 of 312, a B200 1,745 and a B300 1,769 of 2,250, a GB200 1,822 of
# 2,500 (`USUAL` of these is taken), an MI355X 1,565 TFLOP/s, in their best shapes, and FP8 (Bekman, Machine
# Learning Engineering, matmul benchmarks, 2025 and 2026). An H100 runs into its power limit: 794 in the best
# shape there, 720 in those of transformers under PyTorch, as an H200; an MI300X 620 of 1,307 (SemiAnalysis,
# MI300X vs H100 vs H200, December 2024). FP8, of the same benchmarks, in its best shape 1,403 and 1,453.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("a100-40gb", 312e12, 271e12, 1.555e12, 40960 * MIB),
        Device("a100-80gb", 312e12, 271e12, 2.039e12, 81920 * MIB),
        Device("h100-80gb", 989.4e12, 720e12, 3.35e12, 81559 * MIB, **_fp8(1978.9e12, 1402.6e12)),
        # HBM2e and a limit of 500 W (torchtitan's benchmarks, 2024, which call its peak unknown). Power grows
        # with the cube of the clock: 720e12 · (500/700)^(1/3).
        Device("h100-96gb", 989.4e12, 644e12, 2.4e12, 97871 * MIB, **_fp8(1978.9e12, 1254e12)),
        Device("h200", 989.4e12, 720e12, 4.8e12, 143771 * MIB, **_fp8(1978.9e12, 1453.4e12)),
        _blackwell("b200", 2250e12, 1745e12, 183359 * MIB, fp8=3432e12, fp4=9000e12),
        _blackwell("gb200", 2500e12, 1822e12, 186e9, fp8=3616e12, fp4=10000e12),
        _blackwell("b300", 2250e12, 1769e12, 288e9, fp8=3353e12, fp4=14000e12),
        Device("mi300x", 1307.4e12, 620e12, 5.3e12, 206141652992),
        Device("mi355x", 2516e12, 1565e12, 8e12, 288 * 2**30),
        _assumed("h20", 148e12, 4e12, 97871 * MIB, fp8=296e12),
        _assumed("gb300", 2500e12, memory=288e9, fp8=5000e12, fp4=15000e12, **_HBM3E),
        _assumed("l40s", 362e12, 864e9, 46068 * MIB, fp8=733e12),
        _assumed("l4", 121e12, 300e9, 23034 * MIB, fp8=242e12),
        _assumed("a10g", 70e12, 600e9, 23028 * MIB),
        _assumed("rtx-4090", 165.2e12, 1.008e12, 24564 * MIB, fp8=330e12),
        _assumed("rtx-6000-ada", 364e12, 960e9, 49140 * MIB, fp8=728e12),
        _assumed("v100-32gb", 125e12, 900e9, 32768 * MIB),
        _assumed("t4", 65e12, 320e9, 15360 * MIB),
    )
}

WITHOUT_BF16 = ("v100-32gb", "t4")


def _cluster(name: str, device: str, intra: float, inter: float, node: int = 8, **speeds) -> Cluster:
    speeds |= dict(intra_node_bandwidth=intra, inter_node_bandwidth=inter)
    return Cluster(name=name, device=DEVICES[device], gpus_per_node=node, **speeds)


# To the host: PCIe 5.0 with 16 lanes, sixteen channels of DDR5-4800 (DGX H100) or 5600 for eight GPUs; a
# Grace has 900 GB/s of NVLink both ways and 500 GB/s of memory for two GPUs.
_PCIE5: dict[str, Any] = dict(host_bandwidth=64e9, host_memory_bandwidth=77e9)
_DDR5: dict[str, Any] = _PCIE5 | dict(host_memory_bandwidth=90e9)
_GRACE: dict[str, Any] = dict(host_bandwidth=225e9, host_memory_bandwidth=250e9)


CLUSTERS: dict[str, Cluster] = {
    c.name: c
    for c in (
        # DGX A100: NVLink 3, 600 GB/s both ways; eight 200 Gb/s InfiniBand ports for eight GPUs.
        _cluster("dgx-a100", "a100-80gb", 300e9, 25e9),
        # DGX H100: NVLink 4, 900 GB/s both ways; eight 400 Gb/s ports. All-to-alls: NVIDIA 2026 (Scalable
        # Training of Mixture-of-Experts Models, arXiv 2603.07685), Table 7, over 8 to 64 GPUs.
        _cluster("dgx-h100", "h100-80gb", 450e9, 50e9, all_to_all=(325e9, 43e9), **_PCIE5),
        # NVLink of 400 GB/s both ways (DeepSeek-V3's report, 2024).
        _cluster("dgx-h800", "h100-80gb", 200e9, 50e9, **_PCIE5),
        _cluster("dgx-h200", "h200", 450e9, 50e9, all_to_all=(325e9, 43e9), **_PCIE5),
        # NVLink 5, 1,800 GB/s both ways, in a node of eight or a domain of 72: all-to-alls as measured on a
        # GB200, and through the ports of a DGX H100.
        _cluster("dgx-b200", "b200", 900e9, 50e9, all_to_all=(560e9, 43e9), **_DDR5),
        _cluster("dgx-b300", "b300", 900e9, 100e9, all_to_all=(560e9, 0.0), **_DDR5),
        _cluster("gb200-nvl72", "gb200", 900e9, 50e9, 72, all_to_all=(560e9, 0.0), **_GRACE),
        _cluster("gb300-nvl72", "gb300", 900e9, 100e9, 72, all_to_all=(560e9, 0.0), **_GRACE),
        # Seven Infinity Fabric links of 64 GB/s one way; eight 400 Gb/s ports.
        _cluster("mi300x-node", "mi300x", 448e9, 50e9, **_PCIE5),
        # No NVLink: PCIe 4.0 with 16 lanes; 100 Gb/s Ethernet shared by four, and by eight.
        _cluster("l40s-pcie", "l40s", 32e9, 3.125e9, 4),
        _cluster("rtx-4090-pcie", "rtx-4090", 32e9, 1.5625e9, 8),
        # Qi et al. 2023: A100 nodes on RoCE, read as 100 Gb/s a GPU.
        _cluster("a100-roce", "a100-80gb", 300e9, 12.5e9),
    )
}


def find_cluster(name: str) -> Cluster:
    """A cluster by name, or from a JSON file with the fields of `Cluster`; its device is a name, or an object
    with the fields of `Device`.

    Raises ValueError in one sentence for an unknown name, with the nearest, and for a bad file.
    """
    if name.lower() in CLUSTERS:
        return CLUSTERS[name.lower()]
    if not is_file(name):
        raise ValueError(f"unknown cluster {unknown(name, CLUSTERS)}, or give a JSON file")
    given = read_object(Path(name), "cluster")
    device = given.pop("device", None)
    if isinstance(device, dict):
        device = Device(**_known(name, "the device", {"name": "device", **device}, Device))
    elif not isinstance(device, str) or device not in DEVICES:
        raise ValueError(
            f"{name}: device must be one of {', '.join(DEVICES)}, or an object with"
            f" {', '.join(f.name for f in fields(Device))}, not {device!r}"
        )
    else:
        device = DEVICES[device]
    given = _known(name, "the cluster", {"name": Path(name).stem, **given, "device": device}, Cluster)
    for field in ("busbw", "busbw_gather", "all_to_all"):
        if isinstance(given.get(field), list):
            given[field] = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in given[field])
    return Cluster(**given)


def _known(file: str, what: str, given: dict, kind: type) -> dict:
    """The given fields, with a name that is safe to print. Raises ValueError if one is no field of `kind`, or
    if a required one is missing.
    """
    check_fields(f"{file}: {what}", given, kind)
    missing = [f.name for f in fields(kind) if f.name not in given and f.default is MISSING]
    if missing:
        raise ValueError(f"{file}: {what} lacks {', '.join(missing)}")
    return {**given, "name": named(f"{file}: the name of {what}", given["name"])}
