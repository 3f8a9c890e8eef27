"""Machine code of every kernel at the study's shapes, compiled for GPUs that are not there.

One process per target compiles, as a process in interpreter mode cannot; Triton caches on disk.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from workbench.kernels.aot import SHARED_PER_SM, TARGETS, resident
from workbench.kernels.catalogue import OPS
from workbench.kernels.ops import Sizes, examples

from workbench.bench.kernel_table import kernel_rows

GEMMS = {
    "dispatch_w13",
    "w2_combine",
    "w2_dgrad",
    "w13_dgrad_combine",
    "w2_wgrad",
    "w13_wgrad",
    "w2_wgrad, FP32, accumulating",
}
WAITING = {"dispatch_w13", "w2_dgrad"}
PERSISTENT = {"grouped_gemm_kernel", "wgrad_kernel", "swiglu_kernel", "swiglu_backward_kernel"}
MATRIX = {
    "sm_90a": r"wgmma\.mma_async\.sync\.aligned\.m64n(128|256)k16\.f32\.bf16\.bf16",
    "sm_100a": r"tcgen05\.mma\.cta_group::1\.kind::f16",
    "sm_103a": r"tcgen05\.mma\.cta_group::1\.kind::f16",
}


def compiled_for(target, folder):
    rows = [asdict(row) for row in kernel_rows(targets=[target], ptx=folder)]
    for row in rows:
        name = row["op"].replace(", ", "-")
        row["ptx"] = [path.read_text() for path in folder.glob(f"{name}.*.{row['kernel']}.*.ptx")]
    return rows


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptx")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda t: compiled_for(t, folder / t), TARGETS))
    return dict(zip(TARGETS, found, strict=True))


def of(rows, target, op):
    (row,) = [row for row in rows[target] if row["op"] == op and row["main"]]
    return row


targets = pytest.mark.parametrize("target", TARGETS)


@targets
def test_every_op_is_there_and_none_was_run(rows, target):
    assert {row["op"].partition(",")[0] for row in rows[target]} == set(OPS)
    assert {row["run"] for row in rows[target]} == {"not run on a GPU"}
    assert {row["origin"] for row in rows[target]} == {"predicted"}


def test_a_row_names_the_pipelines_that_launch_its_op(rows):
    launch = {row["op"].partition(",")[0]: row["pipelines"] for row in rows["sm_90a"]}
    assert launch["dispatch_w13"] == launch["w2_wgrad"] == "standard, alltoall"
    assert {op for op, pipelines in launch.items() if pipelines == "alltoall"} == {
        "send_order",
        "receive_order",
        "pack",
        "unpack",
    }
    assert all(launch.values())


@targets
def test_grouped_products_use_the_matrix_units_and_descriptors(rows, target):
    for op in GEMMS:
        row = of(rows, target, op)
        assert re.fullmatch(MATRIX[target], row["instruction"]), (op, row["instruction"])
        assert row["tma"] == "loads", op
        assert row["stages"] >= 3, op
        BM_BN = row["flop_per_tile"] // 2
        assert BM_BN >= 128 * 128 * 2048, op
    others = [row for row in rows[target] if row["op"] not in GEMMS]
    assert {row["instruction"] for row in others} == {"none"}
    assert {row["tma"] for row in others} == {"no"}


@targets
def test_no_kernel_spills_and_all_fit_an_sm(rows, target):
    for row in rows[target]:
        assert row["spill_bytes"] == 0, row["op"]
        assert row["registers"] <= 255, row["op"]
        assert row["shared_bytes"] <= SHARED_PER_SM, row["op"]
        assert row["resident"] >= 1, row["op"]


@targets
def test_persistent_grids_run_at_the_same_time(rows, target):
    """For kernels that wait it is needed; for the others a second wave would be half empty."""
    assert {row["op"] for row in rows[target] if row["waits"]} == WAITING
    persistent = [row for row in rows[target] if row["kernel"] in PERSISTENT]
    assert {row["op"] for row in persistent} > GEMMS
    for row in persistent:
        assert row["programs"] <= row["resident"] * TARGETS[target].sms, row["op"]


@targets
def test_both_operands_come_by_descriptors_with_all_stages_in_flight(rows, target):
    table = {
        example.label: example.launches(TARGETS[target])
        for example in examples(Sizes())
        if example.label in GEMMS
    }
    for op in GEMMS:
        row, chosen = of(rows, target, op), table[op][-1].constants
        tiles = (chosen["BM"] + chosen["BN"]) * chosen["BK"] * 2
        assert row["shared_bytes"] >= chosen["STAGES"] * tiles, op
        (ptx,) = row["ptx"]
        # What a pipelined loop reads through pointers, it copies element by element.
        assert not re.search(r"cp\.async\.c[ag]\b", ptx), op


@targets
def test_products_without_waits_load_on_warps_of_their_own(rows, target):
    for op in ("w2_combine", "w13_dgrad_combine"):
        assert of(rows, target, op)["warp_specialised"], op


@targets
def test_rows_are_moved_in_16_byte_words(rows, target):
    """Stores of results and gathered rows; single bytes or halves would be an unknown alignment."""
    for op in (*GEMMS, "swiglu", "swiglu_backward", "sum_k", "pack", "unpack", "publish_grad"):
        (ptx, *_) = of(rows, target, op)["ptx"]
        stores = re.findall(r"\bst\.global[\w.]*", ptx)
        narrow = [s for s in stores if re.search(r"\.b(8|16)\b", s)]
        assert not narrow, op
        assert any(".v4.b32" in s for s in stores), op


def events(ptx):
    """What orders memory, in the order of the code."""
    kinds = {
        "acquire": r"ld\.global\.\w+\.acquire|atom\.global\.\w+\.(?:acquire|acq_rel)",
        "release": r"\b(?:atom|red)\.global\.\w+\.(?:release|acq_rel)",
        "other atomic": r"\b(?:atom|red)\.(?!global\.\w+\.(?:acquire|release|acq_rel))[\w.]+",
        "fence": r"fence\.proxy\.async;",
        "descriptor read": r"cp\.async\.bulk\.tensor\S*shared\S*global",
        "barrier": r"bar\.sync|barrier\.sync",
        "store": r"st\.global",
    }
    pattern = "|".join(f"(?P<k{i}>{p})" for i, p in enumerate(kinds.values()))
    return [list(kinds)[int(m.lastgroup[1:])] for m in re.finditer(pattern, ptx)]


def order_faults(ptx):
    """What is wrong with the order of memory accesses of a kernel that waits; [] if nothing."""
    found, faults = events(ptx), []
    if found.count("acquire") != 1:
        faults.append(f"{found.count('acquire')} acquires, not 1")
    if found.count("release") != 1:
        faults.append(f"{found.count('release')} releases, not 1")
    if "other atomic" in found:
        faults.append("an atomic that orders nothing")
    for scope in re.findall(r"\b(?:ld|atom|red)\.global\.(\w+)\.(?:acquire|release)", ptx):
        if scope != "gpu":  # producers and consumers are programs of one launch
            faults.append(f"scope {scope}")
    if "acquire" in found:
        after = found[found.index("acquire") + 1 :]
        if "descriptor read" not in after:
            faults.append("no descriptor read behind the acquire")
        else:
            between = after[: after.index("descriptor read")]
            if "fence" not in between:
                faults.append("no fence between the acquire and a descriptor read")
            elif "barrier" not in between[: between.index("fence")]:
                faults.append("no barrier between the acquire and the fence")
        if "descriptor read" in found[: found.index("acquire")]:
            faults.append("a descriptor read before the acquire")
    if "release" in found:
        before = found[: found.index("release")]
        if (
            "barrier" not in before
            or "store" in before[len(before) - before[::-1].index("barrier") :]
        ):
            faults.append("no barrier between stores and the release")
    return faults


@targets
@pytest.mark.parametrize("op", sorted(WAITING))
def test_waits_acquire_signals_release_and_a_fence_precedes_descriptor_reads(rows, target, op):
    (ptx,) = of(rows, target, op)["ptx"]
    assert order_faults(ptx) == []


@targets
def test_kernels_that_do_not_wait_have_no_atomics(rows, target):
    for row in rows[target]:
        if not row["waits"]:
            for ptx in row["ptx"]:
                assert not re.search(r"\b(atom|red)\.(global|\w+\.global)", ptx), row["op"]


@pytest.mark.parametrize(
    ("pattern", "by", "fault"),
    [
        (r"fence\.proxy\.async;", "", "no fence between"),
        (r"ld\.global\.gpu\.acquire", "ld.global.gpu.relaxed", "0 acquires"),
        (r"atom\.global\.gpu\.release", "atom.global.gpu.relaxed", "0 releases"),
        (r"atom\.global\.gpu\.release", "atom.global.sys.release", "scope sys"),
        (r"bar(rier)?\.sync", "nothing", "no barrier between stores"),
    ],
)
def test_a_fault_in_the_order_is_found(rows, pattern, by, fault):
    (ptx,) = of(rows, "sm_90a", "dispatch_w13")["ptx"]
    broken, count = re.subn(pattern, by, ptx)
    assert count
    assert any(found.startswith(fault) for found in order_faults(broken))


def test_floors_of_the_dispatch_at_the_peaks(rows):
    """12,288 rows x 7168 x 6144 on a GB300 of 2.5 PFLOP/s; 63 of 64 rows over 900 GB/s."""
    row = of(rows, "sm_103a", "dispatch_w13")
    flop = 2 * 12288 * 7168 * 6144
    assert row["gflop"] == pytest.approx(flop / 1e9)
    assert row["predicted_us"] == pytest.approx(flop / 2.5e15 * 1e6)
    assert row["link_mb"] == pytest.approx(12288 * 7168 * 2 * 63 / 64 / 1e6)
    assert row["bound_by"] == "matrix units"
    assert of(rows, "sm_103a", "swiglu")["predicted_us"] == pytest.approx(
        12288 * 3072 * 3 * 2 / 8e12 * 1e6
    )


def test_resident_programs():
    assert resident(registers=255, warps=8, shared=0, columns=0) == 1
    assert resident(registers=128, warps=8, shared=0, columns=0) == 2
    assert resident(registers=32, warps=4, shared=100 * 1024, columns=0) == 2
    assert resident(registers=32, warps=4, shared=0, columns=256) == 2
    assert resident(registers=16, warps=1, shared=0, columns=0) == 64


ODD = Sizes(T=97, D=33, F=19, E=8, K=3, ep=2)
ONES = Sizes(T=1, D=1, F=1, E=1, K=1, ep=1)
"""An argument that is 1 is a constant to Triton, with no type of its own."""


@pytest.mark.parametrize(("sizes", "target"), [(ODD, "sm_90a"), (ODD, "sm_100a"), (ONES, "sm_90a")])
def test_sizes_that_no_descriptor_takes_compile_too(sizes, target):
    """Odd widths: no descriptors, still the matrix units, and no spills."""
    found = [row for row in kernel_rows(sizes, [target]) if row.main]
    for row in found:
        assert row.tma == "no"
        assert row.spill_bytes == 0, row.op
        assert (row.instruction != "none") == (row.op in GEMMS), row.op
