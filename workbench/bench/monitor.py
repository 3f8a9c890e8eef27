"""What the device says of itself while it is timed: clocks, temperature, power, throttling."""

import threading
from types import TracebackType
from typing import Any, Self

from workbench.runtime import Runtime

EVERY_S = 0.05


class Monitor:
    """While entered, asks a device for its telemetry every EVERY_S on a thread; a CPU, which would
    be disturbed, once at the end."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._said: list[dict[str, Any]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._runtime.kind != "cpu":
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look()

    def summary(self) -> dict[str, Any] | None:
        """Of each number the least, the median and the most that was seen; of texts every one.
        None where the device says nothing."""
        if not self._said:
            return None
        found: dict[str, Any] = {"looks": len(self._said)}
        for name in dict.fromkeys(name for said in self._said for name in said):
            values = [said[name] for said in self._said if name in said]
            if isinstance(values[0], str):
                found[name] = sorted({value for value in values if value})
            else:
                values.sort()
                found[name] = [values[0], values[len(values) // 2], values[-1]]
        return found

    def _watch(self) -> None:
        while not self._end.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        said = self._runtime.telemetry()
        if said is not None:
            self._said.append(said)
