"""What a context raises, and the text for each code that ranks agree on."""

from collections.abc import Sequence

from workbench.errors import InputError
from workbench.kernels.words import Code, Decide
from workbench.moe.config import MoEConfig


class MoEInputError(InputError):
    """An input of some rank is wrong; raised on every rank with the same text."""


class CapacityError(RuntimeError):
    """A rank received more rows than the scratch frame holds; raised on every rank."""


class PeerError(RuntimeError):
    """A peer died, stopped, or did not come in time. The group is closed for good."""


class ClosedError(RuntimeError):
    """The context or its group was used after it was closed."""


def failure(decision: Sequence[int], text: str, config: MoEConfig) -> Exception:
    """The exception for the words of a decision that is not OK; `text` is what the host of the
    rank at fault had to say."""
    code, rank = decision[Decide.CODE], decision[Decide.RANK]
    a, b = decision[Decide.A], decision[Decide.B]
    where = f"rank {rank}: "
    if code == Code.HOST:
        return MoEInputError(where + text)
    if code == Code.ID_RANGE:
        return MoEInputError(f"{where}topk_ids_TK={b} of token {a} must be 0 to E-1={config.E - 1}")
    if code == Code.ID_REPEATED:
        return MoEInputError(f"{where}topk_ids_TK={b} of token {a} must not repeat in a token")
    if code == Code.SCORE:
        return MoEInputError(f"{where}topk_scores_TK of token {a}, k={b} must be finite")
    if code == Code.MISMATCH:
        kinds = ("forward", "backward")
        how = f"{kinds[a]} against {kinds[b]}"
        if a == b:
            how = f"another {kinds[a]}: gradients are on, or an earlier graph is kept, on some only"
        return MoEInputError(
            f"{where}is in another call than rank 0 ({how}); ranks must make the same calls in the"
            " same order"
        )
    # Rounded up to two decimals.
    fits = -(-100 * a // (config.T * config.K)) / 100
    return CapacityError(
        f"{where}rows needed={a} must be at most rows available={b}"
        f" (scratch_factor={config.scratch_factor:g}); scratch_factor={fits:g} would fit"
    )
