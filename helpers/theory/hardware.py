"""Devices and clusters: the published numbers that time and memory depend on.

Speeds are what the maker prints, per GPU and in one direction; what is really reached of
them are the efficiencies in `cost.Constants`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from .checks import is_file, positive, read_object, whole


@dataclass(frozen=True)
class Device:
    """One GPU. flops: printed dense half-precision FLOP/s, which MFU divides by. achievable: what the best
    single matrix product was measured to reach, at most flops. bandwidth: bytes/s of its own memory. memory:
    bytes. Raises ValueError for anything but positive numbers."""

    name: str
    flops: float
    achievable: float
    bandwidth: float
    memory: float

    def __post_init__(self):
        for field in ("flops", "achievable", "bandwidth", "memory"):
            positive(f"device {self.name!r}: {field}", getattr(self, field))
        if self.achievable > self.flops:
            raise ValueError(
                f"device {self.name!r}: achievable {self.achievable:g} is more than the printed flops"
                f" {self.flops:g}"
            )


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs. link: bytes/s that a GPU can send inside its node; nic: to other nodes.

    link_latency, nic_latency: seconds for one message. Both speeds are per GPU and in one direction. rails:
    ports of a node that one group can use at once; all, unless the software knows only one ring. rings:
    (nodes, bytes/s) that an all-reduce over so many whole nodes was measured to reach for each rank (what
    nccl-tests print as busbw), the fewest nodes first. Fabrics slow down as they grow; without it each port
    keeps its speed.
    """

    name: str
    device: Device
    node: int = 8
    link: float = 300e9
    nic: float = 25e9
    link_latency: float = 5e-6
    nic_latency: float = 15e-6
    rails: int = 64
    rings: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        called = f"cluster {self.name!r}: "
        if not isinstance(self.device, Device):
            raise ValueError(
                f"{called}device must be a Device, DEVICES['h100-80gb'] say, not {self.device!r}"
            )
        for field in ("node", "rails"):
            whole(called + field, getattr(self, field))
        for field in ("link", "nic", "link_latency", "nic_latency"):
            positive(called + field, getattr(self, field), zero=field.endswith("latency"))
        try:
            for nodes, speed in self.rings:
                whole("nodes", nodes, 2)
                positive("bytes/s", speed)
            rising = sorted({nodes for nodes, _ in self.rings}) == [nodes for nodes, _ in self.rings]
        except (TypeError, ValueError):
            rising = False
        if not rising:
            raise ValueError(
                f"{called}rings must be pairs of nodes (2 or more, rising) and bytes/s, ((2, 3.6e11), (4,"
                f" 1.6e11)) say, not {self.rings!r}"
            )


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        # Printed: NVIDIA's data sheets, SXM, without sparsity. Achievable: 87 % of it on an A100 and 80 % on
        # an H100, which runs into its power limit (Bekman, Machine Learning Engineering, matmul benchmarks,
        # 2024).
        Device("a100-40gb", 312e12, 271e12, 1.555e12, 40e9),
        Device("a100-80gb", 312e12, 271e12, 2.039e12, 80e9),
        Device("h100-80gb", 989.4e12, 794e12, 3.35e12, 80e9),
        # HBM2e and a limit of 500 W (torchtitan's benchmarks, 2024, which call its peak unknown). Power grows
        # with the cube of the clock: 794e12 · (500/700)^(1/3). The same rule gives 630e12 at the 350 W of an
        # H100 PCIe, where 627e12 were measured.
        Device("h100-96gb", 989.4e12, 710e12, 2.4e12, 96e9),
        Device("h200", 989.4e12, 794e12, 4.8e12, 141e9),
    )
}

CLUSTERS: dict[str, Cluster] = {
    c.name: c
    for c in (
        # DGX A100: NVLink 3, 600 GB/s both ways; eight 200 Gb/s InfiniBand ports for eight GPUs.
        Cluster("dgx-a100", DEVICES["a100-80gb"], 8, 300e9, 25e9),
        # DGX H100: NVLink 4, 900 GB/s both ways; eight 400 Gb/s ports.
        Cluster("dgx-h100", DEVICES["h100-80gb"], 8, 450e9, 50e9),
        Cluster("dgx-h200", DEVICES["h200"], 8, 450e9, 50e9),
        # Qi et al. 2023: A100 nodes on RoCE, read as 100 Gb/s a GPU.
        Cluster("a100-roce", DEVICES["a100-80gb"], 8, 300e9, 12.5e9),
    )
}


def find_cluster(name: str) -> Cluster:
    """A cluster by name, or from a JSON file with the fields of `Cluster` (device by name).

    Raises ValueError in one sentence for an unknown name, with the nearest, and for a bad file.
    """
    if name.lower() in CLUSTERS:
        return CLUSTERS[name.lower()]
    if not is_file(name):
        near = difflib.get_close_matches(name.lower(), CLUSTERS, 1, cutoff=0.3)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(
            f"unknown cluster {name!r}{hint}. Known are {', '.join(CLUSTERS)}, or give a JSON file"
        )
    fields = read_object(Path(name), "cluster")
    device = fields.pop("device", None)
    if not isinstance(device, str) or device not in DEVICES:
        raise ValueError(f"{name}: device must be one of {', '.join(DEVICES)}, not {device!r}")
    fields = {"name": Path(name).stem, **fields, "device": DEVICES[device]}
    if unknown := set(fields) - set(Cluster.__dataclass_fields__):
        raise ValueError(
            f"{name}: unknown field {sorted(unknown)[0]!r}; known are"
            f" {', '.join(Cluster.__dataclass_fields__)}"
        )
    if isinstance(fields.get("rings"), list):
        fields["rings"] = tuple(tuple(ring) if isinstance(ring, list) else ring for ring in fields["rings"])
    return Cluster(**fields)
