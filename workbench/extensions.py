"""What users add without touching a file of ours: modules of their own, named in the environment.

WORKBENCH_SYSTEMS, WORKBENCH_METRICS and WORKBENCH_FIGURES hold names of modules (separated by
commas) that every process can import, each with a constant SYSTEMS, METRICS or FIGURES: see
`workbench.systems`, `workbench.model.cost` and `workbench.report.figures`. An explorer is a
subclass of `workbench.explore.explorer.Explorer`, which a notebook imports from where it is.
"""

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from workbench.errors import InputError, one_line


def declared(kind: str) -> Iterator[tuple[str, Any]]:
    """(where, value) of the constant `kind` of each module that the environment names. Raises
    InputError for one that cannot be imported or has none."""
    variable = f"WORKBENCH_{kind}"
    for name in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
        try:
            yield f"{variable}: {name}.{kind}", getattr(import_module(name), kind)
        except InputError:
            raise
        except Exception as error:  # whatever a module of the user's own raises
            problem = one_line(f"{type(error).__name__}: {error}", 200)
            raise InputError(
                f"{variable}: {name!r} must be a module with a constant {kind} ({problem})"
            ) from error


def added(kind: str, known: dict[str, Any], of: type | None = None) -> dict[str, Any]:
    """`known` and what modules add to it, by name. Raises InputError for a name that is taken or a
    value that is not `of` that class, or cannot be called where none is given."""
    found = dict(known)
    for where, given in declared(kind):
        if not isinstance(given, Mapping):
            raise InputError(f"{where} must be a mapping of names")
        for name, value in given.items():
            if name in found:
                raise InputError(f"{where}: {name!r} must not be there already")
            if not (callable(value) if of is None else isinstance(value, of)):
                wanted = "a function" if of is None else of.__name__
                raise InputError(f"{where}: {name!r} must be {wanted}")
            found[name] = value
    return found
