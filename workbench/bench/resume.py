"""What a sweep that is resumed must not be asked: other cases, or another way to measure them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from workbench.bench.job import Settings
from workbench.case import Case
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.bench.sweep import Sweep


def flat(settings: Settings) -> dict[str, Any]:
    """Settings by the names of the command's options."""
    found = asdict(settings)
    return found.pop("protocol") | found | {"trace": bool(found.pop("trace_dir"))}


def refuse_other(sweep: "Sweep", given: Mapping[str, Any], cases: Sequence[Case] = ()) -> None:
    """Raises InputError where an option in `given`, or a case, is not as in the sweep. Options that
    nobody gave are the sweep's own, and so are its cases where there are none in `cases`."""
    kept = flat(sweep.settings) | {"limit_s": sweep.limit_s}
    kept["environment"] = dict(sweep.hosts.environment)
    other = [name for name, value in given.items() if kept[name] != value]
    if other:
        told = (", ".join(f"{name}={source[name]}" for name in other) for source in (kept, given))
        raise InputError(
            "out={} was measured with {}, not {}; leave that out or name another folder".format(
                sweep.folder.path, *told
            )
        )
    if cases and (differs := _other_cases(sweep.cases, cases)):
        raise InputError(
            f"out={sweep.folder.path} holds a sweep of other cases: {differs}; name another folder"
        )


def _other_cases(held: Sequence[Case], asked: Sequence[Case]) -> str:
    ours, theirs = ({case.id: case for case in cases} for cases in (held, asked))
    for mine, others, what in ((theirs, ours, "it has no"), (ours, theirs, "not asked for is its")):
        rest = [name for name in mine if name not in others]
        if rest:
            return f"{what} {rest[0]}" + f" (and {len(rest) - 1} more)" * (len(rest) > 1)
    for name, case in theirs.items():
        for field, value in asdict(case).items():
            kept = getattr(ours[name], field)
            if kept != value:
                return f"{field}={kept}, not {value}, in {name}"
    return ""
