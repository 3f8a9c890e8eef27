"""Triton's interpreter lists every name of its language before each launch, a quarter of the
time of a small one. The names do not change: they are listed once.
"""

import inspect
import types
from typing import Any

_names: dict[int, list[str]] = {}


def _getmembers(package: Any) -> list[tuple[str, Any]]:
    """`inspect.getmembers` of what can be a builtin of the language."""
    if id(package) not in _names:
        from triton.language.core import is_builtin

        found = inspect.getmembers(package)
        _names[id(package)] = [name for name, member in found if is_builtin(member)]
    return [(name, getattr(package, name)) for name in _names[id(package)]]


def list_names_once() -> None:
    from triton.runtime import interpreter  # not before TRITON_INTERPRET is set

    own = {name: getattr(inspect, name) for name in dir(inspect)}
    interpreter.inspect = types.SimpleNamespace(**own | {"getmembers": _getmembers})
