"""What each strategy trains, written plainly in one process from its paper's equations.

All are the plain model (plain.py) with other rows or edges: rows that a rank does not have yet are
leaves, and what flows into those leaves is added to the next step's gradient where the paper says
so. An added gradient g of rows h is written as a term <h, g> of the objective.

Rows that cross between parts in few bits per number use nothing of the executor's packing but the
hash, which is part of the specification: 16 bits of a function of (stream, seed, step, layer, way,
vertex, column)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.kernels import GOLDEN, mix
from gnnplan.executor.layers.kernels.hashed_dropout import vertex_keys
from gnnplan.planner.graph.sampling import ROUNDING, Frontier, Pairs, frontier, items_of, pairs_in
from gnnplan.planner.ownership.layout import Expansion, expand
from gnnplan.planner.strategies import BNS, GNNPipe, GraNNDis
from gnnplan.planner.strategies.gnnpipe import chunk_order
from gnnplan.planner.strategies.layerwise.bns import Sample
from gnnplan.planner.strategies.layerwise.exchange import Crossing
from gnnplan.testing.plain import Plain
from gnnplan.testing.ranks import Case

Round = Callable[[Tensor], Tensor]


def uniform(rows: Tensor, seed: int, step: int, layer: int, direction: str) -> Tensor:
    """Of every number of all N rows, in [0, 1)."""
    words = (rows.shape[1] + 3) // 4
    keys = vertex_keys(torch.arange(len(rows)), ROUNDING, seed, step, layer, "fb".index(direction))
    bits = mix(keys[:, None] + torch.arange(1, words + 1) * GOLDEN).view(torch.int16)
    return (bits[:, : rows.shape[1]].double() + 2**15 + 0.5) / 2**16


def coarser(x: np.ndarray, up: bool) -> np.ndarray:
    """The nearest number below (or above) that has 8 digits, as bfloat16 has."""
    power = 2.0 ** np.floor(np.log2(np.where(x == 0, 1.0, np.abs(x))) - 7)
    return (np.ceil if up else np.floor)(x / power) * power


def levels(rows: Tensor, bits: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest number and spacing of the rows [N, H], both [N, 1]; bits: of all or of each [N, 1]."""
    x = rows.detach().numpy()
    lowest = coarser(x.min(1, keepdims=True), up=False)
    gap = (x.max(1, keepdims=True) - lowest) / (2**bits - 1)
    down, up = coarser(gap, up=False), coarser(gap, up=True)
    nearest = np.where(gap - down < up - gap, down, up)
    above = coarser(nearest * (1 + 2.0**-20), up=True)
    above[gap == 0] = 2.0**-126  # a row of equal numbers
    return lowest, above


def rounded(rows: Tensor, bits: int | np.ndarray, u: Tensor) -> Tensor:
    """What arrives of the rows [N, H]."""
    x, (lowest, above) = rows.detach().numpy(), levels(rows, bits)
    return torch.from_numpy(lowest + np.floor((x - lowest) / above + u.numpy()) * above)


class Whole:
    """What a reader gets of rows that cross, and their owner of the reader's gradient: all of it."""

    def over(self, rows: Tensor, step: int, layer: int, direction: str, reader: int) -> Tensor:
        return rows.detach()

    def crossed(self, rows: Tensor, step: int, layer: int, reader: int = 0) -> Tensor:
        """The rows as a reader has them; every reader asks for its own."""

        def over(direction: str) -> Round:
            return lambda x: self.over(x, step, layer, direction, reader)

        return CrossingRows.apply(rows, over("f"), over("b"))  # type: ignore[no-untyped-call]


class Uniform(Whole):
    """So many bits of every number."""

    def __init__(self, bits: int, seed: int) -> None:
        self.bits, self.seed = bits, seed

    def over(self, rows: Tensor, step: int, layer: int, direction: str, reader: int) -> Tensor:
        u = uniform(rows, self.seed, step, layer, direction)
        return rounded(rows, self.chosen(rows, layer, direction, reader), u)

    def chosen(self, rows: Tensor, layer: int, direction: str, reader: int) -> int | np.ndarray:
        return self.bits


class Adapting(Uniform):
    """Bits of every row, by reader, layer and way: 4 in the first exchange; then, anew every ten,
    those that keep the rounding of what crosses between two parts least in as many bytes."""

    def __init__(self, plain: Plain, part: np.ndarray) -> None:
        super().__init__(4, plain.workload.seed)
        operator = plain.operator.numpy() != 0
        parts = range(part.max() + 1)
        # the rows that cross between two parts
        self.cross = {
            to: [
                np.flatnonzero((part == of) & operator[part == to].any(0))
                for of in parts
                if of != to
            ]
            for to in parts
        }
        self.of_rows: dict[tuple[int, int, str], np.ndarray] = {}
        self.exchanges: dict[tuple[int, int, str], int] = {}
        # of the variance of a row that a part reads: squares of what it is multiplied by
        squares = plain.operator.numpy() ** 2
        self.weights = {r: squares[part == r].sum(0).astype(np.float32) for r in parts}

    def chosen(self, rows: Tensor, layer: int, direction: str, reader: int) -> np.ndarray:
        key = reader, layer, direction
        bits = self.of_rows.setdefault(key, np.full((len(rows), 1), 4))
        count = self.exchanges[key] = self.exchanges.get(key, 0) + 1
        if count % 10 == 1:
            ranges = (levels(rows, bits)[1] * (2.0**bits - 1))[:, 0]
            if direction == "f":
                ranges = ranges * self.weights[reader].astype(float) ** 0.5
            self.of_rows[key] = np.full((len(rows), 1), 4)
            for ids in self.cross[reader]:
                self.of_rows[key][ids, 0] = cheapest(ranges[ids])
        return bits


def cheapest(ranges: np.ndarray) -> np.ndarray:
    """Bits [n] with the least sum of (range / (2^bits - 1))^2 among those where the widest have 8,
    twice as many narrowest 2 and the others 4."""
    order, n = np.argsort(-ranges, kind="stable"), len(ranges)
    options = []
    for rise in range(n // 3 + 1):
        bits = np.full(n, 4)
        bits[order[:rise]], bits[order[n - 2 * rise :]] = 8, 2
        options.append(bits)
    exact = [Fraction(value) ** 2 for value in ranges.tolist()]  # floats would lose small ones

    def variance(bits: np.ndarray) -> Fraction:
        return sum(square / (2**b - 1) ** 2 for square, b in zip(exact, bits.tolist(), strict=True))

    return min(options, key=variance)


class CrossingRows(torch.autograd.Function):
    """Rows of all owners to one reader, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forth: Round, back: Round) -> Tensor:
        ctx.back = back
        return forth(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def by_reader(operator: Tensor, part: np.ndarray) -> Tensor:
    """The operator [N, N] as [N, (1 + parts) N]: own rows, those that part 0 reads, part 1, ..."""
    same = torch.from_numpy(part[:, None] == part[None, :])
    readers = [torch.from_numpy(part == reader)[:, None] for reader in range(part.max() + 1)]
    return torch.cat([operator * same, *(operator * ~same * reads for reads in readers)], 1)


class Recursion(Plain):
    """Ordinary training on the full graph."""

    def __init__(self, case: Case) -> None:
        super().__init__(replace(case, servers=1))

    def epoch(self, epoch: int) -> float:
        """Train an epoch -> its loss."""
        self.begin(epoch)
        loss = self.loss(self.forward(epoch)[0])
        self.descend(loss)
        return loss.item()

    def losses(self, epochs: int) -> list[float]:
        return [self.epoch(epoch) for epoch in range(epochs)]

    def answers(self) -> Tensor:
        """Logits of an evaluation, [N, classes]."""
        with torch.no_grad():
            return self.forward(None)[0]


def recursion_of(case: Case, world: int) -> Recursion:
    """What so many ranks train."""
    strategy = case.settled(case.problem(world))
    if strategy.mode == "mini":
        return Batches(case, delay=0 if strategy.exact else 3)
    if strategy.exact:
        return Recursion(case)
    if isinstance(strategy, GNNPipe):
        return Pipeline(case, world)
    if isinstance(strategy, GraNNDis) and (strategy.sampled or strategy.batches > 1):
        return OwnGraphs(case, world)
    return Halo(case, world)


class Halo(Recursion):
    """Rows of other parts are sampled, rounded, or those of the step before (zero at first).  The
    gradient that late rows get goes home one step later. What is received late is smoothed, s_t =
    gamma s_{t-1} + (1 - gamma) v_t, s_0 = 0: rows ('f'), gradients ('g') or both."""

    def __init__(self, case: Case, world: int) -> None:
        super().__init__(case)
        problem = case.problem(world)
        asked, model = case.settled(problem), problem.model
        self.part, self.p = problem.layout().owner, asked.p if isinstance(asked, BNS) else 1.0
        self.codec = Whole()
        if asked.bits == "adaptive":
            self.codec = Adapting(self, self.part)
        elif asked.bits is not None:
            self.codec = Uniform(asked.bits, self.workload.seed)
        layers = [layer for layer in range(1, self.layers + 1) if self.varies(layer)]
        self.narrowed = {layer for layer in layers if asked.narrow and model.narrow_at(layer)}
        self.multiplied: dict[int, Tensor] = {}  # layer -> own rows before they were multiplied
        zeros = {
            layer: torch.zeros(
                len(self.part), model.exchanged_width(layer, asked.narrow), dtype=torch.float64
            )
            for layer in layers
            if asked.exchange_options.policy.lags
        }
        self.home = zeros
        self.sent = {layer: [rows] * world for layer, rows in zeros.items()}
        smoothing = getattr(asked, "smoothing", "")
        self.keep = {way: asked.gamma if way in smoothing else 0.0 for way in "fg"}
        self.errors: dict[str, list[float]] = {f"{w}:l{layer}": [] for w in "fb" for layer in zeros}

    def epoch(self, epoch: int) -> float:
        self.begin(epoch)
        late = {layer: [r.clone().requires_grad_() for r in of] for layer, of in self.sent.items()}
        crossing: dict[int, Tensor] = {}

        def read(layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
            if not self.varies(layer):
                return self.operator, self.prepare(layer, epoch, h)
            own = self.project(layer, epoch, h) if layer in self.narrowed else h
            crossing[layer] = own
            far = late.get(layer) or [
                self.codec.crossed(own, epoch, layer, reader) for reader in self.readers
            ]
            edges = by_reader(self.operator * self.sampled(epoch, layer), self.part)
            if layer in self.narrowed:
                return edges, torch.cat([own, *far])
            return edges, self.prepare(layer, epoch, h, *far)

        loss = self.loss(self.forward(epoch, read)[0])
        returned = ((crossing[layer] * home).sum() for layer, home in self.home.items())
        self.descend(loss + sum(returned))
        for layer, leaves in late.items():
            self.send(epoch, layer, crossing[layer].detach(), [leaf.grad for leaf in leaves])
        return loss.item()

    def send(self, step: int, layer: int, rows: Tensor, gradients: list[Tensor]) -> None:
        """Make what the next step reads; note how far from the truth is what this one read."""
        home = torch.zeros_like(rows)
        wrong = 0.0
        for reader, gradient in enumerate(gradients):
            home = home + self.codec.over(gradient, step, layer, "b", reader)
            read = (self.adjacency[self.part == reader] > 0).any(0).numpy() & (self.part != reader)
            old = self.sent[layer][reader]
            wrong += (old - rows)[read].square().sum().item()
            new = self.codec.over(rows, step, layer, "f", reader)
            self.sent[layer][reader] = self.smoothed("f", old, new)
        self.errors[f"f:l{layer}"].append(wrong)
        self.errors[f"b:l{layer}"].append((self.home[layer] - home).square().sum().item())
        self.home[layer] = self.smoothed("g", self.home[layer], home)

    def smoothed(self, way: str, old: Tensor, new: Tensor) -> Tensor:
        return self.keep[way] * old + (1 - self.keep[way]) * new

    @property
    def readers(self) -> range:
        return range(self.part.max() + 1)

    def sampled(self, step: int, layer: int) -> Tensor | float:
        """By how much each edge counts [N, N]: n / k times where k of n rows are drawn."""
        if self.p == 1:
            return 1.0
        scale = torch.from_numpy((self.part[:, None] == self.part[None, :]).astype(float))
        edges = self.adjacency.numpy() > 0
        for reader in self.readers:
            for owner in set(self.readers) - {reader}:
                ids = np.flatnonzero(edges[self.part == reader].any(0) & (self.part == owner))
                drawn = Sample("vanish", p=self.p).fresh(
                    ids, Crossing(self.workload.seed, step, layer, reader)
                )
                scale[np.ix_(self.part == reader, ids[drawn])] = ids.size / max(drawn.size, 1)
        return scale

    def project(self, layer: int, step: int, h: Tensor) -> Tensor:
        """Rows as a narrow layer exchanges them: multiplied first."""
        self.multiplied[layer] = self.prepare(layer, step, h)
        return self.multiplied[layer] @ self.w[f"layers.{layer}.weight"].T

    def update(
        self, layer: int, gathered: Tensor, own: Tensor, h: Tensor, x0: Tensor | None
    ) -> Tensor:
        if layer not in self.multiplied:
            return super().update(layer, gathered, own, h, x0)
        out = gathered + self.w[f"layers.{layer}.bias"]
        own = self.multiplied.pop(layer)
        if self.model == "sage":
            out = out + own @ self.w[f"layers.{layer}.weight_self"].T
        return out.relu() if layer < self.layers and self.norm == "none" else out


class Pipeline(Recursion):
    """Algorithm 1. A neighbour whose chunk is later in the step's order than the reader's is
    historical: epoch t = 1, 2, .. reads the rows of epoch period * floor((t - 1) / period); epoch 0
    is an evaluation with the initial weights.

    A row of another member of a stage is fresh or historical when one of its own would be, so the
    recursion does not know of groups. With `bits` rows enter a stage rounded, what goes past all
    layers beside them, and so do their gradients on the way back."""

    def __init__(self, case: Case, world: int) -> None:
        super().__init__(case)
        problem = case.problem(world)
        self.asked = case.settled(problem)
        self.chunk = replace(case, servers=1).problem(1).chunk_of(self.asked.chunks)
        _, *later = self.asked.pipeline(problem)
        self.starts = {stage.layers.start for stage in later} if self.asked.bits else set()
        self.codec = Uniform(self.asked.bits, self.workload.seed)
        with torch.no_grad():
            self.past = {0: self.forward(None)[1]}  # epoch -> [h_0 .. h_L]
        layers = [layer for layer in range(1, self.layers + 1) if self.varies(layer)]
        self.home = {layer: torch.zeros_like(self.past[0][layer - 1]) for layer in layers}

    def epoch(self, epoch: int) -> float:
        self.begin(epoch)
        place = np.empty(self.asked.chunks, dtype=int)
        order = chunk_order(self.workload.seed, epoch, self.asked.chunks, self.asked.shuffle)
        place[order] = np.arange(self.asked.chunks)
        # row v reads column u fresh
        fresh = torch.from_numpy(place[self.chunk][None, :] <= place[self.chunk][:, None])
        edges = torch.cat([self.operator * fresh, self.operator * ~fresh], 1)
        past = self.past[self.asked.period * (epoch // self.asked.period)]
        history = {layer: past[layer - 1].clone().requires_grad_() for layer in self.home}

        def read(layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
            if layer not in history:
                return self.operator, self.prepare(layer, epoch, h)
            now, before = self.prepare(layer, epoch, h, history[layer]).split(len(h))
            # else no gradient flows through old rows, nor to the norm that they pass
            before = before if self.asked.historical_gradients else before.detach()
            return edges, torch.cat([now, before])

        logits, rows = self.forward(epoch, read)
        loss = self.loss(logits)
        self.descend(loss + sum((rows[layer - 1] * g).sum() for layer, g in self.home.items()))
        self.past[epoch + 1] = [h.detach() for h in rows]
        if self.asked.historical_gradients:
            self.home = {layer: rows.grad for layer, rows in history.items()}
        return loss.item()

    def enter(
        self, layer: int, step: int | None, h: Tensor, x0: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if step is None or layer not in self.starts:
            return h, x0
        message = self.codec.crossed(h if x0 is None else torch.cat([h, x0], 1), step, layer)
        return (message, None) if x0 is None else message.tensor_split([h.shape[1]], 1)


class OwnGraphs(Recursion):
    """Every step: the mean loss over the batch's targets, each with the rows and edges of the
    server that owns it. An epoch's loss is over all training vertices."""

    def __init__(self, case: Case, world: int) -> None:
        super().__init__(case)
        problem, graph = case.problem(world), self.graph
        strategy = case.settled(problem)
        layout, n = strategy.layout(problem), self.graph.stats.vertices
        self.server_of = np.asarray(layout.servers)[layout.owner]
        self.operators, reads_more = {}, not strategy.sampled
        for server in set(layout.servers):
            allowed = np.ones(n, dtype=bool)
            if strategy.sampled:
                own = self.server_of == server
                expansion = Expansion(strategy.max_hop, strategy.fanout, self.workload.seed)
                allowed = expand(graph, own, expansion, server)
                assert own.sum() <= allowed.sum() < n
                reads_more |= own.sum() < allowed.sum()
            among = torch.from_numpy(np.outer(allowed, allowed) | np.eye(n, dtype=bool))
            self.operators[server] = self.operator * among
            if strategy.degrees == "local":
                self.operators[server] = self.locally(self.adjacency * among)
        # else the sampled hops would be untested; of islands no hop leads to another server
        assert reads_more or "islands" in case.graph
        self.batches, self.turn = strategy.batches, lambda step: strategy.turn(problem, step)
        self.batch_of = np.where(graph.train, 0, -1)
        if self.batches > 1:
            self.batch_of = layout.drawn(graph.train, self.batches, self.workload.seed)

    def locally(self, adjacency: Tensor) -> Tensor:
        if self.model == "sage":
            return adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
        looped = adjacency + torch.eye(len(adjacency), dtype=torch.float64)
        return looped / (looped.sum(1)[:, None] * looped.sum(0)[None, :]).sqrt()

    def on_all(self, step: int | None) -> Tensor:
        """Logits of every vertex, as its server computes them."""
        out = torch.zeros((), dtype=torch.float64)
        for server, operator in self.operators.items():
            self.operator = operator
            own = torch.from_numpy(self.server_of == server)[:, None]
            out = torch.where(own, self.forward(step)[0], out)
        return out

    def answers(self) -> Tensor:
        with torch.no_grad():
            return self.on_all(None)

    def epoch(self, epoch: int) -> float:
        self.begin(epoch)
        y, total = torch.from_numpy(np.array(self.graph.y)), 0.0
        for step in range(epoch * self.batches, (epoch + 1) * self.batches):
            targets = torch.from_numpy(self.batch_of == self.turn(step))
            loss = self.loss_of(self.on_all(step)[targets], y[targets])
            total += loss.item() * int(targets.sum()) / self.graph.stats.train_vertices
            self.descend(loss)
        return total


class Batches(Recursion):
    """Batches and samples follow from seed, epoch, batch, layer and vertex: they are drawn with
    planner/graph/sampling.py, whose distribution tests/planner/test_sampling.py holds.

    P3's pipeline trains on weights that are `delay` updates old: w_{t+1} = w_t - lr grad
    f_t(w_{t-delay}), the first batches on the initial weights."""

    def __init__(self, case: Case, delay: int) -> None:
        super().__init__(case)
        self.past, self.delay, self.step = [self.weights], delay, 0  # w_0, w_1, ..

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.w.values()]

    def put(self, weights: list[Tensor]) -> None:
        for p, value in zip(self.w.values(), weights, strict=True):
            p.data.copy_(value)

    def epoch(self, epoch: int) -> float:
        self.begin(epoch)
        total = 0.0
        for share, mean_loss in self.batches(epoch):
            latest = self.weights
            self.put(self.past[max(0, self.step - self.delay)])
            loss = mean_loss()
            gradients = torch.autograd.grad(loss, list(self.w.values()))
            self.put(latest)
            pairs = zip(self.w.values(), gradients, strict=True)
            self.descend(torch.stack([(p * gradient).sum() for p, gradient in pairs]).sum())
            self.past.append(self.weights)
            total, self.step = total + loss.item() * share, self.step + 1
        return total

    def batches(self, epoch: int) -> Iterator[tuple[float, Callable[[], Tensor]]]:
        """Each batch's share of what is trained on, and its mean loss at the moment's weights."""
        w, graph, links = self.workload, self.graph, self.workload.task == "link"
        whole = graph.stats.edges if links else graph.stats.train_vertices
        labels = torch.from_numpy(np.array(graph.y))
        for number, items in enumerate(items_of(graph, w, epoch)):
            seeds, of = items, lambda rows, ids=items: self.loss_of(rows[ids], labels[ids])
            if links:
                pairs = pairs_in(graph, w, items, epoch, number)
                seeds, of = pairs.ends, partial(link_loss, pairs=pairs)
            found = frontier(graph, seeds, w.fanouts, w.seed, epoch, number)
            yield items.size / whole, lambda found=found, of=of: of(self.on(found))

    def on(self, found: Frontier) -> Tensor:
        """The answers of a forward pass over what was drawn."""

        def read(layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
            return self.drawn(found, layer), self.prepare(layer, self.step, h)

        return self.forward(self.step, read)[0]

    def drawn(self, found: Frontier, layer: int) -> Tensor:
        """[N, N]: rows of h_l read in this batch; a drawn edge stands for degree / drawn edges."""
        n, graph = self.graph.stats.vertices, self.graph
        indptr, places = found.edges[layer - 1]
        taken = torch.zeros(n, n, dtype=torch.float64)
        for i, v in enumerate(found.nodes[layer].tolist()):
            taken[v, graph.indices[places[indptr[i] : indptr[i + 1]]].astype(np.int64)] = 1.0
        if self.model == "sage":
            return taken / taken.sum(1, keepdim=True).clamp(min=1)
        if self.model == "resgcn":
            return taken
        if self.model in ("gat", "gatv2", "gin"):
            return taken + torch.eye(n, dtype=torch.float64)
        ratio = self.adjacency.sum(1) / taken.sum(1).clamp(min=1)
        return self.operator * (taken * ratio[:, None] + torch.eye(n, dtype=torch.float64))


def link_loss(rows: Tensor, pairs: Pairs) -> Tensor:
    """GraphSAGE's Eq. 1 pair by pair, over the number of pairs."""
    total = rows.new_zeros(())
    for head, (tail, *negatives) in zip(pairs.heads, pairs.tails, strict=True):
        total = total - F.logsigmoid(rows[head] @ rows[tail])
        for negative in negatives:
            total = total - F.logsigmoid(-(rows[head] @ rows[negative]))
    return total / pairs.tails.size


def f1(said: np.ndarray, true: np.ndarray) -> float:
    tp, wrong = (said & true).sum(), (said ^ true).sum()
    return 2 * tp / (2 * tp + wrong)


def f1_of_each(said: np.ndarray, true: np.ndarray) -> float:
    found = [f1(a, b) for a, b in zip(said.T, true.T, strict=True) if a.any() or b.any()]
    return sum(found) / len(found)


def auc_of_each(scores: np.ndarray, true: np.ndarray) -> float:
    """Every vertex of a class with every other."""
    found = []
    for of_class, is_of in zip(scores.T, true.T, strict=True):
        if is_of.any() and not is_of.all():
            lead = of_class[is_of][:, None] - of_class[~is_of]
            found.append(((lead > 0) + (lead == 0) / 2).mean())
    return sum(found) / len(found)


def measured(metric: str, answers: Tensor, y: np.ndarray) -> float:
    """The metric by its definition."""
    if metric == "mae":
        return float(np.abs(answers.numpy() - y.reshape(answers.shape)).mean())
    several = y.ndim == 2
    true = y > 0 if several else y[:, None] == np.arange(answers.shape[1])
    if metric == "roc_auc":
        return auc_of_each((answers if several else answers.softmax(1)).numpy(), true)
    highest = np.eye(answers.shape[1], dtype=bool)[answers.argmax(1).numpy()]
    said = (answers > 0).numpy() if several else highest
    of = {"accuracy": lambda a, b: (a & b).any(1).mean(), "f1_micro": f1, "f1_macro": f1_of_each}
    return float(of[metric](said, true))


def must_score(recursion: Recursion, row: dict[str, Any], metric: str) -> None:
    """Of vertices that are held out."""
    answers = recursion.answers()
    for part in ("val", "test"):
        mask = np.array(getattr(recursion.graph, part))
        expected = measured(metric, answers[torch.from_numpy(mask)], recursion.graph.y[mask])
        assert row[f"{part}_{metric}"] == pytest.approx(expected, rel=1e-9)
