"""Peaks of the CPU that a run was made on, as a rank finds them: no file has a user's machine."""

import os
import time
from collections.abc import Callable

from workbench.hardware import Hardware

REPEATS = 5


def measured_cpu(name: str, ranks: int) -> Hardware:
    """A rank's share of this CPU: BF16 product of 1024-cubed and copy of 64 MiB, the best of some,
    on as many threads as a rank has; peers' memory is reached by the same copy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // ranks, 1))
    try:
        a, b = (torch.ones(1024, 1024, dtype=torch.bfloat16) for _ in range(2))
        tflops = 2 * 1024**3 / _best(lambda: a @ b) / 1e12
        source, target = (torch.ones(2**26, dtype=torch.uint8) for _ in range(2))
        copied = 2 * 2**26 / _best(lambda: target.copy_(source)) / 1e12
    finally:
        torch.set_num_threads(threads)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    told = {
        "bf16_tflops": "measured here: product of 1024-cubed",
        "hbm_tb_s": "measured here: copy of 64 MiB, bytes read + written",
        "scale_up_gb_s": "measured here: half of that copy, as peers share the memory",
        "hbm_gb": "memory of the host",
        "scale_up_domain": "ranks of the run",
    }
    return Hardware(
        name=name,
        title=name,
        bf16_tflops=tflops,
        hbm_gb=memory,
        hbm_tb_s=copied,
        scale_up_gb_s=copied * 1e3 / 2,
        scale_up_domain=ranks,
        sources=told,
        notes={},
    )


def _best(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)
