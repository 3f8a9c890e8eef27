"""`python -m workbench.bench.torchrun ...`: torchrun that ends with the process that started it.

A driver that is killed outright cannot end its ranks; the kernel does it for it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Asks the kernel for signal `number` when the parent process ends; on Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def main() -> None:
    die_with_parent(signal.SIGTERM)
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
