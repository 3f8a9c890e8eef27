"""The layer on real ranks under torchrun: values, and what every rank sees when one goes wrong."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from layer_cases import LIMIT

RANKS = Path(__file__).with_name("ranks.py")


def torchrun(out: Path, ranks: int, job: str, *arguments: object) -> list:
    """What each rank of a job found."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts=0",
        f"--nproc-per-node={ranks}",
        RANKS,
        job,
        out,
        *arguments,
    ]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def dying(out: Path, ranks: int, *arguments: str) -> list:
    """What each rank found, None for one that died; without torchrun, which would end the rest."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANKS), "dies", str(out), *arguments],
            env=os.environ | rendezvous | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [out / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


CASES = {1: (0, 60), 2: (60, 130), 4: (130, 200)}


@pytest.fixture(scope="session")
def found_values(tmp_path_factory):
    found = {}
    for ranks, (first, last) in CASES.items():
        out = tmp_path_factory.mktemp(f"values{ranks}")
        found[ranks] = torchrun(out, ranks, "values", first, last)[0]
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_values_and_gradients_of_random_cases(found_values, ranks):
    first, last = CASES[ranks]
    assert len(found_values[ranks]) == (last - first) * 4  # two pipelines, two dtypes
    worst = {
        f"{case['seed']} {case['pipeline']} {case['dtype']} {name} {case['sizes']}": error
        for case in found_values[ranks]
        for name, error in case["errors"].items()
        if not error < LIMIT[case["dtype"]]
    }
    assert not worst


def test_the_random_cases_are_what_they_should_be(found_values):
    cases = [case for found in found_values.values() for case in found]
    by_seed = {case["seed"]: case for case in cases}
    assert len(by_seed) == 200
    assert sum(0 in case["rows"] for case in by_seed.values()) >= 50  # a rank without rows
    tails = [
        c for c in by_seed.values() if any(r % 16 for r in c["expert_rows"]) or c["sizes"][1] % 16
    ]
    assert len(tails) >= 50
    assert sum(len(case["rows"]) == 4 for case in by_seed.values()) >= 50
    assert any(case["recomputed"] for case in cases if case["pipeline"] == "standard")
    assert max(case["sizes"][0] for case in cases) > 200


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("sound"), 2, "sound")


BAD = {
    "T": "rank 1: x_TD shape=[15, 32] must be [16, 32]",
    "T ids": "rank 1: topk_ids_TK shape=[15, 2] must be [16, 2]",
    "dtype": "rank 1: x_TD dtype=float64 must be bfloat16",
    "strides": "rank 1: x_TD strides=[1, 16] must be contiguous",
    "no tensor": "rank 1: x_TD=NoneType must be a tensor",
    "weights": "rank 1: w13_E2FD shape=[4, 31, 32] must be [4, 32, 32]",
    "id beyond": "rank 1: topk_ids_TK=8 of token 3 must be 0 to E-1=7",
    "id negative": "rank 1: topk_ids_TK=-1 of token 0 must be 0 to E-1=7",
    "score nan": "rank 1: topk_scores_TK of token 5, k=1 must be finite",
    "score inf": "rank 1: topk_scores_TK of token 5, k=1 must be finite",
}


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
@pytest.mark.parametrize("name", [*BAD, "id repeated"])
@pytest.mark.parametrize("when", ["bad", "unseen"], ids=["at once", "at the next check"])
def test_a_bad_input_of_one_rank_is_raised_by_all_and_forgotten(sound, name, pipeline, when):
    bad = [rank[when] for rank in sound]
    raised = {rank[f"{pipeline} {name}"] for rank in bad}
    assert len(raised) == 1
    (text,) = raised
    if name == "id repeated":
        assert text.startswith("MoEInputError: rank 1: topk_ids_TK=")
        assert text.endswith("of token 0 must not repeat in a token")
    else:
        assert text == f"MoEInputError: {BAD[name]}"
    assert max(rank[f"{pipeline} after {name}"] for rank in bad) < LIMIT["bfloat16"]
    if when == "bad":
        assert max(rank["seconds"] for rank in bad) < 10
    else:
        assert all(rank[f"{pipeline} NaN {name}"] for rank in bad)


NO_TOKENS = {
    "no dimension": "x_TD shape=[] must be [16, 32]",
    "empty": "x_TD shape=[1, 0] must be [16, 32]",
    "no rows": "x_TD shape=[0, 32] must be [16, 32]",
    "no tensor": "x_TD=NoneType must be a tensor",
    "elsewhere": "x_TD device=meta must be cpu, as the context's arena",
    "scores": "topk_scores_TK shape=[] must be [16, 2]",
}


@pytest.mark.parametrize("name", NO_TOKENS)
def test_what_are_no_tokens_on_one_rank_is_raised_by_all(sound, name):
    for rank in (rank["no tokens"] for rank in sound):
        assert rank[name] == f"MoEInputError: rank 1: {NO_TOKENS[name]}"
        assert rank[f"after {name}"]
        assert rank["seconds"] < 10


def test_scratch_overflow_on_one_rank(sound):
    wanted = (
        "CapacityError: rank 0: rows needed=64 must be at most rows available=32"
        " (scratch_factor=1); scratch_factor=2 would fit"
    )
    for rank in (rank["overflow"] for rank in sound):
        assert rank["always"] == rank["first"] == rank["never"] == wanted
        assert rank["first all NaN"] is True
        assert rank["never all NaN"] is True
        assert max(rank[f"{v} after"] for v in ("always", "first", "never")) < LIMIT["bfloat16"]


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
def test_ranks_in_different_calls(sound, pipeline):
    for rank in (rank[f"mismatch {pipeline}"] for rank in sound):
        assert rank["calls"].startswith("rank 1: is in another call than rank 0")
        assert "backward against forward" in rank["calls"]
        assert rank["gradients"] == (
            "rank 1: is in another call than rank 0 (another forward: gradients are on, or an"
            " earlier graph is kept, on some only); ranks must make the same calls in the same"
            " order"
        )
        assert rank["after"] < LIMIT["bfloat16"]


@pytest.mark.parametrize("where", ["publish", "w2_dgrad", "w2_combine"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_dies_in_mid_step(tmp_path, how, where):
    *others, last = dying(tmp_path, 3, how, where)
    if how == "raise":
        assert last["raised"] == "MemoryError: no more"
    else:
        assert last is None
    for rank in others:
        assert rank["raised"].startswith("PeerError: rank ")
        assert "the group is closed" in rank["raised"]
        if how == "kill":
            assert "ranks [2] died" in rank["raised"]
        assert rank["seconds"] < 10
        assert rank["after"].startswith("ClosedError: context is closed")
        assert rank["maps"] == []


def test_a_rank_that_is_late(tmp_path):
    for number, rank in enumerate(dying(tmp_path, 2, "5", "w2_dgrad")):
        assert rank["raised"].startswith(f"PeerError: rank {number}: ")
        if number == 0:
            assert "ranks [1] did not come at combined (timeout_s=4)" in rank["raised"]
        assert rank["seconds"] < 10
        assert rank["after"].startswith("ClosedError")
        assert rank["maps"] == []


def test_a_rank_that_is_late_within_the_limit_is_waited_for(tmp_path):
    for rank in dying(tmp_path, 2, "2", "w2_dgrad"):
        assert rank["raised"] == "nothing"
        assert 2 < rank["seconds"] < 4


def test_memory_is_the_plan_s_and_goes_with_the_context(sound):
    for rank in (rank["closes"] for rank in sound):
        assert rank["inside"] > rank["left"]
        assert rank["closed"] == []
        assert rank["bytes"][0] == rank["bytes"][1]
        assert rank["after"] == "ClosedError: group is closed: it was closed"


@pytest.mark.parametrize("kind", ["shared", "collective"])
def test_an_arena_that_one_rank_cannot_have_is_refused_on_all(sound, kind):
    for rank in (rank["no memory"] for rank in sound):
        assert rank[kind].startswith("rank 1: arena of ")
        assert rank[kind].endswith("cannot be had: OSError: [Errno 12] Cannot allocate memory")
        assert rank[f"{kind} seconds"] < 10
        assert rank[f"{kind} after"] < LIMIT["bfloat16"]


def test_ranks_that_ask_for_different_contexts(sound):
    assert [rank["disagrees"] for rank in sound] == ["T=17 on rank 1 must be 16 as on rank 0"] * 2
