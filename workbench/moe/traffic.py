"""Bytes that ranks send and receive for a layer, counted from its route table.

Counted is the payload that leaves a rank: rows of x out and of products back, in training also
rows of dy out and of dx back, and one float32 score gradient per route. Ids, scores and words are
control and not counted; nor are the rows of x that a recomputation fetches again, which
`recomputed` ranks add.

Legend: P ranks, E experts in all.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.moe.config import DTYPES, MoEConfig

Ints = npt.NDArray[np.int64]


class Traffic(NamedTuple):
    """Bytes per rank, int64 [P]."""

    sent_P: Ints
    received_P: Ints


def traffic(
    config: MoEConfig, counts_PE: npt.ArrayLike, recomputed_P: npt.ArrayLike | None = None
) -> Traffic:
    """Bytes of one layer's forward, and backward in training.

    counts_PE: rows that each rank routes to each expert. recomputed_P: which ranks fetch their
    rows of x again in backward (none if not given).
    """
    counts = np.asarray(counts_PE, np.int64).reshape(config.ep, config.ep, -1).sum(2)
    abroad_PP = counts * ~np.eye(config.ep, dtype=bool)
    row = config.D * DTYPES[config.dtype]
    # [owner, expert's rank]: what goes from owner to expert, and what comes back
    there_PP, back_PP = abroad_PP * row, abroad_PP * row
    if config.training:
        there_PP, back_PP = 2 * there_PP, 2 * back_PP + 4 * abroad_PP
        if recomputed_P is not None:
            there_PP = there_PP + abroad_PP * row * np.asarray(recomputed_P, np.int64)
    return Traffic(there_PP.sum(1) + back_PP.sum(0), there_PP.sum(0) + back_PP.sum(1))
