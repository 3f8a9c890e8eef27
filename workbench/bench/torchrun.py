"""`python -m workbench.bench.torchrun FAILURES ...`: torchrun that ends with the process that
started it, and says in the file FAILURES which rank failed first.

A driver that is killed outright cannot end its ranks; the kernel does it for it.
"""

import ctypes
import json
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
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    failures, *arguments = sys.argv[1:]
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = {"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp}
        with open(failures, "a") as file:  # of every host that has a rank that failed
            file.write(json.dumps(said) + "\n")
        raise


if __name__ == "__main__":
    main()
