"""Which GPU each rank sits on, and which GPUs to use where all of them are too many.

    2 servers x 4 GPUs, 2 stages x 4   GPUs (0, 1, 2, 3, 4, 5, 6, 7)    not (0, 2, 4, 6, 1, 3, 5, 7)
    stage 0, halo exchanges inside     server 0                         half of every halo crosses
    stage 1, a message per member      server 1                         servers

A strategy describes its traffic in phases: bytes from rank to rank that are on the way at the same
time, and how often in a step. A placement costs the seconds of all its phases (cost.py).

Up to 8 GPUs every placement is evaluated, except for those that only swap symmetric GPUs, so the
result is optimal. With more GPUs a heuristic fills the tightest places first (islands, switches,
servers), then swaps ranks for as long as a swap helps. Of more than MOST_PAIRED not every pair is
looked at: ranks are laid down the hierarchy in a few orders (`laid_out`).

The work of some ranks depends on which of them share a server or an island; GraNNDis preloads as
one, for example. Such groups of ranks are *tied*: a group moves as a whole to where another group
was, or its members swap places among themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import chain, cycle, permutations
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.fabric import routes
from gnnplan.planner.cluster.places import Places
from gnnplan.planner.cluster.spec import Cluster, LinkName
from gnnplan.planner.vocabulary.outer import Outer, Pairs

MOST_EXHAUSTIVE = 8  # GPUs up to which every placement is evaluated
# that the heuristic evaluates beyond that, in a fraction of a second; with three times as many, two
# of 100 placements on 16 to 64 GPUs moved rows more than 1 % faster
MOST_MESSAGES = 3_000_000
MOST_STARTS = 8  # ranks that the heuristic tries as the first one
MESSAGES_AT_ONCE = 100_000  # that are evaluated in one batch of placements

# Placements [placements, ranks] -> the seconds of each [placements].
Evaluator = Callable[[np.ndarray], np.ndarray]


class Phase(NamedTuple):
    """Transfers that are on the way at the same time."""

    sent: Pairs  # bytes from rank to rank [ranks, ranks]
    times: float  # per step


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


def best_placement(
    cluster: Cluster, gpus: Sequence[int], phases: Sequence[Phase], tied: Sequence[int] = ()
) -> tuple[int, ...]:
    """The placement with which the phases take the fewest seconds: the GPU of each rank.

    It is the `gpus` in their order where nothing is faster. `tied[r]` is the number of rank r's
    group; groups are equally large, and each stays on the GPUs, in order, of one of them.
    """
    tied = tuple(tied) or tuple(range(len(gpus)))
    uneven = _merged([phase for phase in phases if phase.times and not _even(phase.sent)])
    if not uneven or len(set(_neighbourhoods(cluster, gpus))) == 1:
        return tuple(gpus)
    if _groups_stay_alone(cluster, gpus, uneven, tied):
        return tuple(gpus)
    uneven = [Phase(np.asarray(sent), times) for sent, times in uneven]
    in_order = Cost(cluster, tuple(gpus))
    in_order_s = sum(times * in_order.exchange(sent).alone for sent, times in uneven)
    if in_order_s <= _lower_bound_s(cluster, uneven) * (1 + 1e-9):
        return tuple(gpus)
    seconds = evaluator(cluster, gpus, uneven)
    if len(gpus) <= MOST_EXHAUSTIVE:
        every = all_placements(cluster, gpus)
        every = every[_keeps_groups(gpus, every, tied)]
        found = tuple(every[int(np.argmin(seconds(every)))].tolist())  # the first of equals
    else:
        found = heuristic(cluster, gpus, uneven, seconds, tied)
    before, after = seconds(np.array([gpus, found]))
    return found if after < before * (1 - 1e-9) else tuple(gpus)


def laid_out(
    cluster: Cluster, gpus: Sequence[int], groups: Sequence[Sequence[int]], tied: Sequence[int]
) -> list[tuple[int, ...]]:
    """Placements of many ranks down the hierarchy of islands, switches and servers: along a `walk`,
    as given, and with ranks side by side on the walk that have the same place in their `groups`.

    The last one serves groups that send each other more than their members do. `tied` as above.
    """
    path = np.array(walk(cluster, gpus))
    beside = path.copy()
    if len({len(group) for group in groups}) == 1 and sum(map(len, groups)) == len(gpus):
        beside[np.array(groups).T.ravel()] = path
    every = dict.fromkeys([tuple(path.tolist()), tuple(gpus), tuple(beside.tolist())])
    alone = tuple(tied) or tuple(range(len(gpus)))
    return [one for one in every if _keeps_groups(gpus, np.array([one]), alone).all()]


def evaluator(cluster: Cluster, gpus: Sequence[int], phases: Sequence[Phase]) -> Evaluator:
    """A function from placements to the seconds of a step's phases, each of them alone.

    A phase alone takes its latency and its busiest port, as `Cost.exchange` has it. Placements are
    evaluated in batches: each of their phases is on a copy of the cluster of its own.
    """
    n = len(gpus)
    position = np.zeros(cluster.ranks, dtype=np.int64)
    position[list(gpus)] = np.arange(n)
    most_ports = _most_ports(cluster, n)
    matrices = [np.asarray(phase.sent) for phase in phases]
    ends = [np.nonzero(sent) for sent in matrices]
    nbytes = [sent[end] for sent, end in zip(matrices, ends, strict=True)]
    batch = max(1, MESSAGES_AT_ONCE // max(n * len(phases), sum(map(len, nbytes))))

    @cache
    def copies(count: int) -> Cost:
        placements = np.arange(count)[:, None] * cluster.ranks + np.asarray(gpus)
        return Cost(cluster, tuple(placements.ravel().tolist()))

    def batch_s(placements: np.ndarray) -> np.ndarray:
        # Each phase of each placement is on a copy: all placements of the first phase come first.
        count, all_copies = len(placements), len(placements) * len(phases)
        ranks = position[placements] + np.arange(count)[:, None] * n
        of_phases = [ranks + phase * count * n for phase in range(len(phases))]
        source, target = (
            np.concatenate(
                [its[:, end[way]].ravel() for its, end in zip(of_phases, ends, strict=True)]
            )
            for way in (0, 1)
        )
        sent = np.concatenate([np.tile(each, count) for each in nbytes])

        def maximum(values: np.ndarray, size: int) -> np.ndarray:
            """Of each copy [copies], from values of all copies' ranks or ports."""
            padded = np.zeros(all_copies * size)
            padded[: len(values)] = values
            return np.asarray(padded.reshape(all_copies, size).max(1))

        latency = busiest = np.zeros(all_copies)
        for kind, link, starts, loads in copies(all_copies).ports.loads(
            "exchange", source, target, sent
        ):
            latency = latency + maximum(starts, n) * link.latency
            for load in loads.values():
                busiest = np.maximum(busiest, maximum(load, most_ports[kind]) / link.bandwidth)
        total = np.zeros(count)
        of_phase = (latency + busiest).reshape(len(phases), count)
        for phase, phase_s in zip(phases, of_phase, strict=True):
            total += phase.times * phase_s
        return total

    def seconds(placements: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [batch_s(placements[i : i + batch]) for i in range(0, len(placements), batch)]
        )

    return seconds


def _most_ports(cluster: Cluster, ranks: int) -> dict[str, int]:
    """How many ports of each kind a cluster has; those of a copy begin after so many."""
    fabric = cluster.fabric
    return {
        "gpu": ranks,
        "island": ranks,
        "switch": cluster.servers * max(1, len(cluster.switches)),
        "nic": cluster.servers * max(1, len(cluster.nics)),
        "bridge": cluster.servers,
        "fabric": routes(fabric, cluster.servers).links if fabric else 0,
        "cores": 1 if cluster.one_machine else cluster.servers,
    }


def _merged(phases: Sequence[Phase]) -> list[Phase]:
    """Equal phases become one that happens more often."""
    out: dict[object, Phase] = {}
    for sent, times in phases:
        key = sent if isinstance(sent, Outer) else sent.tobytes()
        out[key] = Phase(sent, times + (out[key].times if key in out else 0.0))
    return list(out.values())


def _even(sent: Pairs) -> bool:
    """Whether everyone sends as much to everyone, so that all placements are alike."""
    if isinstance(sent, Outer):
        return sent.is_even
    n = len(sent)
    # All but the diagonal, whichever order the array has in memory.
    apart = sent.ravel("K")[: n * n - 1].reshape(n - 1, n + 1)[:, 1:]
    return not apart.size or bool((apart == apart[0, 0]).all())


def _groups_stay_alone(
    cluster: Cluster, gpus: Sequence[int], phases: Sequence[Phase], tied: Sequence[int]
) -> bool:
    """Whether ranks talk to their own group only, and each group sits in one island; or under one
    switch, where there are no islands.

    A message then passes the links of its two GPUs and nothing that others use, whichever group's
    GPUs its group sits on. All placements are alike.
    """
    group = np.asarray(tied)
    for sent, _ in phases:
        if isinstance(sent, Outer):
            crosses = sent.within(group) != float(sent.sum())
        else:
            crosses = bool((sent[group[:, None] != group] != 0).any())
        if crosses:
            return False
    at = Places.of(cluster, gpus)
    # without peer access all messages share a server's memory, and on CPUs its cores
    shared = not cluster.peer_access or cluster.device.kind == "cpu"
    place = at.island if cluster.islands or shared else at.switch
    _, first, number = np.unique(group, return_index=True, return_inverse=True)
    return bool((place == place[first[number]]).all())


def _lower_bound_s(cluster: Cluster, phases: Sequence[Phase]) -> float:
    """Seconds that no placement can beat: a rank's messages on all its links at once."""
    cost = Cost(cluster)
    places: tuple[LinkName, ...] = ("island", "intra_node", "inter_node")
    links = [cost.ports.link("exchange", where) for where in places if getattr(cluster, where)]
    latency, bandwidth = min(link.latency for link in links), sum(link.bandwidth for link in links)
    total = 0.0
    for sent, times in phases:
        most_messages = int((np.asarray(sent) > 0).sum(1).max())
        most_bytes = float(max(sent.sum(0).max(), sent.sum(1).max()))
        total += times * (most_messages * latency + most_bytes / bandwidth)
    return total


# -- up to 8 GPUs: every placement


def _keeps_groups(gpus: Sequence[int], placements: np.ndarray, tied: Sequence[int]) -> np.ndarray:
    """Whether each of `placements` [n, ranks] has every group on the GPUs of one group: [n].

    A group then has these GPUs to itself.
    """
    group = np.asarray(tied)
    group_of_gpu = np.zeros(max(gpus) + 1, dtype=np.int64)
    group_of_gpu[list(gpus)] = group
    _, first, number = np.unique(group, return_index=True, return_inverse=True)
    same = group_of_gpu[placements] == group_of_gpu[placements[:, first[number]]]
    return np.asarray(same.all(1))


def all_placements(cluster: Cluster, gpus: Sequence[int]) -> np.ndarray:
    """All placements [placements, ranks], one of each set in which symmetric GPUs only swap places.

    Such placements are alike in which ranks share a server, an island, a switch and a NIC, and in
    how far their servers are apart. Nothing else enters the cost of a phase.
    """
    at, n = Places.of(cluster, gpus), len(gpus)
    related = [numbers[:, None] == numbers for numbers in at[:4]]
    related += [at.uplinked[:, None], at.uplinked[None]]
    if cluster.fabric:
        servers = at.server[:, None], at.server
        related.append(routes(cluster.fabric, cluster.servers).hops(*servers))
    pairs = np.stack(np.broadcast_arrays(*related), -1).reshape(n * n, -1)
    _, kinds = np.unique(pairs, axis=0, return_inverse=True)
    return np.asarray(np.asarray(gpus)[_orders(kinds.astype(np.uint8).tobytes(), n)])


@lru_cache(maxsize=16)
def _orders(kinds: bytes, n: int) -> np.ndarray:
    """`all_placements` as positions among n GPUs; a plan asks for the same ones many times.

    kinds: how every two of the GPUs are related. A symmetry moves GPUs such that they stay related
    as they are: it leaves ranks related as they were. Of such orders the first is taken.
    """
    orders = np.fromiter(chain.from_iterable(permutations(range(n))), np.intp).reshape(-1, n)
    kind = np.frombuffer(kinds, np.uint8).reshape(n, n)
    of_ranks = kind[orders[:, :, None], orders[:, None, :]].reshape(len(orders), -1)
    related = of_ranks.view(f"S{n * n}").ravel().tolist()
    first = dict(zip(reversed(related), reversed(range(len(related))), strict=True))
    return orders[sorted(first.values())]


def _neighbourhoods(cluster: Cluster, gpus: Sequence[int]) -> list[tuple[int, int, int]]:
    """The switch, NIC and island of each GPU; GPUs that have the same ones are symmetric.

    An island of one GPU counts as none, -1.
    """
    at, all_gpus = Places.of(cluster, gpus), Places.of(cluster, range(cluster.ranks))
    island = np.where(np.bincount(all_gpus.island)[at.island] > 1, at.island, -1)
    return list(zip(at.switch.tolist(), at.nic.tolist(), island.tolist(), strict=True))


# -- more GPUs


def heuristic(
    cluster: Cluster,
    gpus: Sequence[int],
    phases: Sequence[Phase],
    seconds: Evaluator,
    tied: Sequence[int],
) -> tuple[int, ...]:
    """The best of several placements that are each improved by swaps.

    They start as given, in the order of a walk, and with ranks next to those they talk to; starts
    that break a group are left out.
    """
    path, group = walk(cluster, gpus), np.asarray(tied)
    sent = sum((times * np.asarray(each) for each, times in phases), np.zeros((len(gpus),) * 2))
    traffic = sent + sent.T
    # The first ranks of those that differ in their traffic.
    first_ranks = sorted(
        {
            np.sort(traffic[rank]).tobytes(): rank
            for rank in reversed(range(min(len(gpus), MOST_STARTS)))
        }.values()
    )
    packed = [_packed(cluster, path, traffic, first, group) for first in first_ranks]
    starts = [
        placement
        for placement in dict.fromkeys((tuple(gpus), tuple(path), *packed))
        if _keeps_groups(gpus, np.array([placement]), tied).all()
    ]
    messages = max(1, sum(int(np.count_nonzero(phase.sent)) for phase in phases))
    trials = MOST_MESSAGES // len(starts) // messages
    ends = np.array([_swapped(cluster, placement, seconds, trials, group) for placement in starts])
    return tuple(ends[int(np.argmin(seconds(ends)))].tolist())


def _packed(
    cluster: Cluster, path: Sequence[int], traffic: np.ndarray, first: int, tied: np.ndarray
) -> tuple[int, ...]:
    """A placement that fills the GPUs of a path one by one, beginning with rank `first`.

    Each GPU gets the rank with the most traffic to the island so far; ties are decided by the
    switch, the server, and all ranks before. A group that has begun is finished first. `traffic` is
    bytes between two ranks, either way [ranks, ranks].
    """
    n, at = len(path), Places.of(cluster, path)
    order: list[int] = []
    free = np.ones(n, dtype=bool)
    # Traffic of every rank with those that are placed: on each island, switch, server; anywhere.
    with_places = [
        {int(number): np.zeros(n) for number in numbers}
        for numbers in (at.island, at.switch, at.server)
    ]
    with_all = np.zeros(n)
    for places in zip(at.island.tolist(), at.switch.tolist(), at.server.tolist(), strict=True):
        sums = [by_place[place] for by_place, place in zip(with_places, places, strict=True)]
        rank = first
        if order:
            ranks = np.flatnonzero(free & (tied == tied[order[-1]]))
            ranks = ranks if ranks.size else np.flatnonzero(free)
            for with_placed in (*sums, with_all):
                values = with_placed[ranks]
                ranks = ranks[values == values.max()]
            rank = int(ranks[0])
        order.append(rank)
        free[rank] = False
        for with_placed in (with_all, *sums):
            with_placed += traffic[rank]
    placement = np.zeros(n, dtype=np.int64)
    placement[order] = path
    return tuple(placement.tolist())


def _swapped(
    cluster: Cluster, start: tuple[int, ...], seconds: Evaluator, trials: int, tied: np.ndarray
) -> np.ndarray:
    """The placement after swaps: rank by rank the best swap with any other, while swaps help.

    A swap with a rank of another group swaps the groups, member by member. It ends when no swap is
    faster, or when `trials` placements have been evaluated.
    """
    placement = np.array(start)
    neighbourhoods = dict(zip(start, _neighbourhoods(cluster, start), strict=True))
    members = np.array([np.flatnonzero(tied == group) for group in tied])
    alone = np.arange(len(placement))[:, None]
    best_s, ranks_without_gain = float(seconds(placement[None])[0]), 0
    for a in cycle(range(len(placement))):
        here = neighbourhoods[int(placement[a])]
        others = np.array(
            [b for b in range(len(placement)) if neighbourhoods[int(placement[b])] != here],
            dtype=np.int64,
        )
        trials -= len(others)
        if ranks_without_gain == len(placement) or trials < 0:
            break
        ranks_without_gain += 1
        if others.size:
            swaps = np.tile(placement, (len(others), 1))
            for moving, same_group in ((alone, True), (members, False)):
                row = np.flatnonzero((tied[others] == tied[a]) == same_group)[:, None]
                here_ranks, there_ranks = moving[a], moving[others[row[:, 0]]]
                swaps[row, here_ranks], swaps[row, there_ranks] = (
                    placement[there_ranks],
                    placement[here_ranks],
                )
            swapped_s = seconds(swaps)
            if swapped_s.min() < best_s * (1 - 1e-12):
                placement, best_s = swaps[int(np.argmin(swapped_s))], float(swapped_s.min())
                ranks_without_gain = 0
    return placement
