"""Ranks are grouped by the NVLink domain that their driver tells of, else by their host."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvml import OTHER_RACK, RACK, ZERO, gpu, install

from workbench import domain
from workbench.bench.meter import between
from workbench.domain import Fabric, domains, read_fabric
from workbench.errors import InputError


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What the ranks of hosts find: (host, boot id, its GPUs' answers) of each host."""

    def read(*hosts: tuple[str, str, list[dict[str, Any]]]) -> list[Fabric]:
        found = []
        for name, boot_id, gpus in hosts:
            (tmp_path / "boot_id").write_text(boot_id + "\n")
            monkeypatch.setattr(domain, "BOOT_ID", tmp_path / "boot_id")
            monkeypatch.setattr(os, "uname", lambda name=name: type("U", (), {"nodename": name}))
            install(monkeypatch, gpus)
            found += [read_fabric(index) for index in range(max(len(gpus), 1))]
        return found

    return read


def tray(host: int, cluster: str, clique: int, **more: Any) -> tuple[str, str, list[Any]]:
    gpus = [gpu(f"GPU-{cluster[:2]}-{host}-{i}", cluster, clique, **more) for i in range(4)]
    return f"tray{host}", f"boot-{cluster[:2]}-{host}", gpus


def hgx(name: str, boot_id: str) -> tuple[str, str, list[Any]]:
    """Eight H100: complete, as they say, but of no cluster."""
    return name, boot_id, [gpu(f"GPU-{boot_id}-{i}", ZERO, 0) for i in range(8)]


def split_of(found: list[int]) -> tuple[int, int]:
    """Ranks that rank 0 sends to within and beyond its domain, if it sends each a byte."""
    bytes_PP = np.ones((len(found), len(found)), np.int64)
    split = between(bytes_PP, found)
    return split["sentScaleUp"][0], split["sentScaleOut"][0]


def test_one_host_is_one_domain(told: Any) -> None:
    found = domains(told(hgx("a", "1")))
    assert found == [0] * 8
    assert split_of(found) == (7, 0)


def test_sixteen_trays_of_a_rack_are_one_domain(told: Any) -> None:
    found = domains(told(*(tray(host, RACK, 32766) for host in range(16))))
    assert found == [0] * 64
    assert split_of(found) == (63, 0)


def test_two_servers_without_nvlink_between_them_are_two(told: Any) -> None:
    found = domains(told(hgx("a", "1"), hgx("b", "2")))
    assert found == [0] * 8 + [1] * 8
    assert split_of(found) == (7, 8)


def test_racks_with_the_same_clique_are_two(told: Any) -> None:
    racks = [tray(host, cluster, 1) for cluster in (RACK, OTHER_RACK) for host in range(2)]
    found = domains(told(*racks))
    assert found == [0] * 8 + [1] * 8
    assert split_of(found) == (7, 8)


def test_partitions_of_a_rack_are_apart(told: Any) -> None:
    found = domains(told(tray(0, RACK, 1), tray(1, RACK, 2), tray(2, RACK, 1)))
    assert found == [0] * 4 + [1] * 4 + [0] * 4


@pytest.mark.parametrize(
    "without",
    [{"state": 2}, {"state": 0}, {"status": 3}, {"fabric": False}, {"cluster": ZERO}],
    ids=str,
)
def test_a_host_of_which_only_some_have_joined_is_its_own(told: Any, without: Any) -> None:
    name, boot_id, gpus = tray(1, RACK, 1)
    gpus[3] |= without
    found = domains(told(tray(0, RACK, 1), (name, boot_id, gpus), tray(2, RACK, 1)))
    assert found == [0] * 4 + [1] * 4 + [0] * 4


def test_hosts_of_one_name_are_told_apart_by_their_start(told: Any) -> None:
    assert domains(told(hgx("node", "1"), hgx("node", "2"))) == [0] * 8 + [1] * 8
    assert domains(told(hgx("node", "1"), hgx("node", "1"))) == [0] * 16


def test_without_a_driver_there_is_the_host(told: Any) -> None:
    (found,) = told(("a", "1", []))
    assert found == Fabric(host="a", boot_id="1")
    assert domains([found, found]) == [0, 0]


def test_slices_of_a_gpu_have_no_peers(told: Any) -> None:
    sliced = told(("a", "1", [gpu("GPU-0", mig=1), gpu("GPU-1", mig=1)]))
    assert [f.mig for f in sliced] == [True, True]
    assert domains(sliced) == [0, 1]
    (whole,) = told(("a", "1", [gpu("GPU-0", mig=None)]))
    assert not whole.mig


def test_what_the_user_says_goes_before_what_is_found(told: Any) -> None:
    rack = told(tray(0, RACK, 1), tray(1, RACK, 1))
    assert domains(rack, "host") == [0] * 4 + [1] * 4
    assert domains(told(hgx("a", "1"), hgx("b", "2")), "job") == [0] * 16
    with pytest.raises(InputError, match="domain='rack' must be one of auto, host, job"):
        domains(rack, "rack")


def test_a_gpu_is_found_by_its_uuid_and_one_that_is_not_there_is_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, [gpu("GPU-0", RACK, 1), gpu("GPU-7", RACK, 2)])
    assert read_fabric(0, "GPU-7").clique == read_fabric(0, "7").clique == 2
    assert read_fabric(0).clique == 1
    for missing in (read_fabric(5), read_fabric(0, "GPU-9")):
        assert (missing.gpu, missing.cluster, missing.joined) == ("", "", False)


def test_ranks_are_numbered_in_their_order() -> None:
    ranks = [Fabric(host=name, boot_id="") for name in "bab"]
    assert domains(ranks) == [0, 1, 0]
    assert domains([]) == []
