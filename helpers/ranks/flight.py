"""Writes a rank's last collectives on gloo, with stacks, to a file, like PyTorch's flight recorder on NCCL.

In a job on GPUs NCCL's watchdog writes this file when a collective times out; the environment variable
TORCH_FR_DUMP_TEMP_FILE has the start of its path. PyTorch also records gloo's collectives, but writes no
file. So if the variable is set when a World on the CPU is made, each living rank writes its file when the
kernel asks for its position: when a call fails, or no rank has moved for some seconds. A World on GPUs writes
none, because it turns the watchdog's files off (`devices.NCCL`).
"""

from __future__ import annotations

import os
import pickle

import torch.distributed as dist

from three_axes import pytorch_private

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # environment variable


def dump(since: int = 0) -> dict:
    """This rank's record since a time in nanoseconds, in the form that NCCL's watchdog writes, which
    PyTorch's analyzer (torchfrtrace) reads.

    Three things that gloo leaves out (PyTorch 2.13) are added: the ranks of each group; the state of a
    collective that has ended; and record numbers, which start at 0 with the first entry since that time.
    """
    record = pytorch_private.flight_record()
    record["pg_config"] = {
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(sorted(dist.get_process_group_ranks(group))),
        }
        for group in pytorch_private.groups()  # the groups of which this rank is a member
    }
    record["entries"] = [e for e in record["entries"] if e["time_created_ns"] >= since]
    for number, entry in enumerate(record["entries"]):
        entry["record_id"] = number
        if entry["retired"]:
            entry["state"] = "completed"
    return record


def write(rank: int, since: int) -> None:
    """Write this rank's file, if the environment variable is set. A failure is printed, not raised."""
    if prefix := os.environ.get(PREFIX):
        try:
            record = pickle.dumps(dump(since))
            with open(f"{prefix}{rank}", "wb") as file:
                file.write(record)
        except Exception as e:  # noqa: BLE001  the call's own failure must still be reported
            print(f"rank {rank} could not write its flight record: {e}")
