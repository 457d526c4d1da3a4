"""Proposals of placements (which GPU each rank sits on).

    2 servers x 4 GPUs, 2 stages x 4   GPUs (0, 1, 2, 3, 4, 5, 6, 7)    not (0, 2, 4, 6, 1, 3, 5, 7)
    stage 0, halo exchanges inside     server 0                         half of each halo is sent
    stage 1, a message per member      server 1                         between servers

The caller predicts an epoch with each placement proposed here, and chooses the fastest
(decision/candidate.py). A few placements follow the hierarchy of islands, switches and servers.
From each of them ranks swap places as long as a swap reduces the sum over pairs of ranks of bytes
sent times seconds per byte of the links between the two.

The work of some strategies depends on which ranks share a server or an island: GraNNDis preloads
rows per server. Such groups of ranks are *tied*: a whole group swaps places with another group, or
members of a group swap places with each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.places import LINK_NAMES, Places
from gnnplan.planner.cluster.spec import MOST_PAIRED, Cluster
from gnnplan.planner.vocabulary.numbers import Outer, PerRank, RankMatrix

MOST_SWAPPED = 128  # ranks up to which pairs swap: a step multiplies matrices [ranks, ranks]


def walk(cluster: Cluster, gpus: Sequence[int]) -> list[int]:
    """Return the GPUs in an order that keeps each island, each switch and each server together."""
    at, all_gpus = Places.of(cluster, gpus), np.asarray(gpus)
    first_switch = np.full(int(at.island.max()) + 1, cluster.ranks)  # per island
    np.minimum.at(first_switch, at.island, at.switch)
    order = np.lexsort((all_gpus, at.switch, at.island, first_switch[at.island], at.server))
    return [int(gpu) for gpu in all_gpus[order]]


def proposed(
    cluster: Cluster,
    gpus: Sequence[int],
    sent: Sequence[RankMatrix],
    groups: Sequence[Sequence[int]],
    tied: Sequence[int] = (),
) -> list[PerRank]:
    """Return placements that may be fastest (the GPU of each rank); the first is `gpus` itself.

    sent: matrices of bytes from rank to rank [ranks, ranks]; empty for more than MOST_PAIRED ranks.
    groups: groups of ranks that exchange rows; bytes between groups may exceed those inside.
    tied: the number of the tied group of each rank, with equally large groups; empty: no ties.
    """
    uneven = [each for each in sent if not _is_even(each)]
    if not uneven and len(gpus) <= MOST_PAIRED:
        return [tuple(gpus)]
    path = np.array(walk(cluster, gpus))
    across = path.copy()  # the i-th members of all groups follow each other on the path
    if len({len(group) for group in groups}) == 1 and sum(map(len, groups)) == len(gpus):
        across[np.array(groups).T.ravel()] = path
    group_of = tuple(tied) or (0,) * len(gpus)
    starts = [tuple(gpus), tuple(path.tolist()), tuple(across.tolist())]
    placements = [each for each in dict.fromkeys(starts) if _keeps_groups(gpus, each, group_of)]
    if len(gpus) <= MOST_SWAPPED:
        total = sum(map(np.asarray, uneven), np.zeros((len(gpus),) * 2))
        distance = _seconds_per_byte(cluster, gpus)
        order = {gpu: place for place, gpu in enumerate(gpus)}
        for start in tuple(placements):
            at = np.array([order[gpu] for gpu in start])
            at = _swap(total + total.T, distance, at, np.array(group_of))
            placements.append(tuple(np.array(gpus)[at].tolist()))
    return list(dict.fromkeys(placements))


def _is_even(sent: RankMatrix) -> bool:
    """Whether all ranks send each other equally much, so that all placements are equal."""
    if isinstance(sent, Outer):
        return sent.is_even
    n = len(sent)
    # all entries but the diagonal, whichever order the array has in memory
    entries = sent.ravel("K")[: n * n - 1].reshape(n - 1, n + 1)[:, 1:]
    return all(bool((row == entries[0, 0]).all()) for row in entries)  # mostly row 0 differs


def _keeps_groups(gpus: Sequence[int], placement: Sequence[int], tied: Sequence[int]) -> bool:
    """Whether a placement puts each tied group on the GPUs that one group has in `gpus`."""
    group_of = dict(zip(gpus, tied, strict=True))
    pairs = {(group, group_of[gpu]) for group, gpu in zip(tied, placement, strict=True)}
    return len(pairs) == len(set(tied))


def _seconds_per_byte(cluster: Cluster, gpus: Sequence[int]) -> np.ndarray:
    """Return the seconds per byte between any two GPUs, 0 on the diagonal [gpus, gpus] [s/B]."""
    cost, n = Cost(cluster, gpus), len(gpus)
    a, b = np.indices((n, n))
    of_link = [
        1 / cost.ports.link("exchange", name).bandwidth if getattr(cluster, name) else 0.0
        for name in LINK_NAMES
    ]
    out = np.array(of_link)[cost.places.links(a, b)]
    if cluster.fabric and (paths := cost.ports.routes):
        hops = paths.between(*paths.at[cost.places.server[np.array([a, b])]])
        out = out + hops / cost.ports.fabric_link("exchange", cluster.fabric).bandwidth
    return np.asarray(out * (a != b))


def _swap(
    traffic: np.ndarray, distance: np.ndarray, at: np.ndarray, tied: np.ndarray
) -> np.ndarray:
    """Return each rank's place after swaps of whole groups, then of members of a group.

    Ranks begin at places `at` [ranks]. traffic [B], distance [s/B]: symmetric [ranks, ranks].
    """
    group = np.equal.outer(np.unique(tied), tied).astype(float)  # [groups, ranks]
    between_groups = group @ distance[np.ix_(at, at)] @ group.T
    order = _descend(group @ traffic @ group.T, between_groups, np.arange(len(group)), True)
    members = np.argsort(tied, kind="stable").reshape(len(group), -1)
    at = at.copy()
    at[members] = at[members[order]]
    return _descend(traffic, distance, at, np.equal.outer(tied, tied))


def _descend(
    traffic: np.ndarray, distance: np.ndarray, at: np.ndarray, may_swap: np.ndarray | bool
) -> np.ndarray:
    """Return places after the swap that reduces the seconds most, as long as one reduces them.

    may_swap: whether a and b may swap [n, n].
    """
    off_diagonal = ~np.eye(len(at), dtype=bool)
    traffic, distance = traffic * off_diagonal, distance * off_diagonal
    for _ in range(4 * len(at)):
        between = distance[np.ix_(at, at)]
        elsewhere = traffic @ between  # [a, b]: seconds of a's bytes, if a sat where b sits
        here = np.diag(elsewhere)
        change = elsewhere + elsewhere.T - np.add.outer(here, here) + 2 * traffic * between
        change = np.where(may_swap, change, 0.0)
        a, b = np.unravel_index(np.argmin(change), change.shape)
        if change[a, b] >= -1e-9 * here.sum():
            break
        at[[a, b]] = at[[b, a]]
    return at
