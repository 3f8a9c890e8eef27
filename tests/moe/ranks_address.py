"""One rank of test_address_ranks.py under torchrun: `ranks_address.py WHAT OUT`, its peers known by
address alone on the simulated device. Ranks write OUT/RANK.json, what they raised.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from layer_cases import experts, workload

from workbench.moe.config import MoEConfig
from workbench.moe.context import create_context
from workbench.moe.groups.nvlink import NvlinkGroup

CONFIG = MoEConfig(T=2, D=16, F=8, E=3, K=1, ep=3, executor="triton", mode="inference")


def call(group: NvlinkGroup) -> str:
    work = workload(CONFIG, 1).of_rank(group.rank).to(group.device)
    with create_context(CONFIG, group) as context, torch.no_grad():
        experts(work.x, work.ids, work.scores, work.w13, work.w2, context)
    return "done"


def raised(act: object) -> str:
    try:
        return str(act())  # type: ignore[operator]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(what: str, out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = NvlinkGroup(device="simulated", timeout_s=20)
    found = []
    if what == "memory":  # SIMULATED_BYTES leaves rank 1 too little for the larger arena
        large = replace(CONFIG, T=4096)
        found.append(raised(lambda: create_context(large, group)))
        found.append(raised(lambda: call(group)))
    else:
        context = create_context(CONFIG, group)
        group.timeout_s = 1.0
        if rank == 1:
            (out / "1.json").write_text("[]")
            if what == "late":
                time.sleep(6)
            os._exit(0)
        work = workload(CONFIG, 1).of_rank(rank).to(group.device)
        began = time.monotonic()
        with torch.no_grad():
            found.append(
                raised(lambda: experts(work.x, work.ids, work.scores, work.w13, work.w2, context))
            )
        found.append(time.monotonic() - began < 10)
        found.append(raised(lambda: group.barrier("again")))
    (out / f"{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
