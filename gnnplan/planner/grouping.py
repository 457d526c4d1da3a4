"""Which GPU each rank sits on: heavy traffic takes the fast links. And which GPUs to use where all are too many.

    2 servers x 4 GPUs, 2 stages x 4     seats (0, 1, 2, 3, 4, 5, 6, 7)     never (0, 2, 4, 6, 1, 3, 5, 7)
    stage 0, halo exchanges inside       server 0                           half of every halo crosses servers
    stage 1, a message per member        server 1

A strategy tells its traffic in phases: bytes from rank to rank that are on the way at the same time, and how often in a step. A
seating costs what cost.py says of all phases. Up to 8 GPUs every seating is looked at, but for those that only let symmetric GPUs
change places: the answer is the best there is. Beyond, seatings that fill the tightest places first (islands, switches, servers),
then the better of two swapped ranks for as long as a swap helps.

Ranks whose work follows from sharing a server or an island (GraNNDis preloads as one) are tied: they move together, to where
another such group was, or change places among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import cycle, permutations
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cost import Cost
from gnnplan.planner.places import Places, routes
from gnnplan.planner.specs import Cluster

PROVEN = 8  # GPUs up to which every seating is looked at
EFFORT = 10_000_000  # messages to weigh beyond that: a second or so
BEGINNINGS = 8  # ranks that are tried as the first one
TOGETHER = 100_000  # messages to weigh at once

Seconds = Callable[[np.ndarray], np.ndarray]  # of seatings [seatings, ranks]


class Phase(NamedTuple):
    """Transfers that are on the way at the same time."""

    sent: np.ndarray  # bytes from rank to rank [ranks, ranks]
    times: float  # per step


def walk(cluster: Cluster, gpus: Sequence[int]) -> list[int]:
    """These GPUs in an order that leaves an island, a switch and a server when it has seen all of it."""
    at = Places.of(cluster, gpus)
    entry: dict[int, int] = {}  # island -> its first switch
    for island, switch in zip(at.island.tolist(), at.switch.tolist(), strict=True):
        entry[island] = min(entry.get(island, switch), switch)
    keys = [(server, entry[island], island, switch, gpu)
            for server, island, switch, gpu in zip(*(a.tolist() for a in at[:3]), gpus, strict=True)]  # fmt: skip
    return [key[-1] for key in sorted(keys)]


def fewer(cluster: Cluster) -> list[tuple[int, ...]]:
    """Fewer GPUs that are worth a thought: one server, one leaf, half of every server, one; equally many on every server used."""
    each = cluster.gpus_per_server
    one = walk(cluster, range(each))
    out = [tuple(range(each))] if cluster.servers > 1 else []
    if cluster.fabric and 1 < cluster.fabric.below < cluster.servers:
        out.append(tuple(range(cluster.fabric.below * each)))
    if each % 2 == 0:
        half = sorted(one[: each // 2])
        out.append(tuple(server * each + gpu for server in range(cluster.servers) for gpu in half))
    return list(dict.fromkeys([*out, (0,)] if cluster.ranks > 1 else []))


def seat(cluster: Cluster, gpus: Sequence[int], phases: Sequence[Phase], tied: Sequence[int] = ()) -> tuple[int, ...]:
    """seats[r]: the one of `gpus` that rank r sits on, so that the phases take the fewest seconds; `gpus` in order where nothing is
    faster. `tied` numbers equally large groups of ranks: each stays on the GPUs, in order, of one of them."""
    tied = tuple(tied) or tuple(range(len(gpus)))
    told = _merged([phase for phase in phases if phase.times and not _even(phase.sent)])
    if not told or len(set(_kinds(cluster, gpus))) == 1:
        return tuple(gpus)
    as_given = Cost.of(cluster, tuple(gpus))
    if sum(times * as_given.exchange(sent).alone for sent, times in told) <= _least(cluster, told) * (1 + 1e-9):
        return tuple(gpus)
    seconds = weigher(cluster, gpus, told)
    found = exhaustive(cluster, gpus, seconds, tied) if len(gpus) <= PROVEN else heuristic(cluster, gpus, told, seconds, tied)
    now, then = seconds(np.array([gpus, found]))
    return found if then < now * (1 - 1e-9) else tuple(gpus)


def weigher(cluster: Cluster, gpus: Sequence[int], phases: Sequence[Phase]) -> Seconds:
    """Seconds of all phases of a step, each alone: its latency and its busiest port, as cost.exchange has it.

    Seatings are weighed together, each on a copy of the cluster of its own.
    """
    n = len(gpus)
    place = np.zeros(cluster.ranks, dtype=np.int64)
    place[list(gpus)] = np.arange(n)
    lists = {"switch": cluster.switches, "nic": cluster.nics}
    ports = {"gpu": n, "island": n, "bridge": cluster.servers, "fabric": 0, "cores": 1 if cluster.one_machine else cluster.servers,
             **{port: cluster.servers * max(1, len(gpus)) for port, gpus in lists.items()}}  # fmt: skip
    if cluster.fabric:
        ports["fabric"] = routes(cluster.fabric, cluster.servers).links
    sources, targets = zip(*(np.nonzero(phase.sent) for phase in phases), strict=True)
    nbytes = [phase.sent[source, target] for phase, source, target in zip(phases, sources, targets, strict=True)]
    together = max(1, TOGETHER // max(n, *map(len, nbytes)))

    @cache
    def copies(many: int) -> Cost:
        return Cost.of(cluster, tuple((np.arange(many)[:, None] * cluster.ranks + np.asarray(gpus)).ravel().tolist()))

    def some(seats: np.ndarray) -> np.ndarray:
        many = len(seats)
        at = place[seats] + np.arange(many)[:, None] * n

        def most(values: np.ndarray, size: int) -> np.ndarray:
            padded = np.zeros(many * size)
            padded[: len(values)] = values
            return np.asarray(padded.reshape(many, size).max(1))

        total = np.zeros(many)
        for phase, source, target, sent in zip(phases, sources, targets, nbytes, strict=True):
            latency = busiest = np.zeros(many)
            ends = at[:, source].ravel(), at[:, target].ravel()
            for port, link, starts, loads in copies(many).loads("exchange", *ends, np.tile(sent, many)):
                latency = latency + most(starts, n) * link.latency
                for load in loads.values():
                    busiest = np.maximum(busiest, most(load, ports[port]) / link.bandwidth)
            total += phase.times * (latency + busiest)
        return total

    def seconds(seats: np.ndarray) -> np.ndarray:
        return np.concatenate([some(seats[i : i + together]) for i in range(0, len(seats), together)])

    return seconds


def _merged(phases: Sequence[Phase]) -> list[Phase]:
    """Equal phases once, more often."""
    out: dict[bytes, Phase] = {}
    for sent, times in phases:
        key = sent.tobytes()
        out[key] = Phase(sent, times + (out[key].times if key in out else 0.0))
    return list(out.values())


def _even(sent: np.ndarray) -> bool:
    """As much from everyone to everyone: all seatings are alike."""
    n = len(sent)
    apart = sent.ravel("K")[: n * n - 1].reshape(n - 1, n + 1)[:, 1:]  # all but the diagonal, in whichever order they lie
    return not apart.size or bool((apart == apart[0, 0]).all())


def _least(cluster: Cluster, phases: Sequence[Phase]) -> float:
    """Seconds that no seating can be faster than: all messages on the fastest link, which is where groups that fit it have them."""
    cost, places = Cost.of(cluster), ("island", "intra_node", "inter_node")
    links = [cost.link("exchange", where) for where in places if getattr(cluster, where)]  # type: ignore[arg-type]
    latency, bandwidth = min(link.latency for link in links), max(link.bandwidth for link in links)
    return sum(times * (int((sent > 0).sum(1).max()) * latency + float(max(sent.sum(0).max(), sent.sum(1).max())) / bandwidth)
               for sent, times in phases)  # fmt: skip


# -- up to 8 GPUs: every seating -----------------------------------------------------------------------------------------


def exhaustive(cluster: Cluster, gpus: Sequence[int], seconds: Seconds, tied: Sequence[int]) -> tuple[int, ...]:
    """The best seating; the first of equals."""
    every = seatings(cluster, gpus)
    every = every[_together(gpus, every, tied)]
    return tuple(every[int(np.argmin(seconds(every)))].tolist())


def _together(gpus: Sequence[int], seats: np.ndarray, tied: Sequence[int]) -> np.ndarray:
    """Whether each of these seatings [seatings, ranks] keeps tied ranks, and no others, on the GPUs of one group. bool [seatings]."""
    group = np.asarray(tied)
    place = np.zeros(max(gpus) + 1, dtype=np.int64)
    place[list(gpus)] = group
    _, first, number = np.unique(group, return_index=True, return_inverse=True)
    return np.asarray((place[seats] == place[seats[:, first[number]]]).all(1))


def seatings(cluster: Cluster, gpus: Sequence[int]) -> np.ndarray:
    """Every seating [seatings, ranks], but one of those between which symmetric GPUs only change places: they are alike in which
    ranks share a server, an island, a switch and a card, and how far their servers are apart, and no more enters the cost of a phase."""
    at = Places.of(cluster, gpus)
    far: tuple[tuple[int, ...], ...] = ()
    if cluster.fabric:
        ways = routes(cluster.fabric, cluster.servers)
        point = ways.at[at.server]
        far = tuple(map(tuple, ways.hops[point[:, None], point].tolist()))
    server, island, switch, card, uplinked = (tuple(numbers.tolist()) for numbers in at)
    return np.asarray(np.asarray(gpus)[_orders((server, island, switch, card), uplinked, far)])


@lru_cache(maxsize=16)
def _orders(places: tuple[tuple[int, ...], ...], uplinked: tuple[bool, ...], far: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The same as positions among the GPUs; a plan asks for each many times."""
    every = np.array(list(permutations(range(len(uplinked)))), dtype=np.int64)
    a, b = np.triu_indices(len(uplinked), 1)
    share = [(np.equal.outer(numbers, numbers))[every[:, a], every[:, b]] for numbers in map(np.asarray, places)]
    apart = [np.asarray(far) == hops for hops in sorted(set(sum(far, ())))[1:]]
    share += [same[every[:, a], every[:, b]] for same in apart]
    form = np.packbits(np.concatenate([*share, np.asarray(uplinked)[every]], axis=1), axis=1)
    _, first = np.unique(form, axis=0, return_index=True)
    return every[np.sort(first)]


def _kinds(cluster: Cluster, gpus: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each GPU its neighbours in the topology: GPUs with the same ones are symmetric. An island of one is none."""
    at, every = Places.of(cluster, gpus), Places.of(cluster, range(cluster.ranks))
    island = np.where(np.bincount(every.island)[at.island] > 1, at.island, -1)
    return list(zip(at.switch.tolist(), at.card.tolist(), island.tolist(), strict=True))


# -- beyond --------------------------------------------------------------------------------------------------------------


def heuristic(cluster: Cluster, gpus: Sequence[int], phases: Sequence[Phase], seconds: Seconds, tied: Sequence[int]) -> tuple[int, ...]:
    """By swaps from several beginnings (as given, in the order of a walk, ranks beside those they talk to; those among them that keep
    groups together); the best of their ends."""
    path, group = walk(cluster, gpus), np.asarray(tied)
    sent = sum((phase.times * phase.sent for phase in phases), np.zeros((len(gpus),) * 2))
    both = sent + sent.T
    firsts = sorted({np.sort(both[rank]).tobytes(): rank for rank in reversed(range(min(len(gpus), BEGINNINGS)))}.values())  # no two alike
    begin = list(dict.fromkeys((tuple(gpus), tuple(path), *(_beside(cluster, path, both, first, group) for first in firsts))))
    begin = [seats for seats in begin if _together(gpus, np.array([seats]), tied).all()]
    trials = EFFORT // len(begin) // max(1, sum(int(np.count_nonzero(phase.sent)) for phase in phases))
    ends = np.array([_swapped(cluster, seats, seconds, trials, group) for seats in begin])
    return tuple(ends[int(np.argmin(seconds(ends)))].tolist())


def _beside(cluster: Cluster, path: Sequence[int], both: np.ndarray, first: int, tied: np.ndarray) -> tuple[int, ...]:
    """From rank `first` on, each GPU of the path gets the rank (of the group that has begun, if some are left) with the most traffic
    to the island, else to the switch, the server, all before it. `both`: bytes between two ranks, either way [ranks, ranks]."""
    n, at = len(path), Places.of(cluster, path)
    order: list[int] = []
    free = np.ones(n, dtype=bool)
    near = [{int(number): np.zeros(n) for number in numbers} for numbers in (at.island, at.switch, at.server)]
    anywhere = np.zeros(n)  # traffic of every rank with those that have a GPU; and with those of an island, a switch, a server
    for places in zip(at.island.tolist(), at.switch.tolist(), at.server.tolist(), strict=True):
        talk = [with_them[place] for with_them, place in zip(near, places, strict=True)]
        rank = first
        if order:
            ranks = np.flatnonzero(free & (tied == tied[order[-1]]))
            ranks = ranks if ranks.size else np.flatnonzero(free)
            for with_them in (*talk, anywhere):
                most = with_them[ranks]
                ranks = ranks[most == most.max()]
            rank = int(ranks[0])
        order.append(rank)
        free[rank] = False
        for sums in (anywhere, *talk):
            sums += both[rank]
    seats = np.zeros(n, dtype=np.int64)
    seats[order] = path
    return tuple(seats.tolist())


def _swapped(cluster: Cluster, start: tuple[int, ...], seconds: Seconds, trials: int, tied: np.ndarray) -> np.ndarray:
    """Rank by rank take the best swap with another (of another group: group with group, member by member), until no swap is faster or
    `trials` seatings have been weighed."""
    seats, kinds = np.array(start), dict(zip(start, _kinds(cluster, start), strict=True))
    members = np.array([np.flatnonzero(tied == group) for group in tied])
    best, since = float(seconds(seats[None])[0]), 0
    for a in cycle(range(len(seats))):
        others = np.array([b for b in range(len(seats)) if kinds[int(seats[a])] != kinds[int(seats[b])]], dtype=np.int64)
        trials -= len(others)
        if since == len(seats) or trials < 0:
            break
        since += 1
        if others.size:
            swaps = np.tile(seats, (len(others), 1))
            for moved, near in ((np.arange(len(seats))[:, None], True), (members, False)):
                row = np.flatnonzero((tied[others] == tied[a]) == near)[:, None]
                mine, theirs = moved[a], moved[others[row[:, 0]]]
                swaps[row, mine], swaps[row, theirs] = seats[theirs], seats[mine]
            now = seconds(swaps)
            if now.min() < best * (1 - 1e-12):
                seats, best, since = swaps[int(np.argmin(now))], float(now.min()), 0
    return seats
