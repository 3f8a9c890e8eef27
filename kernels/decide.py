"""The planner's decision, on the device: does the call run, and is its layer saved or recomputed.

Legend: P ranks, E experts in all, L layer entries, H header words.
"""

from torch import Tensor

from .memory import Peers
from .words import Code, Decide, Head, Peak


def decide_torch(
    *,
    heads: Peers,
    counts_PE: Tensor,
    decisions_L: Tensor,
    entry: int,
    rank: int,
    rows_available: int,
    slot_at: int,
    slot_bytes: int,
    x_row_bytes: int,
    h1_row_bytes: int,
    x_scratch_at: int,
    h1_scratch_at: int,
    saves: bool,
    texts: Peers,
    first_error: Tensor,
    error_text: Tensor,
    peaks: Tensor,
) -> None:
    """Writes decision `entry` of decisions_L (int64 [L, DECIDE_WORDS]).

    The call runs if no header (int64 [P, H]) has a code, all ranks are in the same call, and the
    busiest rank's rows fit its scratch frame; every rank comes to the same conclusion from the
    same data. The layer is saved if its x (`x_row_bytes` per row) and h1 fit the slot space
    `slot_at`..`slot_at + slot_bytes` behind what other entries hold; else its rows lie in the
    scratch frame and backward produces them again. Without `saves` nothing is held. The first
    error since it was last cleared is copied to `first_error` (int64 [DECIDE_WORDS]), with the
    text of the rank at fault (`texts`: uint8 [P, TEXT_BYTES]) in `error_text`. `peaks` (int64
    [PEAK_WORDS]) is raised.
    """
    per_rank = counts_PE.shape[1] // counts_PE.shape[0]
    rows_P = counts_PE.view(len(counts_PE), -1, per_rank).sum((0, 2))
    code, who, a, b = _agree(heads.all_P)
    if code == Code.OK and int(rows_P.max()) > rows_available:
        code, who = Code.OVERFLOW, int(rows_P.argmax())
        a, b = int(rows_P[who]), rows_available
    mine = decisions_L[entry]
    mine.zero_()
    _note(mine, (code, who, a, b), texts, first_error, error_text)
    if code != Code.OK:
        return
    rows = int(rows_P[rank])
    x_bytes = _aligned(rows * x_row_bytes)
    top = max(slot_at, int(decisions_L[:, Decide.END].max()))
    end = top + x_bytes + _aligned(rows * h1_row_bytes)
    mine[Decide.OK] = 1
    mine[Decide.ROWS] = rows
    if saves and end <= slot_at + slot_bytes:
        mine[Decide.X_AT] = top
        mine[Decide.H1_AT] = top + x_bytes
        mine[Decide.END] = end
    else:
        mine[Decide.X_AT] = x_scratch_at
        mine[Decide.H1_AT] = h1_scratch_at
        mine[Decide.RECOMPUTE] = int(saves)
    peaks[Peak.ROWS] = max(int(peaks[Peak.ROWS]), rows)
    peaks[Peak.SLOT_BYTES] = max(int(peaks[Peak.SLOT_BYTES]), int(mine[Decide.END]) - slot_at)
    peaks[Peak.SAVED] += int(mine[Decide.END] > 0)
    peaks[Peak.RECOMPUTED] += int(mine[Decide.RECOMPUTE])


def decide_backward_torch(
    *, heads: Peers, decision: Tensor, texts: Peers, first_error: Tensor, error_text: Tensor
) -> None:
    """Stops a backward call whose headers (int64 [P, H]) hold a code or differ."""
    if decision[Decide.OK]:
        _note(decision, _agree(heads.all_P), texts, first_error, error_text)
        if decision[Decide.CODE] != Code.OK:
            decision[Decide.OK] = 0


def release_torch(*, decision: Tensor) -> None:
    """Gives the slot space of a decision (int64 [DECIDE_WORDS]) back."""
    decision[Decide.END] = 0


def _agree(heads_PH: Tensor) -> tuple[int, int, int, int]:
    """Code, rank and details that all ranks conclude from all headers."""
    heads = heads_PH.tolist()
    for who, head in enumerate(heads):
        if head[Head.CODE] != Code.OK:
            return head[Head.CODE], who, head[Head.A], head[Head.B]
    call = slice(Head.KIND, Head.CALL + 1)
    for who, head in enumerate(heads):
        if head[call] != heads[0][call]:
            return Code.MISMATCH, who, head[Head.KIND], heads[0][Head.KIND]
    return Code.OK, 0, 0, 0


def _note(
    mine: Tensor,
    found: tuple[int, int, int, int],
    texts: Peers,
    first_error: Tensor,
    error_text: Tensor,
) -> None:
    for word, value in zip((Decide.CODE, Decide.RANK, Decide.A, Decide.B), found, strict=True):
        mine[word] = value
    code, who, *_ = found
    if code != Code.OK and first_error[Decide.CODE] == Code.OK:
        first_error.copy_(mine)
        error_text.copy_(texts.all_P[who])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128
