"""The process that executes one notebook: `python -m workbench.runner.child`, its job as JSON on
stdin.

stdin stays open: its end tells that the parent is gone, and ends this process. The job names
`notebook`, `output`, `parameters` and `progress`, a file descriptor that receives a line with the
index of each cell as it starts. The executed notebook is saved at every cell, so that whatever
ends this process, what was done so far is there. Exit code 1: a cell failed.
"""

import json
import logging
import os
import signal
import sys
import threading
from types import FrameType

GRACE_SECONDS = 5
"""From the interrupt of a kernel to its end by force."""


def main() -> int:
    # papermill takes half a second to import, so the parent never does
    import papermill
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    # it takes a parameter with a union type for an unknown one; ours are checked already
    logging.getLogger("papermill").setLevel(logging.ERROR)
    job = json.loads(sys.stdin.readline())
    progress = os.fdopen(job["progress"], "w", buffering=1)
    # no spec directories: "python3" is then this interpreter, whatever specs are installed
    specs = KernelSpecManager(kernel_dirs=[])
    # sockets in our private folder: no TCP port to clash on or to listen at; a blocking client
    # (that of the plain KernelManager) would not see a kernel die
    private = os.environ["JUPYTER_RUNTIME_DIR"]
    manager = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=specs,
        connection_file=os.path.join(private, "k.json"),
        transport="ipc",
        ip=os.path.join(private, "k"),
    )

    def signal_kernel(number: int) -> None:
        # the kernel leads a process group of its own; its subprocesses are in it
        pid = getattr(manager.provisioner, "pid", None)
        if pid is not None:
            os.killpg(os.getpgid(pid), number)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.alarm(GRACE_SECONDS)
        if not manager.has_kernel:
            os._exit(1)
        signal_kernel(signal.SIGINT)

    def end(_number: int, _frame: FrameType | None) -> None:
        signal_kernel(signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)

    def watch() -> None:
        sys.stdin.read()  # returns when the parent is gone, however it went
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()

    def plain(path: str) -> str:
        return path.replace("{", "{{").replace("}", "}}")  # papermill formats its paths

    try:
        papermill.execute_notebook(
            plain(job["notebook"]),
            plain(job["output"]),
            parameters=job["parameters"],
            kernel_name="python3",
            language="python",
            progress_bar=False,
            start_timeout=120,
            km=manager,
            on_cell_start=lambda cell, cell_index: print(cell_index, file=progress),
        )
    except papermill.PapermillExecutionError:
        return 1  # the saved notebook tells which cell and why
    finally:
        if manager.has_kernel:
            run_sync(manager.shutdown_kernel)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
