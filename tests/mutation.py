"""Mutations of our sources: a text is replaced where a function is defined, and the changed
function takes the place of the one in use.

As a module of WORKBENCH_DEVICES it does so in the process that imports it, as MUTATION says
(`module|old|new`): ranks in other processes are changed like that.
"""

import inspect
import os
import sys
import types
from importlib import import_module
from typing import Any

DEVICES: dict[str, Any] = {}


def mutated(module: str, old: str, new: str) -> list[tuple[Any, str, Any]]:
    """(owner, name, changed function) of what a replacement changes; it must change something."""
    used = import_module(module)
    source = inspect.getsource(used)
    assert source.count(old) == 1, f"{module}: {source.count(old)} times {old!r}"
    changed = types.ModuleType(module)
    changed.__file__ = used.__file__
    kept = sys.modules[module]
    sys.modules[module] = changed  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), str(used.__file__), "exec"), changed.__dict__)
    finally:
        sys.modules[module] = kept
    found = []
    for name, mine in vars(used).items():
        theirs = vars(changed).get(name)
        if getattr(mine, "__module__", None) != module:
            continue
        if inspect.isclass(mine):
            found += [
                (mine, method, _at_home(theirs.__dict__[method], used))
                for method, body in vars(mine).items()
                if _differs(body, vars(theirs).get(method))
            ]
        elif _differs(mine, theirs):
            ours = [m for n, m in sys.modules.items() if n.partition(".")[0] == "workbench"]
            changed_one = _at_home(theirs, used)
            found += [(m, name, changed_one) for m in ours if vars(m).get(name) is mine]
    assert found, f"{module}: nothing differs with {new!r}"
    return found


def _at_home(function: Any, used: types.ModuleType) -> Any:
    """The function with the names of the module in use, and its class where it asks for that."""
    if not isinstance(function, types.FunctionType):
        return function
    cells = function.__closure__
    if function.__code__.co_freevars == ("__class__",):
        cells = (types.CellType(getattr(used, function.__qualname__.partition(".")[0])),)
    found = types.FunctionType(function.__code__, vars(used), function.__name__, None, cells)
    found.__defaults__, found.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return found


def _differs(mine: Any, theirs: Any) -> bool:
    plain = [inspect.unwrap(getattr(f, "__func__", f)) for f in (mine, theirs)]
    codes = [getattr(f, "__code__", None) for f in plain]
    return None not in codes and not _same(*codes)


def _same(a: Any, b: Any) -> bool:
    """Equal but for line numbers."""
    parts = [
        [c for c in code.co_consts if not isinstance(c, types.CodeType)] + [code.co_names]
        for code in (a, b)
    ]
    inner = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in (a, b)]
    return (
        a.co_code == b.co_code
        and parts[0] == parts[1]
        and len(inner[0]) == len(inner[1])
        and all(map(_same, *inner))
    )


if os.environ.get("MUTATION"):
    for owner, name, function in mutated(*os.environ["MUTATION"].split("|")):
        setattr(owner, name, function)
