"""Which cases a sweep has: the reference matrix, the local one, or a YAML file of the user's.

    base: local                # optional: start from `local` or `reference` instead of lists
    pipeline: [standard, alltoall]      # lists, or single values, of the fields of a case
    mode: [inference, training]
    ep: [1, 2]
    F: [64, 128]
    profiles: {mine: [1.5, 0.5]}        # factors of one's own, one per layer
    profile: [mine]                     # makes packing cases beside those of `imbalance`
    exclude: [{ep: 1, imbalance: 2}, {pipeline: alltoall, mode: training}]

With `base`, the lists keep of its cases those whose fields are in them.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.case import LOCAL_SHAPE, PROFILES, Case, local_matrix, reference_matrix
from workbench.errors import InputError
from workbench.files import read_text
from workbench.moe.arena import plan_ours
from workbench.moe.config import PIPELINES as PIPELINES_HERE
from workbench.moe.config import MoEConfig, runs
from workbench.records.schema import validate
from workbench.systems import RUN_HERE, SYSTEMS

NAMED = {"local": local_matrix, "reference": reference_matrix}
_LISTS = (
    "pipeline",
    "precision",
    "mode",
    "category",
    "ep",
    "F",
    "imbalance",
    "T",
    "D",
    "E",
    "K",
    "sharedExperts",
    "slotFactor",
    "scratchFactor",
    "profile",
)
MAX_COMBINATIONS = 100_000
Scalar = int | float | str


class _Loader(yaml.SafeLoader):
    """Safe YAML in which no key may be given twice; YAML's own loader takes the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen: set[tuple[str, str]] = set()
        for key in keys:
            if (key.tag, key.value) in seen:
                problem = f"key {key.value!r} must not be given twice"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


class MatrixFile(BaseModel):
    """A user's matrix, as in the YAML file; a single value stands for a list of one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    base: Literal["local", "reference"] | None = None
    pipeline: list[str] | None = None
    precision: list[str] | None = None
    mode: list[Literal["inference", "training"]] | None = None
    category: list[Literal["single_layer", "width", "packing"]] | None = None
    ep: list[int] | None = None
    F: list[int] | None = None
    imbalance: list[float] | None = None
    T: list[int] | None = None
    D: list[int] | None = None
    E: list[int] | None = None
    K: list[int] | None = None
    sharedExperts: list[int] | None = None
    slotFactor: list[float] | None = None
    scratchFactor: list[float] | None = None
    profile: list[str] | None = None
    profiles: dict[str, list[float]] = Field(default={})
    exclude: list[dict[str, Scalar | list[Scalar]]] = Field(default=[])

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be a mapping of fields to lists")
        return {
            k: [v] if k in _LISTS and not isinstance(v, list) and v is not None else v
            for k, v in given.items()
        }

    @model_validator(mode="after")
    def _known(self) -> "MatrixFile":
        for name in self.pipeline or ():
            if name not in SYSTEMS:
                raise ValueError(f"pipeline={name!r} must be one of {', '.join(sorted(SYSTEMS))}")
        names = {f.name for f in fields(Case)}
        for rule in self.exclude:
            for name in rule:
                if name not in names:
                    raise ValueError(f"exclude: {name!r} must be a field of a case")
        for name in _LISTS:
            if getattr(self, name) == []:
                raise ValueError(f"{name} must have at least one value")
        return self


def load_matrix(name: str | Path) -> list[Case]:
    """The cases of `local`, `reference` or a YAML file. Raises InputError, one line."""
    if str(name) in NAMED:
        return NAMED[str(name)]()
    path = Path(name)
    try:
        text = read_text(path)
    except InputError as error:
        known = " or ".join(NAMED)
        raise InputError(f"matrix={name} must be {known}, or a YAML file: {error}") from None
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        told = " ".join(str(error).split())
        raise InputError(f"{path}: not YAML: {told}") from None
    except (ValueError, RecursionError) as error:  # a date that is none, 5,000 digits, nesting
        raise InputError(f"{path}: not YAML: {error}") from None
    file = validate(MatrixFile, content, path)
    try:
        cases = _based(file) if file.base else _combined(file)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if not cases:
        raise InputError(f"{path}: no case is left after its lists and excludes")
    return cases


def check_ranks(cases: Sequence[Case], ranks: int, nnodes: int = 1) -> None:
    """Raises InputError where the cases need more ranks than there are, or do not fill the hosts
    evenly."""
    for ep in sorted({case.ep for case in cases}):
        if ep > ranks:
            raise InputError(f"ep={ep} must be at most ranks={ranks}")
        if ep % nnodes:
            raise InputError(f"ep={ep} must be divisible by nnodes={nnodes}")


def check_pipelines(cases: Iterable[Case]) -> None:
    """Raises InputError where our layer does not run a case's pipeline and precision yet."""
    strange = {f"{c.pipeline} {c.precision}": None for c in cases if not runs(c)}
    if strange:
        raise InputError(
            f"pipeline={', '.join(strange)} cannot be measured yet, only"
            f" {', '.join(PIPELINES_HERE)} in bf16; leave the others out of the matrix"
            " (`pipeline:` in its YAML file)"
        )


def check_memory(cases: Iterable[Case], available: int, nnodes: int = 1) -> None:
    """Raises InputError where the arenas and weights (in training with gradients, both BF16) of a
    case's ranks on one host are more than `available` bytes."""
    for case in cases:
        expert = 3 * case.D * case.F * 2
        weights = case.layers * (case.E // case.ep + case.sharedExperts) * expert
        arena = plan_ours(MoEConfig.from_case(case)).arena_bytes
        rank = arena + weights * (2 if case.mode == "training" else 1)
        needed = rank * (case.ep // nnodes)
        if needed > available:
            raise InputError(
                f"id={case.id} needs {needed / 2**30:.1f} GiB of memory on a host, for"
                f" {case.ep // nnodes} ranks with an arena of {arena / 2**30:.1f} GiB and weights;"
                f" {available / 2**30:.1f} GiB are free"
            )


def _based(file: MatrixFile) -> list[Case]:
    wanted = {name: values for name in _LISTS if (values := getattr(file, name)) is not None}
    return [
        case
        for case in NAMED[str(file.base)]()
        if all(getattr(case, name) in values for name, values in wanted.items())
        and not _excluded(file, {name: getattr(case, name) for name in _names()})
    ]


def _combined(file: MatrixFile) -> list[Case]:
    """Every combination of the lists, but the excluded; what a list leaves out is local."""
    chosen: dict[str, list[Any]] = {
        "pipeline": [pipeline for _, pipeline, _ in RUN_HERE],
        "mode": ["inference", "training"],
        "ep": [2],
        "F": [128],
        **{name: [value] for name, value in LOCAL_SHAPE.items()},
    }
    given = {name: getattr(file, name) for name in _LISTS}
    given = {name: values for name, values in given.items() if values is not None}
    profiles, loads = given.pop("profile", []), given.pop("imbalance", None)
    category = given.pop("category", ["single_layer"])
    precisions = given.pop("precision", None)
    chosen |= given
    if loads is None:
        loads = [] if profiles else [1.0]
    kinds: list[dict[str, Any]] = [
        {"category": kind, "imbalance": float(load)}
        for kind in category
        if kind != "packing"
        for load in loads
    ]
    for name in profiles:
        factors = tuple(file.profiles.get(name, PROFILES.get(name, ())))
        if not factors:
            raise InputError(f"profile={name!r} must be in profiles, or A or B")
        kinds.append({"category": "packing", "profile": name, "factors": factors})
    combinations = math.prod(map(len, chosen.values())) * len(kinds)
    if combinations > MAX_COMBINATIONS:
        raise InputError(f"combinations={combinations} must be at most {MAX_COMBINATIONS}")
    cases = {}
    for values in itertools.product(*chosen.values()):
        fixed = dict(zip(chosen, values, strict=True))
        system = SYSTEMS[fixed["pipeline"]]
        for precision in system.precisions:
            if precisions is not None and precision not in precisions:
                continue
            for kind in kinds:
                stated = fixed | kind | {"backend": system.backend, "precision": precision}
                if not _excluded(file, stated):
                    case = Case(**stated)
                    cases[case.id] = case
    return list(cases.values())


def _excluded(file: MatrixFile, stated: dict[str, Any]) -> bool:
    return any(
        all(
            stated.get(name) in (value if isinstance(value, list) else [value])
            for name, value in rule.items()
        )
        for rule in file.exclude
    )


def _names() -> list[str]:
    return [f.name for f in fields(Case)]
