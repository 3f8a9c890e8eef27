"""A system that nobody here knows: one declaration and one pipeline module, in a folder of its
own, and it is costed, planned, run, measured and swept, refused by predictions, and listed.

It pads to 48 rows, keeps three operands, sends rows as float32 and runs the shared expert itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.records.results import load_table

DECLARATION = """
from workbench.systems import System

SYSTEMS = (
    System(
        backend="trial",
        pipeline="wide",
        precisions=("bf16",),
        expert_rows={"bf16": 48},
        hides_shared=True,
        wire={("bf16", mode): (4.0, 2.0) for mode in ("inference", "training")},
        capacity=("slotBytes", "capacityRecomputeFlags"),
        tolerance={"bf16": 1e-2},
        module="trial_wide",
    ),
)
"""

PIPELINE = '''
"""As `standard`, but rows travel as float32 and are pulled before they are multiplied; the scores
of the rows are kept beside them."""

from dataclasses import replace

import torch
import torch.nn.functional as functional

from workbench.errors import InputError
from workbench.kernels.ops import op
from workbench.kernels.words import Decide
from workbench.moe.pipelines import standard
from workbench.moe.pipelines.parts import Buffer, Operand, Phase


def pull_torch(*, x, rank_R, row_R, divisor, scores, score_R1, place_R, out_RD, decision, again):
    words = decision.tolist()
    if not words[Decide.OK] or (again and words[Decide.KEPT] == words[Decide.ROWS]):
        return
    rows = words[Decide.ROWS]
    table, at_R = x.find(rank_R, row_R, rows, divisor)
    out_RD[:rows] = table[at_R]
    torch.arange(len(place_R), out=place_R)
    table, at_R = scores.find(rank_R, row_R, rows)
    score_R1.rows()[:] = table[at_R]


@op(twin=pull_torch, examples=lambda blank: {}, cost=None,
    pulls=(("x", "rank_R"), ("scores", "rank_R")))
def pull(target, **arguments):
    raise InputError("pipeline='wide' must run with executor='torch': it has no kernels")


def pull_grad_torch(*, x, rank_R, row_R, divisor, scores, score_R1, out_RD, decision):
    words = decision.tolist()
    if words[Decide.OK]:
        rows = words[Decide.ROWS]
        table, at_R = x.find(rank_R, row_R, rows, divisor)
        out_RD[:rows] = table[at_R]
        table, at_R = scores.find(rank_R, row_R, rows)
        assert torch.equal(score_R1.rows(), table[at_R])


@op(twin=pull_grad_torch, examples=lambda blank: {}, cost=None,
    pulls=(("x", "rank_R"), ("scores", "rank_R")))
def pull_grad(target, **arguments):
    raise InputError("pipeline='wide' must run with executor='torch': it has no kernels")


def expert(x, w13, w2):
    gate, up = functional.linear(x, w13).chunk(2, dim=1)
    return functional.linear((functional.silu(gate.float()) * up).to(x.dtype), w2)


def add_shared_torch(*, x_TD, w13, w2, decision, y_TD):
    if decision[Decide.OK]:
        y_TD += expert(x_TD.to(y_TD.dtype), w13, w2)


@op(twin=add_shared_torch, examples=lambda blank: {}, cost=None)
def add_shared(target, **arguments):
    raise InputError("pipeline='wide' must run with executor='torch': it has no kernels")


def shared_backward_torch(*, x_TD, dy_TD, w13, w2, decision, dx_TD, dw13, dw2):
    if decision[Decide.OK]:
        leaves = [t.to(w13.dtype).detach().requires_grad_() for t in (x_TD, w13, w2)]
        with torch.enable_grad():
            found = torch.autograd.grad(expert(*leaves), leaves, dy_TD)
        dx_TD += found[0]
        dw13.copy_(found[1])
        dw2.copy_(found[2])


@op(twin=shared_backward_torch, examples=lambda blank: {}, cost=None)
def shared_backward(target, **arguments):
    raise InputError("pipeline='wide' must run with executor='torch': it has no kernels")


def sum_up(s):
    standard.sum_up(s)
    w = s.weights
    if w.shared_w13_2SFD is not None:
        s.launch("add_shared", x_TD=s.own("x_TD"), w13=w.shared_w13_2SFD, w2=w.shared_w2_DSF,
                 decision=s.decision, y_TD=s.y_TD)


def sum_up_backward(s):
    w = s.weights
    decision = s.decision.clone()  # which the last of the standard phase releases
    standard.sum_up_backward(s)
    if w.shared_w13_2SFD is not None:
        s.launch("shared_backward", x_TD=s.own("x_TD"), dy_TD=s.dy_TD, w13=w.shared_w13_2SFD,
                 w2=w.shared_w2_DSF, decision=decision, dx_TD=s.dx_TD,
                 dw13=s.gradients.shared_w13_2SFD, dw2=s.gradients.shared_w2_DSF)


def regions(c, R):
    for buffer in standard.regions(c, R):
        wide = buffer.name in ("x_TD", "dy_TD")
        yield replace(buffer, dtype="float32") if wide else buffer
    yield Buffer("scratch", "received_RD", (R, c.D), c.dtype)
    yield Buffer("layer", "place_R", (R,), "int64")


def operands(c):
    return (*standard.operands(c), Operand("score_R1", 1, "float32"))


def source(s):
    return {"rank_R": s.own("rank_R"), "row_R": s.own("slot_R"), "divisor": s.config.K,
            "scores": s.peers("scores_N1"), "score_R1": s.kept("score_R1")}


def dispatch(s, again=False):
    s.launch("pull", x=s.peers("x_TD"), **source(s), place_R=s.own("place_R"),
             out_RD=s.own("received_RD"), decision=s.decision, again=again)
    s.launch("dispatch_w13", x=s.local_rows("received_RD"), rank_R=None, row_R=s.own("place_R"),
             divisor=1, starts_e=s.own("starts_e"),
             w13_E2FD=s.weights.prepared.get("packed", s.weights.w13_E2FD),
             x_kept=s.kept("x_RD"), h1=s.kept("h1_R2F"), decision=s.decision, again=again)


def w2_dgrad(s):
    s.launch("pull_grad", x=s.peers("dy_TD"), **source(s), out_RD=s.own("received_RD"),
             decision=s.decision)
    s.launch("w2_dgrad", dy=s.local_rows("received_RD"), rank_R=None, row_R=s.own("place_R"),
             divisor=1, starts_e=s.own("starts_e"), w2_EDF=s.weights.w2_EDF, decision=s.decision,
             dy_RD=s.own("rows_RD"), g_RF=s.own("g_RF"))


def experts(s):
    standard.experts(s, dispatch)


def experts_backward(s):
    standard.experts_backward(s, dispatch, w2_dgrad)


def instead(parts):
    mine = {"experts": experts, "experts_backward": experts_backward, "sum": sum_up,
            "sum_backward": sum_up_backward}
    return tuple(
        replace(part, run=mine.get(part.name, part.run)) if isinstance(part, Phase) else part
        for part in parts
    )


PIPELINE = replace(standard.PIPELINE, forward=instead(standard.PIPELINE.forward),
                   backward=instead(standard.PIPELINE.backward), operands=operands, regions=regions)
'''

CASE = """Case(backend="trial", mode="training", ep=4, precision="bf16", pipeline="wide", T=64,
            D=64, F=32, E=8, K=2, imbalance=2.0, slotFactor=0.5, scratchFactor=4)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    (folder / "trial_system.py").write_text(DECLARATION)
    (folder / "trial_wide.py").write_text(PIPELINE)
    return folder


def environment(folder: Path, name: str = "trial_system") -> dict[str, str]:
    return {**os.environ, "WORKBENCH_SYSTEMS": name, "PYTHONPATH": str(folder)}


def ask(folder: Path, code: str) -> Any:
    """What `code` prints as JSON, in a process in which the system is declared."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json\nfrom workbench.case import Case, case_table\n{code}"],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench.cli", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_costed_and_planned(folder: Path) -> None:
    code = f"""
from workbench.model.cost import cost_table
from workbench.planning.case_plan import CasePlans, plan_case, plan_table
case = {CASE}
table = case_table([case])
plans = CasePlans(table=table)
ours = plan_case(case).ours
print(json.dumps({{
    "wire": cost_table(table)["wireBytes"].item(),
    "padded": plans.padded(plans.rows.rank0).tolist(),
    "bounds": plan_table(table).isna().all(axis=None).item(),
    "row_bytes": ours.row_bytes,
    "explained": ours.explain(),
}}))"""
    found = ask(folder, code)
    rows = 64 * 2 * (1 - 1 / 4)
    assert found["wire"] == rows * 64 * (4 + 2) * 2  # there and back, forward and backward
    assert found["padded"] == [[144 + 144]]  # 256 rows on two experts, each of 128 to 144
    assert found["bounds"]  # nobody says what such a system reserves
    assert found["row_bytes"] == [128, 128, 4]
    assert "x_RD, h1_R2F, score_R1" in found["explained"]


def test_it_runs_in_one_process_as_the_oracle_says(folder: Path) -> None:
    tests = Path(__file__).parent / "moe"
    code = f"""
import sys
sys.path.insert(0, {str(tests)!r})
import torch
import trial_wide
from layer_cases import errors, run, workload
from workbench.moe.autograd import routed_experts
from workbench.moe.weights import Weights
from workbench.moe.config import MoEConfig
from workbench.moe.context import create_context
from workbench.moe.groups.virtual import VirtualGroup
worst = {{}}
for slot in (0.0, 4.0):  # recomputed, and kept
    config = MoEConfig(T=23, D=40, F=24, E=8, K=3, ep=4, scratch_factor=4, slot_factor=slot,
                       pipeline="wide")
    work = workload(config, 1)
    with create_context(config, VirtualGroup(4)) as context:
        found = run(work, context)
    worst[slot] = errors(found, work.exact())
shared = [(torch.randn(shape) / 6).bfloat16().requires_grad_() for shape in ((32, 40), (40, 16))]
x, scores, w13, w2 = work.leaves()
with create_context(config, VirtualGroup(4)) as context:  # whose ranks have the same expert
    weights = Weights(w13, w2, *shared)
    y = routed_experts(x, work.ids, scores, weights, context)
    y.backward(work.dy)
    with torch.no_grad():
        prepared = Weights(w13 * 0, w2, *shared, {{"packed": w13.detach()}})
        again = routed_experts(x, work.ids, scores, prepared, context)
        try:
            few = prepared._replace(prepared={{"packed": w13[1:]}})
            routed_experts(x, work.ids, scores, few, context)
        except ValueError as error:
            refused = str(error)
y_shared = trial_wide.expert(work.x, *shared)
right = (y_shared.detach(), *torch.autograd.grad(y_shared, shared, work.dy))
given = ((y - found[0]).detach(), *(weight.grad for weight in shared))
apart = [((a - b).norm() / b.norm()).item() for a, b in zip(given, right, strict=True)]
print(json.dumps([worst, apart, torch.equal(again, y), refused]))"""
    worst, apart, same, refused = ask(folder, code)
    assert same
    assert "prepared 'packed' shape=[7, 48, 40] on cpu must be [8, ...] on cpu" in refused
    assert max(apart) < 1e-2
    for of_slot in worst.values():
        assert set(of_slot) == {"y", "x", "scores", "w13", "w2"}
        assert max(of_slot.values()) < 1e-2


def test_it_is_measured_on_two_processes_and_recorded(folder: Path) -> None:
    (folder / "mine.yaml").write_text(
        "pipeline: [wide, standard]\nep: [2]\nmode: [training]\nprofile: [mine]\n"
        "profiles: {mine: [1.5, 0.5]}\nslotFactor: [0.0, 4.0]\n"
    )
    short = ("--ranks=2", "--warmups=0", "--windows=2", "--iterations=1")
    done = command(folder, "sweep", "mine.yaml", "--out", "run", *short)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 cases measured, 0 failed" in done.stdout
    records = {}
    for path in sorted((folder / "run/records").glob("*.record.json")):
        record = json.loads(path.read_text())
        records[record["pipeline"], float(record["id"].rpartition("-slot")[2])] = record
    assert set(records) == {(p, s) for p in ("wide", "standard") for s in (0.0, 4.0)}
    for slot, again in ((0.0, 4), (4.0, 0)):  # two layers on two ranks
        mine, other = records["wide", slot], records["standard", slot]
        assert mine["status"] == "ok"
        assert set(mine["capacity"]) == {"slotBytes", "capacityRecomputeFlags"}
        assert mine["capacity"]["capacityRecomputeFlags"] == again
        sent = [sum(r["provenance"]["traffic"]["sentScaleUp"]) for r in (mine, other)]
        passes = 2 + (again > 0)  # rows of x or dy that are fetched
        assert sent[0] / sent[1] == pytest.approx((4 * passes + 2 * 2) / (2 * passes + 2 * 2))
    with pytest.raises(ValueError, match="trial"):  # here it is not declared
        load_table(folder / "run/records")
    assert ask(
        folder,
        f"""
from workbench.records.results import load_table
print(json.dumps(load_table({str(folder / "run/records")!r})["pipeline"].tolist()))""",
    ) == [
        "standard",
        "standard",
        "wide",
        "wide",
    ]


def test_its_time_is_refused_where_no_calibration_holds_it(folder: Path) -> None:
    asked = ("-p", "pipeline=wide", "-p", "mode=training", "-p", "ep=32", "--json")
    done = command(folder, "predict", *asked)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["backend"] == "trial"
    assert row["iterationMS"] is None
    assert "no record of trial bf16 wide in the calibration" in row["runs"]


def test_an_explorer_lists_it(folder: Path) -> None:
    code = """
from workbench.explore.imbalance import ImbalanceExplorer
from workbench.explore.width import WidthExplorer
found = []
for explorer in (ImbalanceExplorer(), WidthExplorer()):
    explorer.set(backend="trial")
    table = explorer.table().set_index("system")
    found.append([explorer.state.pipeline, table.loc["trial wide BF16", "runs"],
                  explorer.problem, explorer.view.sentence])
print(json.dumps(found))"""
    for pipeline, runs, problem, sentence in ask(folder, code):
        assert pipeline == "wide"
        assert "no record of trial bf16 wide in the calibration" in runs
        assert not problem
        assert "no record of trial" in sentence


def test_a_declaration_that_cannot_be_read_is_one_line(folder: Path) -> None:
    (folder / "alone.py").write_text("SYSTEMS = 1\n")
    (folder / "broken.py").write_text("SYSTEMS = (1,)\n")
    retains = DECLARATION.replace("hides_shared=True", "keeps='rows'")
    (folder / "rows.py").write_text(retains)
    (folder / "twice.py").write_text(DECLARATION.replace('"wide"', '"standard"'))
    for name, rule in (
        ("nowhere", "WORKBENCH_SYSTEMS: 'nowhere' must be a module with a constant SYSTEMS"),
        ("alone", "WORKBENCH_SYSTEMS: alone.SYSTEMS must be a sequence of System"),
        ("broken", "WORKBENCH_SYSTEMS: broken.SYSTEMS: 1 must be a System"),
        ("rows", "WORKBENCH_SYSTEMS: rows.SYSTEMS: wide: keeps='rows' must be 'slot' or 'all'"),
        ("twice", "WORKBENCH_SYSTEMS: twice.SYSTEMS: pipeline='standard' must not be there"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "workbench.cli", "predict"],
            env=environment(folder, name),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"error: {rule}")
        assert len(done.stderr.splitlines()) == 1
