"""The planner's decision: kernel against the twin, word for word."""

import random

import pytest
import torch
from group import TARGET, Group
from workbench.kernels.decide import (
    decide,
    decide_backward,
    decide_backward_torch,
    decide_torch,
    release,
)
from workbench.kernels.device import run
from workbench.kernels.words import (
    DECIDE_WORDS,
    HEAD_WORDS,
    PEAK_WORDS,
    TEXT_BYTES,
    Code,
    Decide,
    Head,
)

pytestmark = pytest.mark.values


def scene(P, E, seed):
    """Heads and texts of a group, counts and a state in which two of four entries are held."""
    chance = random.Random(seed)
    group = Group(P)
    heads = group.place(HEAD_WORDS, dtype=torch.int64)
    texts = group.place(TEXT_BYTES, dtype=torch.uint8)
    heads.all_P.zero_()
    heads.all_P[:, Head.ENTRY], heads.all_P[:, Head.CALL] = 2, 5
    texts.all_P.copy_(torch.randint(0, 255, texts.all_P.shape, dtype=torch.uint8))
    counts = torch.tensor([[chance.randrange(40) for _ in range(E)] for _ in range(P)])
    decisions = torch.zeros(4, DECIDE_WORDS, dtype=torch.int64)
    decisions[0, Decide.END] = chance.choice([0, 1 << 14])
    decisions[1, Decide.END] = chance.choice([0, 1 << 15])
    decisions[2] = 1 << 19  # stale words of the entry that is decided
    state = {
        "decisions_L": decisions,
        "first_error": torch.zeros(DECIDE_WORDS, dtype=torch.int64),
        "error_text": torch.zeros(TEXT_BYTES, dtype=torch.uint8),
        "peaks": torch.full((PEAK_WORDS,), 3),
    }
    return heads, texts, counts, state


def both(heads, texts, counts, state, **given):
    """What kernel and twin leave behind; they must leave the same."""
    results = []
    for how in ("kernel", "twin"):
        mine = {name: value.clone() for name, value in state.items()}
        arguments = {
            "heads": heads,
            "texts": texts,
            "counts_PE": counts,
            **mine,
            "entry": 2,
            "slot_at": 4096,
            "row_bytes_O": torch.tensor([66, 38, 7]),
            "scratch_at": 1 << 33,
            **given,
        }
        if how == "kernel":
            run(decide(TARGET, **arguments))
        else:
            decide_torch(**arguments)
        results.append(mine)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    return results[0]


@pytest.mark.parametrize(("P", "E"), [(1, 1), (2, 8), (4, 12), (5, 35)])
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("slot_bytes", [0, 1 << 15, 1 << 20])
def test_saved_or_recomputed(P, E, saves, slot_bytes):
    for rank in {0, P - 1}:
        heads, texts, counts, state = scene(P, E, seed=P + slot_bytes)
        left = both(
            heads,
            texts,
            counts,
            state,
            rank=rank,
            rows_available=10**6,
            saves=saves,
            slot_bytes=slot_bytes,
        )
        decision = left["decisions_L"][2].tolist()
        per = E // P
        assert decision[Decide.OK] == 1
        assert decision[Decide.ROWS] == int(counts[:, rank * per : (rank + 1) * per].sum())
        kept = slot_bytes == 1 << 20 and saves
        assert (decision[Decide.END] > 0) == kept or slot_bytes == 1 << 15
        held = decision[Decide.END] > 0
        assert decision[Decide.KEPT] == (decision[Decide.ROWS] if held else 0)
        if held:
            before = max(4096, *state["decisions_L"][:2, Decide.END].tolist())
            sizes = [-(-decision[Decide.ROWS] * each // 128) * 128 for each in (66, 38, 7)]
            assert decision[Decide.BASE] == before
            assert decision[Decide.END] == before + sum(sizes)
        else:
            assert decision[Decide.BASE] == 1 << 33


@pytest.mark.parametrize("slot_at", [1_572_864_000, (1 << 31) - 128, 1 << 33])
@pytest.mark.parametrize("slot_bytes", [1 << 20, 1_572_864_000])
def test_slots_that_end_beyond_32_bits(slot_at, slot_bytes):
    heads, texts, counts, state = scene(2, 8, seed=4)
    state["decisions_L"].zero_()
    left = both(
        heads,
        texts,
        counts,
        state,
        rank=0,
        rows_available=10**6,
        saves=True,
        slot_at=slot_at,
        slot_bytes=slot_bytes,
    )
    words = left["decisions_L"][2].tolist()
    assert words[Decide.BASE] == slot_at
    assert words[Decide.KEPT] == words[Decide.ROWS]


def test_overflow_names_the_first_busiest_rank():
    heads, texts, counts, state = scene(4, 12, seed=1)
    counts[:] = 1
    counts[0, 3] = counts[2, 8] = 50
    left = both(
        heads, texts, counts, state, rank=1, rows_available=60, saves=True, slot_bytes=1 << 20
    )
    words = left["decisions_L"][2].tolist()
    assert words[Decide.CODE : Decide.B + 1] == [Code.OVERFLOW, 1, 61, 60]
    assert words[Decide.OK] == 0
    assert torch.equal(left["first_error"], left["decisions_L"][2])
    assert torch.equal(left["error_text"], texts.all_P[1])
    assert left["peaks"].tolist() == [3] * PEAK_WORDS


@pytest.mark.parametrize("fault", ["code", "call", "both", "earlier error"])
def test_what_headers_say(fault):
    heads, texts, counts, state = scene(4, 12, seed=2)
    if fault in ("code", "both"):
        heads.all_P[2, : Head.B + 1] = torch.tensor([Code.SCORE, 11, 5])
        heads.all_P[3, : Head.B + 1] = torch.tensor([Code.ID_RANGE, 1, -9])
        wanted = [Code.SCORE, 2, 11, 5]
    else:
        wanted = [Code.MISMATCH, 1, 1, 0]
    if fault != "code":
        heads.all_P[1, Head.KIND] = 1
    if fault == "earlier error":
        state["first_error"][Decide.CODE] = int(Code.HOST)
    left = both(
        heads, texts, counts, state, rank=0, rows_available=10**6, saves=True, slot_bytes=1 << 20
    )
    assert left["decisions_L"][2, Decide.CODE : Decide.B + 1].tolist() == wanted
    if fault == "earlier error":
        assert torch.equal(left["first_error"], state["first_error"])
    # A backward over the same headers stops in the same way, and keeps its other words.
    results = []
    for how in ("kernel", "twin"):
        decision = torch.arange(DECIDE_WORDS) + 1
        given = {
            "heads": heads,
            "texts": texts,
            "decision": decision,
            "first_error": state["first_error"].clone(),
            "error_text": state["error_text"].clone(),
        }
        if how == "kernel":
            run(decide_backward(TARGET, **given))
        else:
            decide_backward_torch(**given)
        results.append((decision, given["first_error"], given["error_text"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0][Decide.OK] == 0
    assert results[0][0][Decide.CODE] == wanted[0]
    assert results[0][0][Decide.END] == Decide.END + 1


def test_backward_goes_on_where_headers_agree():
    heads, texts, _, state = scene(3, 3, seed=3)
    decision = torch.arange(DECIDE_WORDS) + 1
    run(
        decide_backward(
            TARGET,
            heads=heads,
            texts=texts,
            decision=decision,
            first_error=state["first_error"],
            error_text=state["error_text"],
        )
    )
    assert decision[Decide.OK] == 1
    assert decision[Decide.CODE] == 0
    assert not state["first_error"].any()


def test_release():
    decision = torch.arange(DECIDE_WORDS) + 1
    run(release(TARGET, decision=decision))
    assert decision[Decide.END] == 0
    assert decision.count_nonzero() == DECIDE_WORDS - 1
