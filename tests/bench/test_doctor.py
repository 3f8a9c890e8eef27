"""Each fault of a host with GPUs is told by the check that it belongs to, from recorded facts."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter
from workbench.kernels.aot import TARGETS

from workbench.bench import probe
from workbench.bench.doctor import (
    ARCHS,
    Need,
    Seen,
    checks,
    cuda_problem,
    elsewhere,
    exit_code,
    number,
    ranks_problem,
)
from workbench.bench.probe import Gpu, HostFacts, look_apart, look_deeply, slowed
from workbench.domain import Fabric
from workbench.errors import MAX_LENGTH

HERE = Fabric(host="node", boot_id="1")
GIB = 2**30


def gpu(index: int, **more: Any) -> Gpu:
    given = {
        "index": index,
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index}",
        "capability": "9.0",
        "memory_bytes": 140 * GIB,
        "free_bytes": (130 - index) * GIB,
        "sm_mhz": 345,
        "max_mhz": 1980,
        "fabric": replace(HERE, gpu=f"GPU-{index}"),
    }
    return Gpu(**given | more)


def host(count: int = 8, **more: Any) -> HostFacts:
    """A host on which all is well."""
    given = {
        "here": HERE,
        "driver": "580.65.06",
        "driver_cuda": "13.0",
        "gpus": tuple(map(gpu, range(count))),
        "torch": "2.14.1",
        "torch_cuda": "13.0",
        "visible": tuple(f"GPU-{i}" for i in range(count)),
        "triton": "3.8.0",
        "triton_wanted": "3.8.0",
        "nccl": "2.30.7",
        "symmetric": "",
    }
    return HostFacts(**given | more)


def with_gpu(index: int, **more: Any) -> dict[str, Any]:
    return {"gpus": tuple(gpu(i, **(more if i == index else {})) for i in range(8))}


SLICED = replace(HERE, mig=True)
JOINED = replace(HERE, cluster="b1" * 16, clique=7, state=3)
FAULTS = {
    "no driver": (
        {"nvml_problem": "NVML: NVML Shared Library Not Found"},
        "driver",
        3,
        "driver=none must be loaded: NVML: NVML Shared Library Not Found",
    ),
    "CPU build of torch": (
        {"torch": "2.13.0+cpu", "torch_cuda": "", "visible": ()},
        "torch",
        3,
        "torch=2.13.0+cpu must be a CUDA build",
    ),
    "driver older than the wheel": (
        {"driver": "550.54.15", "driver_cuda": "12.4", "visible": ()},
        "cuda",
        3,
        "driver=550.54.15 (CUDA 12.4) must run CUDA 13.0, which torch 2.14.1 is built for",
    ),
    "torch fails": (
        {"torch_problem": "CUDA unknown error", "visible": ()},
        "cuda",
        3,
        "torch sees no GPU: CUDA unknown error",
    ),
    "torch and Triton do not fit": (
        {"triton_wanted": "3.7.1"},
        "triton",
        3,
        "triton=3.8.0 must be 3.7.1, which torch 2.14.1 asks for",
    ),
    "Triton too old": (
        {"triton": "3.7.1", "triton_wanted": "3.7.1"},
        "triton",
        3,
        "triton=3.7.1 must be at least 3.8, which the kernels need",
    ),
    "no GPU": ({"gpus": (), "visible": ()}, "gpus", 3, "GPUs=0 must be at least 1"),
    "a GPU too old": (
        with_gpu(2, name="NVIDIA A100-SXM4-80GB", capability="8.0"),
        "gpus",
        1,
        "gpu 2 (NVIDIA A100-SXM4-80GB): arch=sm_80 must be one of sm_90, sm_100, sm_103",
    ),
    "every GPU too old": (
        {"gpus": (gpu(0, capability="8.0"),), "visible": ("GPU-0",)},
        "gpus",
        3,
        "gpu 0 (NVIDIA H200): arch=sm_80 must be one of sm_90, sm_100, sm_103",
    ),
    "fewer GPUs than ranks": (
        {"gpus": tuple(map(gpu, range(4))), "visible": ("GPU-0", "GPU-1", "GPU-2", "GPU-3")},
        "gpus",
        1,
        "ranks_per_host=8 must be at most 4, the GPUs that are seen",
    ),
    "MIG": (
        with_gpu(5, fabric=SLICED),
        "mig",
        1,
        "gpu 5: mig=on must be off, as a slice has no peers",
    ),
    "one GPU per rank is seen": (
        {"visible": ("GPU-3",), "environment": {"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "3"}},
        "visible devices",
        1,
        "CUDA_VISIBLE_DEVICES='3' must be the same on all ranks of a host",
    ),
    "no room for the arena": (
        with_gpu(6, free_bytes=3 * GIB),
        "memory",
        1,
        "gpu 6: free memory=3.00 GiB must be at least 64.00 GiB, the arena of a rank",
    ),
    "no peer access": (
        {"without_access": ((0, 5), (5, 0))},
        "peers",
        1,
        "gpus 0 and 5 must have peer access (2 of 56 pairs have none)",
    ),
    "no symmetric memory": (
        {"symmetric": "exit code 1: RuntimeError: CUDA driver error: system not yet initialized"},
        "symmetric memory",
        1,
        "symmetric memory must be had by a rank alone: exit code 1: RuntimeError: CUDA driver"
        " error: system not yet initialized",
    ),
}
NEED = Need(ranks=8, arena_bytes=64 * GIB)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told(name: str) -> None:
    changed, where, code, told = FAULTS[name]
    facts = host(**changed)
    found = checks(facts, NEED)
    failed = [check for check in found if check.state == "failed"]
    assert (where, told) in [(check.name, check.found) for check in failed]
    assert all(check.advice for check in failed)
    assert exit_code(found) == code
    problem = cuda_problem(8, 64 * GIB, probe=lambda: facts)
    assert problem == f"device='cuda': {failed[0].found}; {failed[0].advice}"
    assert "\n" not in problem
    assert len(problem) <= MAX_LENGTH


def test_a_host_where_all_is_well() -> None:
    found = checks(host(), NEED)
    assert {check.state for check in found} == {"ok", "not applicable"}
    assert exit_code(found) == 0
    assert cuda_problem(8, 64 * GIB, probe=host) is None
    told = {check.name: check.found for check in found}
    assert told["gpus"] == "8 x NVIDIA H200, sm_90, 140 GiB each"
    assert told["memory"] == "123.00 GiB free on gpu 7, the fullest"
    assert told["clocks"] == "SM clock 345 of 1980 MHz"
    assert told["fabric"] == "no NVLink fabric beyond the host"


@pytest.mark.parametrize(
    ("changed", "name", "told"),
    [
        ({"driver_cuda": "13.0", "torch_cuda": "13.2"}, "cuda", "is older than CUDA 13.2"),
        ({"nccl": ""}, "nccl", "torch has no NCCL"),
        (with_gpu(1, slowed=("power cap",)), "clocks", "gpu 1: SM clock 345 of 1980 MHz, held"),
        (with_gpu(3, fabric=JOINED), "fabric", "gpu 0: fabric state=0 must be 3"),
    ],
)
def test_a_warning_stops_nothing(changed: dict[str, Any], name: str, told: str) -> None:
    (found,) = [c for c in checks(host(**changed), NEED) if c.state == "warning"]
    assert found.name == name
    assert told in found.found
    assert cuda_problem(8, probe=lambda: host(**changed)) is None


def test_collectives_alone_need_no_peer_access() -> None:
    facts = host(without_access=((0, 1),))
    assert cuda_problem(8, peers=False, probe=lambda: facts) is None
    assert cuda_problem(1, probe=lambda: facts) is None


def test_a_choice_of_gpus_is_no_fault() -> None:
    facts = host(visible=("GPU-6", "GPU-7"), environment={"CUDA_VISIBLE_DEVICES": "6,7"})
    assert cuda_problem(2, probe=lambda: facts) is None
    one = host(visible=("GPU-6",), environment={"CUDA_VISIBLE_DEVICES": "6"})
    assert cuda_problem(1, probe=lambda: one) is None
    assert [gpu.index for gpu in one.seen()] == [6]


def test_a_fabric_is_named() -> None:
    facts = host(4)
    facts = replace(facts, gpus=tuple(replace(g, fabric=JOINED) for g in facts.gpus))
    (found,) = [check for check in checks(facts, Need()) if check.name == "fabric"]
    assert found.found == f"cluster {'b1' * 16}, clique 7, domains here: 1"


def rank(gpu: str, machine: str = "a", name: str = "NVIDIA H200", visible: str = "0 1") -> Seen:
    shown = tuple(f"GPU-{machine}{i}" for i in visible.split())
    masked = visible.replace(" ", ",")
    return Seen(
        machine=(machine, "1"), name=name, gpu=f"GPU-{machine}{gpu}", visible=shown, masked=masked
    )


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([rank("0"), rank("1"), rank("0", "b"), rank("1", "b")], None),
        (
            [rank("0", visible="0"), rank("1", visible="1")],
            "rank 1: CUDA_VISIBLE_DEVICES='1' must show the GPUs that rank 0 sees on the same host",
        ),
        ([rank("0"), rank("0")], "rank 1: gpu=GPU-a0 must not be that of rank 0"),
        (
            [rank("0"), rank("0", "b", "NVIDIA H100")],
            "rank 1: device='NVIDIA H100' must be 'NVIDIA H200' as on rank 0",
        ),
    ],
)
def test_ranks_see_the_same_gpus_and_have_one_each(ranks: list[Seen], told: str | None) -> None:
    assert ranks_problem(ranks) == told


def test_facts_travel_as_json() -> None:
    kind = TypeAdapter(HostFacts)
    assert kind.validate_json(kind.dump_json(host())) == host()


def test_a_probe_that_crashes_or_hangs_is_a_driver_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe.sys, "executable", "/bin/false")
    assert look_apart().nvml_problem == "exit code 1: nothing said"

    def hangs(*_: Any, timeout: float, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("probe", timeout)

    monkeypatch.setattr(probe.subprocess, "run", hangs)
    assert look_apart().nvml_problem == "it did not answer within 60 s"
    assert look_deeply().symmetric is None
    monkeypatch.setattr(probe, "look_apart", host)
    assert look_deeply().symmetric == "it did not answer within 60 s"


def test_versions_and_reasons() -> None:
    assert number("2.14.1+cu130") == (2, 14, 1)
    assert number("13.0") < number("13.0.1") < number("13.1")
    assert slowed(0x1) == ()
    assert slowed(0x4 | 0x20) == ("power cap", "temperature")
    assert set(ARCHS) == {target.arch for target in TARGETS.values()}


def test_the_command_says_a_line_per_check_and_that_no_gpu_can_be_used() -> None:
    command = [sys.executable, "-m", "workbench.cli", "doctor"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [check["name"] for check in found] == [check.name for check in elsewhere("cpu")]
    if found[0]["state"] == "failed":  # no driver here
        assert done.returncode == 3
        assert {check["state"] for check in found[1:]} == {"not applicable"}
    done = subprocess.run(
        [*command, "--device", "cpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert {line[:14] for line in done.stdout.splitlines()} == {"not applicable"}
