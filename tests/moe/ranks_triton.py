"""One rank of test_triton_ranks.py under torchrun: `ranks_triton.py KIND OUT SEED...`.

KIND `shared`: peers in other processes on the CPU, kernels interpreted. KIND `nvlink`: a GPU per
rank, or one for all with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. Ranks write OUT/RANK.json.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from layer_cases import NAMES, as_float64, random_config, run, workload
from workbench.kernels.device import INTERPRET

from workbench.moe.context import create_context
from workbench.moe.groups.nvlink import NvlinkGroup
from workbench.moe.groups.shared import SharedGroup
from workbench.moe.oracle import relative_error

sys.path.append(str(Path(__file__).parents[2]))

from tests.interpreter import list_names_once


def main(kind: str, out: Path, seeds: list[int]) -> None:
    if INTERPRET.value:
        list_names_once()
    dist.init_process_group("gloo")
    if kind == "nvlink":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    group = NvlinkGroup() if kind == "nvlink" else SharedGroup(timeout_s=60)
    found = []
    for seed in seeds:
        config, empty = random_config(seed, group.size, "bfloat16" if seed % 2 else "float32")
        config = replace(config, T=min(config.T, 33), D=min(config.D, 64), F=min(config.F, 48))
        work = workload(config, seed, empty_rank=empty)
        mine = work.of_rank(group.rank).to(group.device)
        with create_context(replace(config, executor="triton"), group) as context:
            parts = run(mine, context)
            rows = context.peaks()[group.rank]["rows"]
        everyone = group.gather_objects([part.float().cpu().numpy() for part in parts])
        exact = work.exact()
        errors = {
            name: relative_error(as_float64(torch.from_numpy(np.concatenate(whole))), right)
            for name, whole, right in zip(NAMES, zip(*everyone, strict=True), exact, strict=True)
        }
        found.append({"seed": seed, "dtype": config.dtype, "rows": rows, "errors": errors})
    (out / f"{group.rank}.json").write_text(json.dumps(found))
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])
