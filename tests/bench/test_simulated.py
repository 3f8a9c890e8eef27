"""`measure_case` on a simulated device: records are complete and say what a CPU's say, and what a
GPU would refuse, or do slowly or wrongly, fails with the line at fault."""

from dataclasses import replace

import pytest

from tests import simulated_device
from tests.mutation import mutated
from workbench import runtime
from workbench.bench.job import Settings, TimingProtocol
from workbench.bench.measure import measure_case
from workbench.case import Case
from workbench.moe.groups.virtual import VirtualGroup

ONCE = TimingProtocol(warmups=0, windows=1, iterations=1)
SHAPE = {"T": 3, "D": 16, "F": 8, "K": 2}
PIPELINES = {"standard": "dist_moe", "alltoall": "baseline"}


@pytest.fixture(autouse=True)
def _simulated(monkeypatch):
    monkeypatch.setenv("WORKBENCH_DEVICES", "tests.simulated_device")
    runtime.runtimes.cache_clear()
    yield
    runtime.runtimes.cache_clear()


def case(pipeline, mode, ep, **given):
    stated = {
        "backend": PIPELINES[pipeline],
        "pipeline": pipeline,
        "mode": mode,
        "ep": ep,
        "precision": "bf16",
        "category": "single_layer",
        "imbalance": 1,
    }
    return Case(**(stated | SHAPE | {"E": max(ep, 2)} | given))


def measured(case, device, protocol=ONCE):
    settings = Settings(protocol=protocol, device=device)
    return measure_case(case, VirtualGroup(case.ep, device), settings)


def agree(found, right):
    """A record of the simulated device with the CPU's of the same case."""
    assert (found.status, found.reason) == ("ok", None)
    assert found.device == "simulated"
    mine, theirs = found.provenance, right.provenance
    for name in ("traffic", "routeTableRows", "launches", "plan"):
        assert mine[name] == theirs[name], name
    for name, error in theirs["checked"]["errors"].items():
        assert mine["checked"]["errors"][name] == pytest.approx(error, abs=1e-3), name
    assert found.capacity == right.capacity
    steps = ["forward", "backward"] if found.mode == "training" else ["forward"]
    fused = found.pipeline == "standard"
    assert mine["captured"] == (steps if fused else [])
    assert mine["executor"] == ("triton" if fused else "triton, grouped products of torch")
    assert mine["flushedBytes"] == 2 * simulated_device.DEVICES["simulated"].l2_bytes()
    assert "on the device, before each iteration" in mine["synchronised"]
    # one plain iteration: no flush buffer, no graph's memory
    assert 0 < max(mine["memory"]["allocatedBytes"]) < mine["flushedBytes"]
    named = {name for told in mine["phasesMS"] for name in told}
    assert named == {name for told in theirs["phasesMS"] for name in told}
    for step in (*steps, "iteration"):
        assert getattr(found, f"{step}MS") > 0
    assert mine["telemetry"][0]["clockMHz"] == [1000.0] * 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_virtual_ranks(pipeline, mode, ranks):
    one = case(pipeline, mode, ranks)
    agree(measured(one, "simulated"), measured(one, "cpu"))


def test_layers_that_do_not_fit_the_slot_are_recomputed_in_a_graph():
    packed = {
        "category": "packing",
        "profile": "even",
        "factors": (1.0, 1.0),
        "layers": 2,
        "slotFactor": 0.6,
        "scratchFactor": 2.0,
    }
    one = case("standard", "training", 1, **packed)
    found = measured(one, "simulated", replace(ONCE, iterations=2))
    agree(found, measured(one, "cpu"))
    assert found.capacity["capacityRecomputeFlags"] == 1


MUTATIONS = {
    "a stray item": (
        "workbench.moe.context",
        "head[word].fill_(value)",
        "head[word].fill_(value).item()",
    ),
    "an assigned number": (
        "workbench.moe.context",
        "head[word].fill_(value)",
        "head[word] = value",
    ),
    "an entry that is freed by assignment": (
        "workbench.moe.context",
        '.own("decisions")[entry, Decide.END].zero_()',
        '.own("decisions").__setitem__((entry, Decide.END), 0)',
    ),
    "a table that stays on the host": (
        "workbench.moe.step",
        "self.row_bytes_O = row_bytes_O.to(arenas_PB.device)",
        "self.row_bytes_O = row_bytes_O",
    ),
    "a status that is read in passing": (
        "workbench.moe.context",
        'to_host(memory.own("first_error")).tolist()',
        'memory.own("first_error").tolist()',
    ),
    "an output on the host": (
        "workbench.moe.autograd",
        "(torch, config.dtype),\n                device=context.device,",
        "(torch, config.dtype),",
    ),
    "a score gradient on the host": (
        "workbench.moe.autograd",
        "dtype=torch.float32, device=context.device",
        "dtype=torch.float32",
    ),
    "a host branch in a captured step": (
        "workbench.moe.step",
        "self.executor.launch(op, self.rank, arguments)",
        "if self.decision[0] >= 0:\n            self.executor.launch(op, self.rank, arguments)",
    ),
    "a branch that is allowed to read, in a captured step": (
        "workbench.moe.context",
        "        for step in steps:\n            self._announce(step, kind, problem)\n",
        "        for step in steps:\n            self._announce(step, kind, problem)\n"
        '            to_host(step.own("head"))\n',
    ),
    "collectives through the host in a graph": (
        "workbench.bench.measure",
        "graphs = protocol.graphs and SYSTEMS[case.pipeline].peer_memory",
        "graphs = protocol.graphs",
    ),
    "executor torch on the device": (
        "workbench.bench.measure",
        "executor=runtime.executor",
        'executor="torch"',
    ),
    "times before the device is done": (
        "workbench.bench.timing",
        '        self.group.settle("the end of a window")\n',
        "",
    ),
    "phases before the device is done": (
        "workbench.bench.measure",
        '    context.group.settle("the end of an iteration")\n    spent',
        "    spent",
    ),
    "a hash of device memory": (
        "workbench.bench.case_layers",
        "to_host(tensor.contiguous().view(torch.uint8))",
        "tensor.contiguous().view(torch.uint8)",
    ),
    "saved rows read on the device": (
        "workbench.bench.case_layers",
        'to_host(self.context.memory(rank).own("decisions"))',
        'self.context.memory(rank).own("decisions")',
    ),
    "ids on the host": (
        "workbench.bench.case_layers",
        '"ids": torch.from_numpy(ids).to(inputs.device)',
        '"ids": torch.from_numpy(ids)',
    ),
    "a gate that reads in passing": (
        "workbench.bench.gate",
        "to_host(tensor.detach()).double()",
        "tensor.detach().double()",
    ),
    "a meter that reads in passing": (
        "workbench.bench.meter",
        'to_host(arguments["decision"])',
        'arguments["decision"]',
    ),
    "a memory peak with the flush buffer": (
        "workbench.bench.measure",
        "    allocated, reserved, kind = group.runtime.peak()\n",
        "    flush = torch.empty(2 * group.runtime.l2_bytes(), device=group.device)\n"
        "    allocated, reserved, kind = group.runtime.peak()\n    del flush\n",
    ),
    "offsets on the host": (
        "workbench.moe.executor_library",
        'arguments["starts_e"][1:].to(torch.int32)',
        'arguments["starts_e"][1:].to(torch.int32).cpu()',
    ),
    "a CPU index tensor": (
        "workbench.moe.executor_library",
        'table_ND, to_n = a["out"].find(a["rank_R"], a["row_R"], n)\n',
        'table_ND, to_n = a["out"].find(a["rank_R"], a["row_R"], n)\n    to_n = torch.arange(n)\n',
    ),
    "counts read at every exchange": (
        "workbench.moe.step",
        "step.words = to_host(step.decision).tolist()",
        "step.words = step.decision.tolist()",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_a_gpu_would_refuse_fails_here(name, monkeypatch):
    module, old, new = MUTATIONS[name]
    baseline = "library" in module or (module.endswith("step") and "words" in old)
    pipeline = "alltoall" if baseline or "collectives" in name else "standard"
    for owner, attribute, function in mutated(module, old, new):
        monkeypatch.setattr(owner, attribute, function)
    one = case(pipeline, "training", 1)
    right = measured(one, "cpu")
    assert right.status == "ok"  # it is wrong on the device alone
    try:
        agree(measured(one, "simulated"), right)
    except Exception as error:
        # what is refused names a line of ours; what is not is told by the record
        refused = isinstance(error, simulated_device.DeviceError | TypeError | AssertionError)
        if not refused and "same device" not in str(error):
            raise
        return
    finally:
        simulated_device.STATE.tape = None
    raise AssertionError(f"{name} went unnoticed")
