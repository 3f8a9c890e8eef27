"""Whatever is given to a loader, a constructor or a command is read or refused in one line.

WORKBENCH_FUZZ_INPUTS says how many inputs there are in all (20,000 by default). Input number n of a
target is the same on every machine, so a failure names what repeats it.
"""

import io
import json
import os
import random
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml

import workbench
from tests.fuzz import mutate
from workbench.bench.job import Job, Settings, read_job
from workbench.bench.matrix import load_matrix
from workbench.bench.sweep import open_sweep
from workbench.case import Case, local_matrix
from workbench.cli import app
from workbench.errors import InputError
from workbench.explore.precision_study import load_tensor
from workbench.explore.trace import load_trace, read_trace, scaled_counts
from workbench.hardware import known_devices, load_hardware
from workbench.model.calibration import DEFAULT, load_calibration
from workbench.moe.config import MoEConfig
from workbench.records.record import read_record
from workbench.records.results import REFERENCE, load_table, to_document
from workbench.routing import route, rows_by_expert
from workbench.runner.parameters import grid, notebook_parameters

INPUTS = int(os.environ.get("WORKBENCH_FUZZ_INPUTS", "20000"))
Rng = random.Random
DATA = Path(str(DEFAULT)).parent

STUDY = json.loads(REFERENCE.read_text())
IDS = [STUDY["cases"][n]["id"] for n in (0, 50, 105)]
RESULT = {
    "meta": STUDY["meta"],
    "cases": [case for case in STUDY["cases"] if case["id"] in IDS],
    "pairs": [{"dist": IDS[0], "mok": IDS[1], "allDistPipelines": [IDS[0]]}],
    "allPipelinePairs": [{"dist": IDS[0], "mok": IDS[1]}],
}
RECORD = RESULT["cases"][0] | {
    "origin": "measured",
    "implementation": "workbench",
    "device": "GB300",
    "status": "ok",
    "T": 2048,
    "D": 7168,
    "E": 384,
    "K": 6,
    "sharedExperts": 1,
    "factors": [1.0],
    "samples": {"iterationMS": [1.0, 2.0]},
    "provenance": {"version": "1", "seed": 0},
}
CALIBRATION = json.loads(DEFAULT.read_text())
HARDWARE = "[" + (DATA / "hardware.toml").read_text().split("\n[", 2)[1]
MATRIX = yaml.safe_dump(
    {
        "pipeline": ["standard", "alltoall"],
        "mode": ["inference"],
        "ep": [1, 2],
        "F": [64],
        "K": 2,
        "profiles": {"mine": [1.5, 0.5]},
        "profile": ["mine"],
        "imbalance": [1.0],
        "exclude": [{"ep": 1, "profile": "mine"}],
    }
)
TRACE = "layer,expert_0,expert_1,expert_2\n0,5,6,7\n1,8,9,10\n"
CELL = """ep = 8  # ranks
rate = 1e-3
name = "a"
sizes = [1, 2]
rows: int | None = None
u: int | str = 5
mode: Literal["a", "b"] = "a"
"""
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# title"]},
        {
            "cell_type": "code",
            "metadata": {"tags": ["parameters"]},
            "source": [CELL],
            "execution_count": None,
            "outputs": [],
        },
    ],
    "metadata": {"kernelspec": {"language": "python", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}
SYSTEM = {"backend": ["dist_moe"], "precision": ["bf16"], "pipeline": ["standard"]}
CASE: dict[str, list[Any]] = SYSTEM | {
    "mode": ["inference", "training"],
    "ep": [1, 8],
    "category": ["single_layer", "width"],
    "F": [64],
    "imbalance": [1.0],
    "profile": [None],
    "layers": [0],
    "factors": [(), (1.0, 1.0)],
    "T": [16],
    "D": [64],
    "E": [8],
    "K": [2],
    "sharedExperts": [0, 1],
    "slotFactor": [float("nan"), 2.5],
    "scratchFactor": [8.0],
}
CONFIG: dict[str, list[Any]] = {
    "T": [8],
    "D": [16],
    "F": [16],
    "E": [8],
    "K": [2],
    "ep": [1, 2],
    "layers": [1, 3],
    "mode": ["training"],
    "pipeline": ["standard"],
    "dtype": ["float32"],
    "executor": ["torch"],
    "slot_factor": [1.0],
    "scratch_factor": [8.0],
    "validate": ["always"],
}
ROUTE: dict[str, list[Any]] = {
    "T": [4],
    "K": [2],
    "E": [8],
    "ep": [1, 2],
    "factor": [1.0, 0.5, 2],
    "seed": [0],
}


def npz(rng: Rng) -> bytes:
    kind = rng.random()
    shape = [rng.choice([0, 1, 2, 3]) for _ in range(rng.choice([2, 2, 2, 0, 1, 3]))]
    dtype = rng.choice(["<i8", "<f4", ">f8", "u1", "?", "c8", "U3", "S2", "O", "<M8[s]", "V4"])
    arrays = {rng.choice(["counts", "a", "é", "x" * 3000]): np.zeros(shape, dtype)}
    if kind < 0.6:
        arrays = {"counts": np.arange(6).reshape(2, 3)}
    if kind < 0.1:
        arrays["other"] = np.ones(2)
    stream = io.BytesIO()
    save = np.savez_compressed if rng.random() < 0.3 else np.savez
    save(stream, **arrays)  # type: ignore[arg-type]
    if kind > 0.8:
        member = mutate.content(
            rng, zipfile.ZipFile(stream).read(zipfile.ZipFile(stream).namelist()[0])
        )
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("counts.npy", member)
        return stream.getvalue()
    return mutate.content(rng, stream.getvalue()) if 0.15 < kind < 0.7 else stream.getvalue()


def tensor(rng: Rng, suffix: str) -> bytes:
    stream = io.BytesIO()
    values = np.ones(rng.choice([(2, 3), (0,), (4,)]), rng.choice(["f4", "f8", "i4", "f2", "O"]))
    if suffix == ".npy":
        np.save(stream, values)
    else:
        torch.save(rng.choice([torch.ones(2, 3), {"a": 1}, [torch.ones(1)], Path("x")]), stream)
    return mutate.content(rng, stream.getvalue()) if rng.random() < 0.8 else stream.getvalue()


def csv(rng: Rng) -> bytes:
    if rng.random() < 0.5:
        return mutate.as_text(rng, TRACE)
    cells = [
        [
            rng.choice(["0", "1", "2", "7", "x", "", "layer", "expert_0", "expert_1", "1e3"])
            for _ in range(rng.randint(1, 4))
        ]
        for _ in range(rng.randint(0, 4))
    ]
    return "\n".join(map(",".join, cells)).encode()


VALID: dict[str, bytes] = {
    "results.json": json.dumps(RESULT).encode(),
    f"{IDS[0]}.record.json": json.dumps(RECORD).encode(),
    "calibration.json": json.dumps(CALIBRATION).encode(),
    "hardware.toml": HARDWARE.encode(),
    "matrix.yaml": MATRIX.encode(),
    "trace.csv": TRACE.encode(),
    "notebook.ipynb": json.dumps(NOTEBOOK).encode(),
}


def use_results(path: Path) -> None:
    to_document(load_table(path))


def use_hardware(path: Path) -> None:
    for name in known_devices(path):
        load_hardware(name, path)


def use_calibration(path: Path) -> None:
    found = load_calibration(path).predict([Case.from_id(IDS[0]), Case.from_id(IDS[2])])
    assert np.isfinite(found["iterationMS"].dropna()).all()


def use_trace(path: Path) -> None:
    trace = load_trace(path)
    assert scaled_counts(trace, 48).sum(axis=1).tolist() == [48] * trace.layers


def use_notebook(path: Path) -> None:
    notebook_parameters(path)


def use_sweep(path: Path) -> None:
    assert open_sweep(path.parent, ranks=64, resume=True).cases


JOB = asdict(Job(name="j", cases=tuple(local_matrix()[:2]), settings=Settings(), limit_s=9.0))
SWEEP = {
    "version": workbench.__version__,
    "started": "",
    "limit_s": 9.0,
    "environment": {"a": "b"},
    "settings": JOB["settings"],
    "cases": JOB["cases"],
}
SWEEP, JOB = json.loads(json.dumps([SWEEP, JOB]))


FILES: dict[str, tuple[int, Callable[[Rng], bytes], Callable[[Path], Any]]] = {
    "results.json": (9, lambda rng: mutate.as_json(rng, RESULT), use_results),
    f"{IDS[0]}.record.json": (12, lambda rng: mutate.as_json(rng, RECORD), read_record),
    "calibration.json": (8, lambda rng: mutate.as_json(rng, CALIBRATION), use_calibration),
    "job.json": (5, lambda rng: mutate.as_json(rng, JOB), read_job),
    "sweep.json": (5, lambda rng: mutate.as_json(rng, SWEEP), use_sweep),
    "hardware.toml": (8, lambda rng: mutate.as_text(rng, HARDWARE), use_hardware),
    "matrix.yaml": (6, lambda rng: mutate.as_text(rng, MATRIX), load_matrix),
    "trace.csv": (12, csv, use_trace),
    "trace.npz": (8, npz, use_trace),
    "notebook.ipynb": (10, lambda rng: mutate.as_json(rng, NOTEBOOK), use_notebook),
    "cell.ipynb": (
        6,
        lambda rng: json.dumps(
            NOTEBOOK | {"cells": [NOTEBOOK["cells"][1] | {"source": mutate.text(rng, CELL)}]}
        ).encode(),
        use_notebook,
    ),  # type: ignore[index]
    "tensor.npy": (3, lambda rng: tensor(rng, ".npy"), load_tensor),
    "tensor.pt": (2, lambda rng: tensor(rng, ".pt"), load_tensor),
}


def small(given: dict[str, Any]) -> dict[str, Any]:
    """Without sizes that are valid, and take gigabytes."""
    return {k: 4 if type(v) is int and 2**16 < v < 2**31 else v for k, v in given.items()}


CALLS: dict[str, tuple[int, Callable[[Rng], Any]]] = {
    "Case": (20, lambda rng: Case(**mutate.arguments(rng, CASE)).id),
    "Case.from_id": (6, lambda rng: Case.from_id(mutate.text(rng, rng.choice(IDS)))),
    "MoEConfig": (12, lambda rng: MoEConfig(**mutate.arguments(rng, CONFIG))),
    "route": (6, lambda rng: route(**small(mutate.arguments(rng, ROUTE)))),
    "rows_by_expert": (
        6,
        lambda rng: rows_by_expert(
            **{k: v for k, v in small(mutate.arguments(rng, ROUTE)).items() if k != "seed"}
        ),
    ),
    "read_trace": (3, lambda rng: read_trace(mutate.text(rng, "trace.csv"), b"5,6")),
}


def outcome(call: Callable[[], Any]) -> str:
    """`read`, `refused` or `usage`; anything else is raised."""
    try:
        call()
    except InputError as error:
        message = f"error: {error}"
        assert message.isprintable(), ascii(message)
        assert 8 < len(message) <= 500, len(message)
        return "refused"
    except SystemExit as ended:
        code = ended.code
        if code not in (0, 2):
            raise RuntimeError(f"exit code {code}") from None
        return "usage" if code else "read"
    return "read"


def check(target: str, weight: int, make: Callable[[Rng], Callable[[], Any]]) -> None:
    """Fails with every different way in which the target's inputs end otherwise."""
    total = sum(w for w, *_ in (*FILES.values(), *CALLS.values())) + sum(COMMANDS.values())
    counts: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for n in range(max(INPUTS * weight // total, 1)):
        call = make(Rng(f"{target} {n}"))
        try:
            counts[outcome(call)] += 1
        except Exception as error:
            counts["wrong"] += 1
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
            wrong.setdefault(place, f"{place}: input {n}: {str(error)[:300]!r}")
    print(target, dict(counts))
    assert not wrong, "\n".join([f"{target}: {dict(counts)}", *wrong.values()])
    assert counts["refused"] + counts["usage"]


@pytest.mark.parametrize("name", VALID)
def test_what_is_damaged_was_read_before(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(VALID[name])
    FILES[name][2](tmp_path / name)


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    weight, make, read = FILES[name]
    path = tmp_path / name

    def prepared(rng: Rng) -> Callable[[], Any]:
        path.write_bytes(make(rng))
        return lambda: read(path)

    check(name, weight, prepared)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    weight, call = CALLS[name]
    check(name, weight, lambda rng: lambda: call(rng))


def test_values_of_a_notebook(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps(NOTEBOOK))
    known = notebook_parameters(path)
    valid = ("ep=8,16", "rate=1e-3", 'name="a,b"', "sizes=[8],[8,16]", "rows=none", "u=5", "mode=a")

    def given(rng: Rng) -> list[str]:
        return [mutate.text(rng, rng.choice(valid)) for _ in range(rng.randint(1, 2))]

    check("-p", COMMANDS["-p"], lambda rng: lambda: grid(path, known, given(rng)))


COMMANDS = {"-p": 8, "predict": 3, "kernels": 1, "calibrate": 1, "run": 2}


def command(rng: Rng, name: str) -> list[str]:
    lines = {
        "predict": [
            [IDS[0]],
            ["-p", "pipeline=mega,staged", "-p", "mode=training", "-p", "ep=32", "-p", "F=2048"],
            [IDS[1], "--device", "H200", "--json"],
        ],
        "kernels": [["--target", "sm_91", "--T", "8", "--E", "8", "--ep", "2", "--op", "x"]],
        "calibrate": [["none.json", "--json"]],
        "run": [["none.ipynb", "-p", "ep=8", "--show-parameters"]],
    }
    line = list(rng.choice(lines[name]))
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(line))
        line[at] = mutate.text(rng, line[at])
    return [name, *line]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "-p"])
def test_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbench.bench.kernel_table.compile_launch", lambda *_: None)
    main = typer.main.get_command(app)

    def prepared(rng: Rng) -> Callable[[], Any]:
        line = command(rng, name)
        return lambda: main.main(args=line)

    check(name, COMMANDS[name], prepared)
