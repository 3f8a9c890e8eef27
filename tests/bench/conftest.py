"""One sweep of the local matrix on real ranks, which several tests look at."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from workbench.bench.job import Settings, TimingProtocol
from workbench.bench.matrix import load_matrix
from workbench.bench.sweep import Progress, Sweep, open_sweep, run_sweep
from workbench.records.record import read_record
from workbench.records.schema import OwnRecord

QUICK = Settings(protocol=TimingProtocol(warmups=1, windows=2, iterations=2))


@dataclass(frozen=True)
class LocalRun:
    sweep: Sweep
    told: list[Progress]
    final: Progress
    records: dict[str, OwnRecord]


@pytest.fixture(scope="session")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    told: list[Progress] = []
    folder: Path = tmp_path_factory.mktemp("local") / "run"
    sweep = open_sweep(folder, load_matrix("local"), settings=QUICK, ranks=2, limit_s=120)
    assert len(sweep.cases) == 26
    final = run_sweep(sweep, told.append)
    records = {case.id: read_record(sweep.folder.record(case)) for case in sweep.cases}
    return LocalRun(sweep, told, final, records)
