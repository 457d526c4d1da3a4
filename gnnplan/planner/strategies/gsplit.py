"""GSplit: one mini-batch for all GPUs of a server, split on the fly. Every vertex has one owner, who alone samples its neighbours,
loads its features and computes its rows; the others are sent them.

    host     |draw 3|ids 3|draw 2|ids 2|draw 1|ids 1|lay|         ids: who owns what the frontier has reached is told so
    copy                                                 |load|    each owner its own rows, once per batch
    comm                                                      |halo 1|         |halo 2|         |halo 3|      as graph parallel, and back
    compute                                                           |forward 1|      |forward 2|      |forward 3|loss|...

    splitter   gsplit: METIS on pre-sampled weights   node: vertex weights only   edge: nothing sampled   random
    group      server: split inside, data parallel across servers (the paper's hybrid)   all: one batch over all ranks

    features   everywhere: in every server's memory   spread: each row in one's; where one group is all ranks, in its owner's
    cache      each GPU the hottest of the rows that it owns (planner/store.py); what it has is not loaded but picked
    structure  everywhere: with every sampler   spread: each adjacency list with its vertex's owner, who alone samples it: nothing more
               is sent (planner/structure.py)

Exact: the gradient of one process on the same batch. A rank's rows of h_l are those that it owns, whoever's seed they are for, so
nothing is sampled, loaded or computed twice. The positions found while sampling (the shuffle index) serve the exchanges of
the forward pass and those of the backward pass.

Bytes per batch: sum_{l=0..L-1} r_l H_l b forward, with r_l the remote rows of layer l's frontier, the same for l >= 1 backward,
8 bytes per id, and 2 (M-1) W b.
Paper: GSplit (arXiv 2303.13775) Sec. 3-5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from gnnplan.planner.errors import SpecError
from gnnplan.planner.grouping import Phase
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches
from gnnplan.planner.schedule import Schedule
from gnnplan.planner.splitting import EPOCHS, SPLITTERS
from gnnplan.planner.store import check_store, feature_store
from gnnplan.planner.strategies import batchwise, batchwise_memory, layerwise
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy
from gnnplan.planner.structure import check_structure, owned

GROUPS = ("server", "all")


@dataclass(frozen=True)
class GSplit(Strategy):
    """splitter: who owns a vertex. presample: epochs of it, for those that ask for it. group: ranks that share a batch, those of a 'server'
    or 'all'. narrow, checkpoint: as in graph parallel. prefetch, cache, hot, features: as in data parallel, of rows that a rank owns.
    structure: with every sampler ('everywhere') or each list with its vertex's owner ('spread')."""

    splitter: str = "gsplit"
    presample: int = EPOCHS
    group: str = "server"
    narrow: bool = False
    prefetch: int = 0
    checkpoint: bool = False
    cache: int = 0
    hot: str = "frequency"
    features: str = "everywhere"
    structure: str = "everywhere"

    family: ClassVar[str] = "gsplit"
    mode: ClassVar[str] = "mini"
    claim: ClassVar[float] = 0.1  # with prefetch the longer of two chains, batch by batch; without: exact

    @property
    def exact(self) -> bool:
        return True

    def approximates_as(self, other: Strategy) -> bool:
        return False

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        if job.ranks > 1:
            several = len(set(job.servers)) > 1
            for group in GROUPS if several and len(set(job.servers)) < job.ranks else ("all",) if several else ("server",):
                for plain in (cls(group=group), cls(group=group, narrow=True)):
                    if plain.narrow and not job.model.narrows:
                        continue
                    yield plain
                    if cache := batchwise.worth_caching(job, plain):
                        yield replace(plain, cache=cache)

    @classmethod
    def absent(cls, job: Job) -> str:
        return "one rank: there is nobody to split a batch with"

    def check(self, job: Job) -> None:
        self.must_have_its_mode(job)
        batchwise.check(job)
        if self.splitter not in SPLITTERS:
            raise SpecError(f"gsplit: splitter is one of {', '.join(SPLITTERS)}, not {self.splitter!r}; use gsplit")
        if self.group not in GROUPS:
            raise SpecError(f"gsplit: group is 'server' (split inside, data parallel across) or 'all', not {self.group!r}")
        if len(set(Counter(self.groups(job)).values())) > 1:
            raise SpecError("gsplit: every server splits its batch over equally many ranks; use group='all', or as many of "
                            "each server")  # fmt: skip
        if self.presample < 1:
            raise SpecError(f"gsplit: presample is a number of epochs, 1 or more, not {self.presample}; use the paper's {EPOCHS}")
        if self.prefetch < 0:
            raise SpecError(f"gsplit: prefetch is a number of batches, 0 or more, not {self.prefetch}; use 0 or 2")
        check_store(self.name, job, self.cache, self.hot, self.features)
        check_structure(self.name, job, self.structure)

    def steps(self, job: Job) -> int:
        return batchwise.steps(job)

    def groups(self, job: Job) -> tuple[int, ...]:
        """The group of each rank, counted as ranks meet them."""
        where = job.servers if self.group == "server" else (0,) * job.ranks
        number = {place: i for i, place in enumerate(dict.fromkeys(where))}
        return tuple(number[place] for place in where)

    def tied(self, job: Job) -> tuple[int, ...]:
        return self.groups(job) if self.group == "server" else ()

    def batches(self, job: Job) -> Batches:
        return job.minibatches(self.groups(job), self.splitter, self.presample)

    def store(self, job: Job) -> batchwise.Features | None:
        return feature_store(job, self.batches(job), self.cache, self.hot, self.features, epochs=self.presample)

    def lists(self, job: Job) -> batchwise.Lists | None:
        return owned(self.batches(job), self.structure)

    def drawn_steps(self, job: Job) -> int:
        return self.batches(job).known

    @property
    def manner(self) -> Manner:
        return Manner(self.narrow, checkpoint=self.checkpoint)

    def thriftier(self) -> Strategy | None:
        return None if self.checkpoint else replace(self, checkpoint=True)

    def preparation(self, job: Job) -> dict[str, float]:
        return {"pre-sampling and splitting": job.seconds_of(self.batches(job)), **batchwise.filling(job, self.store(job))}

    def memory(self, job: Job) -> Memory:
        return batchwise_memory.memory(job, self.batches(job), self.manner, self.prefetch, self.store(job), self.lists(job))

    def predict(self, job: Job) -> Prediction:
        return batchwise.predict(job, self.batches(job), self.manner, self.prefetch, self.store(job), self.lists(job))

    def schedule(self, job: Job, steps: int) -> Schedule:
        return batchwise.schedule(job, self.batches(job), self.manner, steps, self.prefetch, self.store(job), self.lists(job))

    def traffic(self, job: Job) -> list[Phase]:
        return [phase for batch in self.batches(job).first()[:4] for phase in layerwise.traffic(job, batch, self.manner)]
