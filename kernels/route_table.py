"""Route table: from everyone's expert ids, the rows that this rank receives and their sources.

A route is (rank, token, k), kept as two int32: the rank, and token * K + k. Rows are ordered by
(expert, rank, token, k), so equal inputs give equal sums.

Legend: P ranks, T tokens per rank, K experts per token, E experts in all, e experts of this rank,
R rows received.
"""

import torch
from torch import Tensor

from .count_sort import count_sort
from .device import Launch, Target
from .ops import Arguments, Blanks, Cost, op
from .peers import Peers


def route_table_torch(
    *, ids: Peers, rank: int, rank_R: Tensor, slot_R: Tensor, starts_e: Tensor, counts_PE: Tensor
) -> None:
    """Fills the route table of `rank`.

    ids: int32 [P, T, K]. rank_R, slot_R: int32, room for the rows that the plan allows; rows
    beyond are left out (the planner then refuses the call). starts_e: int64 [e + 1], first row of
    each expert. counts_PE: int64 [P, E], rows that each rank sends to each expert, ids out of range
    left out.
    """
    ids_PN = ids.all_P.flatten(1)
    ranks, experts = counts_PE.shape
    local = starts_e.shape[0] - 1
    ids_N = ids_PN.reshape(-1)
    valid_N = (ids_N >= 0) & (ids_N < experts)
    source_N = torch.arange(ranks, device=ids_N.device).repeat_interleave(ids_PN.shape[1])
    keys_N = torch.where(valid_N, source_N * experts + ids_N, ranks * experts)
    counts_PE.copy_(torch.bincount(keys_N, minlength=ranks * experts + 1)[:-1].view(ranks, experts))
    mine_N = ids_N - rank * local
    at_R = ((mine_N >= 0) & (mine_N < local)).nonzero()[:, 0]
    order_R = mine_N[at_R].sort(stable=True).indices
    rows = min(at_R.shape[0], slot_R.shape[0])
    route_R = at_R[order_R[:rows]]
    rank_R[:rows] = torch.div(route_R, ids_PN.shape[1], rounding_mode="floor")
    slot_R[:rows] = route_R % ids_PN.shape[1]
    starts_e[0] = 0
    starts_e[1:] = counts_PE[:, rank * local : (rank + 1) * local].sum(0).cumsum(0)


def _examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    route = {"rank_R": blank.route()["rank_R"], "slot_R": blank.route()["row_R"]}
    return {
        "": {
            **route,
            "ids": blank.peers(s.T, s.K, dtype=torch.int32),
            "rank": 1 % s.ep,
            "starts_e": blank.starts_e,
            "counts_PE": blank.counts_PE,
        }
    }


@op(
    twin=route_table_torch,
    examples=_examples,
    main=0,
    cost=lambda s, _: Cost(hbm_bytes=4 * s.ep * s.R + 16 * s.R, link_bytes=4 * s.ep * s.R),
)
def route_table(
    target: Target,
    *,
    ids: Peers,
    rank: int,
    rank_R: Tensor,
    slot_R: Tensor,
    starts_e: Tensor,
    counts_PE: Tensor,
) -> list[Launch]:
    """Launches equivalent to `route_table_torch`."""
    local = starts_e.shape[0] - 1
    return count_sort(
        target,
        bases_P=ids.bases_P,
        offset=ids.offset,
        N=ids.all_P[0].numel(),
        keys=counts_PE.shape[1],
        starts=starts_e,
        totals_PK=counts_PE,
        first_key=rank * local,
        held_keys=local,
        first=rank_R,
        second=slot_R,
    )
