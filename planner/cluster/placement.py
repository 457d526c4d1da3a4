"""Which GPU each rank sits on, and which GPUs to use where all of them are too many.

    2 servers x 4 GPUs, 2 stages x 4   GPUs (0, 1, 2, 3, 4, 5, 6, 7)    not (0, 2, 4, 6, 1, 3, 5, 7)
    stage 0, halo exchanges inside     server 0                         half of every halo crosses
    stage 1, a message per member      server 1                         servers

Placements are proposed here, and the fastest is chosen by what is predicted of it. Ranks are laid
down the hierarchy of islands, switches and servers in a few orders. From each of them ranks swap
places for as long as that shortens the way of their bytes: the sum over pairs of bytes times
seconds per byte of the links between the two.

The work of some ranks depends on which of them share a server or an island; GraNNDis preloads as
one, for example. Such groups of ranks are *tied*: a group moves as a whole to where another group
was, or its members swap places among themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.fabric import routes
from gnnplan.planner.cluster.places import LINK_NAMES, Places
from gnnplan.planner.cluster.spec import MOST_PAIRED, Cluster
from gnnplan.planner.vocabulary.outer import Outer, Pairs

MOST_SWAPPED = 128  # ranks of which every pair may swap: a step takes a product of such matrices


def walk(cluster: Cluster, gpus: Sequence[int]) -> list[int]:
    """The GPUs, ordered so that an island, a switch and a server end before the next begins."""
    at, all_gpus = Places.of(cluster, gpus), np.asarray(gpus)
    first_switch = np.full(int(at.island.max()) + 1, cluster.ranks)  # of each island
    np.minimum.at(first_switch, at.island, at.switch)
    order = np.lexsort((all_gpus, at.switch, at.island, first_switch[at.island], at.server))
    return [int(gpu) for gpu in all_gpus[order]]


def fewer(cluster: Cluster) -> list[tuple[int, ...]]:
    """Choices of fewer GPUs that are worth evaluating, equally many on every server used.

    They are one server, one leaf, half of every server, and one GPU.
    """
    per_server = cluster.gpus_per_server
    one_server = walk(cluster, range(per_server))
    out = [tuple(range(per_server))] if cluster.servers > 1 else []
    if cluster.fabric and 1 < cluster.fabric.below < cluster.servers:
        out.append(tuple(range(cluster.fabric.below * per_server)))
    if per_server % 2 == 0:
        half = sorted(one_server[: per_server // 2])
        out.append(
            tuple(server * per_server + gpu for server in range(cluster.servers) for gpu in half)
        )
    return list(dict.fromkeys([*out, (0,)] if cluster.ranks > 1 else []))


def proposed(
    cluster: Cluster,
    gpus: Sequence[int],
    sent: Sequence[Pairs],
    groups: Sequence[Sequence[int]],
    tied: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Placements that may be fastest, the GPU of each rank; the first is the `gpus` in their order.

    sent: bytes from rank to rank, each matrix [ranks, ranks]; of more than MOST_PAIRED none, for
    nobody looks at all their pairs. groups: of ranks that exchange; they
    may send each other more than their members do. `tied[r]` is the number of rank r's group, none:
    every rank may sit anywhere; groups are equally large.
    """
    uneven = [each for each in sent if not _even(each)]
    if not uneven and len(gpus) <= MOST_PAIRED:
        return [tuple(gpus)]
    path = np.array(walk(cluster, gpus))
    beside = path.copy()
    if len({len(group) for group in groups}) == 1 and sum(map(len, groups)) == len(gpus):
        beside[np.array(groups).T.ravel()] = path
    one_group = tuple(tied) or (0,) * len(gpus)
    starts = [tuple(gpus), tuple(path.tolist()), tuple(beside.tolist())]
    every = [one for one in dict.fromkeys(starts) if _keeps_groups(gpus, one, one_group)]
    if len(gpus) <= MOST_SWAPPED:
        total = sum(map(np.asarray, uneven), np.zeros((len(gpus),) * 2))
        apart = _seconds_per_byte(cluster, gpus)
        order = {gpu: place for place, gpu in enumerate(gpus)}
        for start in tuple(every):
            at = np.array([order[gpu] for gpu in start])
            at = _swapped(total + total.T, apart, at, np.array(one_group))
            every.append(tuple(np.array(gpus)[at].tolist()))
    return list(dict.fromkeys(every))


def _even(sent: Pairs) -> bool:
    """Whether everyone sends as much to everyone, so that all placements are alike."""
    if isinstance(sent, Outer):
        return sent.is_even
    n = len(sent)
    # all but the diagonal, whichever order the array has in memory
    apart = sent.ravel("K")[: n * n - 1].reshape(n - 1, n + 1)[:, 1:]
    return all(bool((row == apart[0, 0]).all()) for row in apart)  # mostly the first one differs


def _keeps_groups(gpus: Sequence[int], placement: Sequence[int], tied: Sequence[int]) -> bool:
    """Whether a placement has every group on the GPUs of one group, in the order of `gpus`."""
    group_of = dict(zip(gpus, tied, strict=True))
    pairs = {(group, group_of[gpu]) for group, gpu in zip(tied, placement, strict=True)}
    return len(pairs) == len(set(tied))


def _seconds_per_byte(cluster: Cluster, gpus: Sequence[int]) -> np.ndarray:
    """What a byte between two of the GPUs takes on its links, 0 to itself [gpus, gpus] [s/B]."""
    cost, n = Cost(cluster, gpus), len(gpus)
    a, b = np.indices((n, n))
    of_link = [
        1 / cost.ports.link("exchange", name).bandwidth if getattr(cluster, name) else 0.0
        for name in LINK_NAMES
    ]
    out = np.array(of_link)[cost.places.links(a, b)]
    if cluster.fabric:
        ways = routes(cluster.fabric, cluster.servers)
        hops = ways.between(*ways.at[cost.places.server[np.array([a, b])]])
        out = out + hops / cost.ports.fabric_link("exchange", cluster.fabric).bandwidth
    return np.asarray(out * (a != b))


def _swapped(
    traffic: np.ndarray, apart: np.ndarray, at: np.ndarray, tied: np.ndarray
) -> np.ndarray:
    """Each rank's place after swaps of whole groups, then of their members: the best one while any
    shortens the way of their bytes. Ranks begin `at` places [ranks]; traffic, apart: symmetric."""
    group = np.equal.outer(np.unique(tied), tied).astype(float)  # [groups, ranks]
    ways = group @ apart[np.ix_(at, at)] @ group.T
    after = _descended(group @ traffic @ group.T, ways, np.arange(len(group)), True)
    members = np.argsort(tied, kind="stable").reshape(len(group), -1)
    at = at.copy()
    at[members] = at[members[after]]
    return _descended(traffic, apart, at, np.equal.outer(tied, tied))


def _descended(
    traffic: np.ndarray, apart: np.ndarray, at: np.ndarray, may: np.ndarray | bool
) -> np.ndarray:
    """The places after swaps of two that `may` swap [n, n]."""
    others = ~np.eye(len(at), dtype=bool)
    traffic, apart = traffic * others, apart * others
    for _ in range(4 * len(at)):
        ways = apart[np.ix_(at, at)]
        elsewhere = traffic @ ways  # [a, b]: of a's bytes, if it sat where b does
        here = np.diag(elsewhere)
        change = elsewhere + elsewhere.T - np.add.outer(here, here) + 2 * traffic * ways
        change = np.where(may, change, 0.0)
        a, b = np.unravel_index(np.argmin(change), change.shape)
        if change[a, b] >= -1e-9 * here.sum():
            break
        at[[a, b]] = at[[b, a]]
    return at
