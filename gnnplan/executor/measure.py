"""Micro-benchmarks of this machine with all ranks active at once: the numbers that a plan uses, each with its provenance.

`measure` starts one process per rank (one thread each, as training does), lets them do the same work in step, and fits
the answers to the cost model (planner/cost.py), so each number is defined by how the cost model uses it.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares

from gnnplan.executor.comm import Exchange
from gnnplan.executor.kernels import Block, aggregate, keep_allocator, linear
from gnnplan.executor.memory import free_memory
from gnnplan.executor.sampler import Sampler
from gnnplan.executor.worker import Rank
from gnnplan.planner.errors import LostRank, SpecError
from gnnplan.planner.graph import Graph, load
from gnnplan.planner.layout import Layout
from gnnplan.planner.minibatch import Batches
from gnnplan.planner.partition import partition
from gnnplan.planner.specs import Cluster, Device, Link, Workload

GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=8&classes=16&seed=0"
WIDTHS = (16, 64, 128, 256, 512)
SHAPES = ((10_000, 256, 256), (10_000, 128, 256), (10_000, 256, 16), (5_000, 64, 64), (2_500, 512, 512))  # rows, H_in, H_out
SEEDS, FANOUTS = 1024, (5, 10, 15)  # of a rank's share of a batch, from the seeds outwards
SIZES = tuple(2**k for k in range(10, 25, 2))  # messages of 1 KiB to 16 MiB [B]
BESIDE = 2**23  # moved, there and back, beside computation, to see what that loses [B]
ROW = 64  # numbers in an exchanged row
OTHER = 2**24  # bytes that pass through a rank's cache between two samples
SECONDS = 0.25  # spent on each number
STUCK = 60  # [s] without an answer from a peer means that it is gone


def measure(ranks: int, progress: Callable[[str], None] | None = None) -> Cluster:
    """One server with `ranks` ranks, as measured now; about 15 s. `progress` is told what is being measured.

    NCCL where every rank has a CUDA device of its own, Gloo over 127.0.0.1 on a machine without CUDA.
    """
    if ranks < 1:
        raise SpecError(f"ranks is {ranks}; measure at least 1")
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < ranks:
        raise SpecError(f"every rank needs a CUDA device (ranks: {ranks}, devices: {torch.cuda.device_count()}); "
                        "use fewer ranks, or CUDA_VISIBLE_DEVICES= to measure the processor")  # fmt: skip
    tell = progress or (lambda what: None)
    tell("preparing a graph")
    memory = torch.cuda.mem_get_info()[0] if cuda else free_memory() / ranks
    with tempfile.TemporaryDirectory() as folder:
        _save_parts(Path(folder))
        found = _run_ranks(ranks, Path(folder), tell)
    return _cluster(ranks, memory, found)


def _save_parts(folder: Path) -> None:
    """The two halves of a community graph as the executor lays them out: own rows in locality order, then the halo."""
    graph = load(GRAPH)
    assert isinstance(graph, Graph)
    layout = Layout(graph, partition(graph, 2), servers=(0, 0), layers=1, first_varying=1)
    for rank in range(2):
        piece, (indptr, indices) = layout.piece(rank, 1), layout.block(rank, 1)
        np.savez(folder / f"part{rank}.npz", indptr=indptr, indices=indices, n_src=piece.local + piece.halo.size)


# -- processes -----------------------------------------------------------------------------------------------------------


def _run_ranks(ranks: int, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """What rank 0 found, all ranks' samples taken together. No process outlives this call."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", "gnnplan.executor.measure", str(rank), str(ranks), str(store.port), str(folder)]
            with open(folder / f"stderr{rank}", "w") as stderr:
                started.append(subprocess.Popen(command, env=env, text=True, stderr=stderr, stdin=subprocess.DEVNULL,
                                                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))  # fmt: skip
        assert started[0].stdout
        for line in started[0].stdout:
            if not line.startswith("{"):  # Gloo talks on standard output
                continue
            message = json.loads(line)
            if "found" in message:
                return message["found"]
            tell(message["doing"])
        started[0].wait()
        time.sleep(0.5)  # whoever failed first has ended by now as well
        lost = next((r for r, p in reversed(list(enumerate(started))) if p.poll()), 0)
        why = (folder / f"stderr{lost}").read_text().strip().splitlines()[-1:]
        raise LostRank(f"rank {lost} of {ranks} failed while measuring: {''.join(why).removeprefix(f'[rank{lost}]: ') or 'no message'}")
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _main(rank: int, ranks: int, port: int, folder: Path) -> None:
    """One rank: measure, and rank 0 prints what all found."""
    torch.set_num_threads(1)
    keep_allocator()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=STUCK))  # fmt: skip
    found = _Bench(rank, ranks, torch.device("cuda", rank) if cuda else torch.device("cpu")).all(folder)
    dist.barrier()
    if rank == 0:
        print(json.dumps({"found": found}), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads sometimes abort an orderly exit


# -- benchmarks ----------------------------------------------------------------------------------------------------------


class _Bench:
    """The benchmarks of one rank; every method is called by all ranks together and returns all ranks' samples."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.me = Rank(rank, ranks, device, dist.get_backend(), exchange_group=dist.new_group())
        self.other = torch.zeros(OTHER // 4, device=device)

    def all(self, folder: Path) -> dict[str, Any]:
        with np.load(folder / f"part{self.rank % 2}.npz") as part:
            block = Block(part["indptr"], part["indices"], int(part["n_src"])).mean().to(self.device)
        found: dict[str, Any] = {"name": self._device_name()}
        with self._doing("matrix products"):
            found["gemm"] = [(2 * 3 * r * a * b, self.gemm(r, a, b)) for r, a, b in SHAPES]
        with self._doing("aggregation"):
            found["gather"] = [(width, 2 * block.edges * width * 4, self.gather(block, width)) for width in WIDTHS]
        with self._doing("element-wise work"):
            found["touched"] = self.touched()
        with self._doing("the price of an operation"):
            found["launch"] = self.launch()
        with self._doing("the sampler"):
            found["draw"], found["lay"] = self.sampler()
        if self.ranks > 1:
            for op in ("exchange", "send", "all_reduce"):
                with self._doing(f"{op} among {self.ranks} ranks"):
                    found[op] = [(size, getattr(self, op)(size)) for size in SIZES]
            with self._doing("computation beside transfers"):
                found["overlap"] = (BESIDE, self.overlap(BESIDE))
        return found

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        if self.rank == 0:
            print(json.dumps({"doing": what}), flush=True)
        yield

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _disturb(self) -> None:
        """What an epoch does between two uses of the same rows: other data pass through the caches, Gloo's threads fall asleep."""
        self.other.add_(1.0)

    def _time(self, work: Callable[[], Any], divide: int = 1) -> list[float]:
        """Every rank's usual duration of `work` / divide [s], all ranks busy with it for SECONDS."""
        work(), work()  # fmt: skip
        dist.barrier()
        samples, end = [], self._clock() + SECONDS
        while self._clock() < end or len(samples) < 3:
            self._disturb()
            begin = self._clock()
            work()
            samples.append((self._clock() - begin) / divide)
        return self._gather(_usual(samples))

    def _gather(self, number: float) -> list[float]:
        numbers: list[Any] = [None] * self.ranks
        dist.all_gather_object(numbers, number)
        return numbers

    def gemm(self, rows: int, h_in: int, h_out: int) -> list[float]:
        """Forward and both gradients of a linear layer: 3 products."""
        x, weight = (torch.randn(shape, device=self.device, requires_grad=True) for shape in ((rows, h_in), (h_out, h_in)))
        grad = torch.randn(rows, h_out, device=self.device)
        return self._time(lambda: torch.autograd.grad(linear(x, weight), (x, weight), grad))

    def gather(self, block: Block, width: int) -> list[float]:
        """Aggregation over a part, forward and backward."""
        x = torch.randn(block.n_src, width, device=self.device, requires_grad=True)
        grad = torch.randn(block.n_dst, width, device=self.device)
        return self._time(lambda: torch.autograd.grad(aggregate(block, x), x, grad))

    def touched(self) -> list[float]:
        """Seconds per byte read or written: relu, add and relu's gradient over tensors too many for the cache, as in an epoch."""
        tensors = [torch.randn(10_000, 256, device=self.device) for _ in range(6)]

        def work() -> None:
            for a, b in zip(tensors[::2], tensors[1::2], strict=True):
                torch.ops.aten.threshold_backward(torch.relu(a), a + b, 0)

        return self._time(work, divide=3 * (2 + 3 + 3) * tensors[0].nbytes)

    def launch(self) -> list[float]:
        """Seconds per operation on tensors so small that only the framework's own time is left, half of them in the backward pass."""
        block = Block(np.arange(9), np.arange(8), 8).mean().to(self.device)
        x, weight = (torch.randn(8, 8, device=self.device, requires_grad=True) for _ in range(2))
        depth = 10

        def work() -> None:
            h = x
            for _ in range(depth):
                h = (linear(aggregate(block, h), weight) + x).relu()
            torch.autograd.grad(h, (x, weight), h.detach())

        return self._time(work, divide=depth * 2 * 4)

    def sampler(self) -> tuple[list[float], list[float]]:
        """Seconds per edge that drawing and laying out take, by the executor's own clock: GraphSAGE's batches in data parallel."""
        graph = load(GRAPH)
        assert isinstance(graph, Graph)
        workload = Workload(mode="mini", layers=len(FANOUTS), fanout=FANOUTS, batch=SEEDS * self.ranks)
        sampler = Sampler(Batches(graph, workload, tuple(range(self.ranks)), None, first_varying=1), self.rank, ["mean"] * len(FANOUTS))
        sampler[0]
        dist.barrier()
        seconds: dict[str, list[float]] = {"draw": [], "lay": []}
        end = self._clock() + 2 * SECONDS
        for step in itertools.count(1):
            self._disturb()
            made = sampler[step]
            edges = sum(part.block.edges for part in made.share.parts)
            for span in made.spans:
                seconds[span.op].append(span.seconds / edges)
            if step >= 3 and self._clock() > end:
                break
        return self._gather(_usual(seconds["draw"])), self._gather(_usual(seconds["lay"]))

    def _time_messages(self, work: Callable[[], Any], share: float = 1.0, alone: bool = False) -> list[float]:
        """Duration [s] of an operation in which ranks wait for each other, times `share`: of each sample the shortest over ranks,
        since the last to come does not wait. Equally many on all ranks; one that is left `alone` does not count."""
        work()
        dist.barrier()
        begin = self._clock()
        self._disturb()
        work()
        slowest = max(self._gather(self._clock() - begin))
        samples = []
        for _ in range(min(60, max(8, int(SECONDS / max(slowest, 1e-5))))):
            self._disturb()
            begin = self._clock()
            work()
            samples.append(float("inf") if alone else (self._clock() - begin) * share)
        series: list[Any] = [None] * self.ranks
        dist.all_gather_object(series, samples)
        return [_usual(np.min(series, axis=0))]

    def exchange(self, size: int) -> list[float]:
        """Every rank sends `size` bytes of scattered rows to every other, as a halo and its gradient's way home do."""
        return self._time_messages(self._there_and_back(size), 0.5)

    def _there_and_back(self, size: int) -> Callable[[], None]:
        rows = max(1, size // (4 * ROW))
        positions = np.random.default_rng(self.rank).permutation(4 * rows)[:rows]
        take = np.full(self.ranks, rows)
        take[self.rank] = 0
        plan = Exchange(self.me, [positions[: take[peer]] for peer in range(self.ranks)], take)
        x = torch.randn(4 * rows, ROW, device=self.device)
        return lambda: plan.add_home(x, plan.backward(plan.forward(plan.pack(x))))

    def overlap(self, size: int) -> list[float]:
        """Seconds that computation loses while `size` bytes in all go to every other rank and back on the comm lane's thread."""
        swap = self._there_and_back(size // (self.ranks - 1))
        x, weight = torch.randn(10_000, 256, device=self.device), torch.randn(256, 256, device=self.device)
        alone, beside = [], []
        for _ in range(12):
            for samples in (alone, beside):
                dist.barrier()
                begin = self._clock()
                moving = self.me.submit("comm", swap) if samples is beside else None
                for _ in range(10):  # longer than the transfer
                    linear(x, weight)
                samples.append(self._clock() - begin)
                if moving:
                    moving.result()
        return self._gather(statistics.median(beside) - statistics.median(alone))

    def _buffers(self, size: int) -> list[torch.Tensor]:
        """One to send, then one to receive from each rank."""
        return [torch.ones(size // 4, device=self.device) for _ in range(self.ranks + 1)]

    def _start(self, pairs: list[tuple[int | None, int | None]], buffers: list[torch.Tensor]) -> list[dist.Work]:
        wants = []
        for to, of in pairs:
            wants += [dist.P2POp(dist.isend, buffers[0], to)] if to is not None else []
            wants += [dist.P2POp(dist.irecv, buffers[1 + of], of)] if of is not None else []
        return dist.batch_isend_irecv(wants)

    def send(self, size: int) -> list[float]:
        """One message, between neighbours 0-1, 2-3, ...: half a ping-pong."""
        peer, buffers = self.rank ^ 1, self._buffers(size)
        turns = [[(peer, None)], [(None, peer)]][:: 1 if self.rank < peer else -1] if peer < self.ranks else []

        def ping_pong() -> None:
            for turn in turns:
                _wait(self._start(turn, buffers))

        return self._time_messages(ping_pong, 0.5, alone=not turns)

    def all_reduce(self, size: int) -> list[float]:
        buffer = torch.zeros(size // 4, device=self.device)
        return self._time_messages(lambda: dist.all_reduce(buffer))


def _usual(samples: list[float]) -> float:
    """The lower quartile: what the work takes when nobody else disturbs it, on machines where somebody often does."""
    return float(np.quantile(samples, 0.25))


def _wait(requests: list[dist.Work]) -> None:
    for request in requests:
        request.wait()


# -- from samples to a cluster -------------------------------------------------------------------------------------------


def fit(sizes: list[float], seconds: list[float], latencies: float = 1.0, wire: float = 1.0) -> tuple[Link, float]:
    """Alpha-beta by least squares of relative errors: seconds = latencies * alpha + wire * size / beta; (link, typical relative error).

    >>> link, error = fit([1e3, 1e6, 1e7], [1.01e-4, 1.1e-3, 1.01e-2])
    >>> f"{link.latency:.1e} {link.bandwidth:.1e} {error:.2f}"
    '1.0e-04 1.0e+09 0.00'
    """
    n, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)

    def predicted(logs: np.ndarray) -> np.ndarray:
        return latencies * np.exp(logs[0]) + wire * n / np.exp(logs[1])

    guess = np.log([t.min() / latencies, wire * n.max() / t.max()])
    logs = least_squares(lambda logs: np.log(predicted(logs) / t), guess, loss="soft_l1", f_scale=0.1).x
    return Link(latency=float(np.exp(logs[0])), bandwidth=float(np.exp(logs[1]))), float(np.median(np.abs(predicted(logs) / t - 1)))


def _cluster(ranks: int, memory: float, found: dict[str, Any]) -> Cluster:
    """The cost model's numbers from all ranks' samples, and where each comes from."""
    typical = statistics.median
    flops, seconds = np.array([(flops, typical(samples)) for flops, samples in found["gemm"]]).T
    gemm = flops.sum() / seconds.sum()  # wide layers decide, as they do in an epoch
    gather = {width: nbytes / typical(samples) for width, nbytes, samples in found["gather"]}
    device = {"name": found["name"], "kind": "cuda" if torch.cuda.is_available() else "cpu", "memory": memory, "gemm": gemm,
              "memory_bandwidth": 1 / typical(found["touched"]), "gather": gather, "launch": typical(found["launch"])}  # fmt: skip
    source = f"measured {datetime.date.today().isoformat()} on {found['name']}, {ranks} rank{'s' * (ranks > 1)} active"
    spread = f"shapes within {min(flops / seconds) / gemm - 1:+.0%} and {max(flops / seconds) / gemm - 1:+.0%}"
    provenance = {"device.memory": f"{source}, what is free", "device.gemm": f"{source}, {len(flops)} shapes together, {spread}",
                  **{f"device.{name}": f"{source}, lower quartile" for name in ("memory_bandwidth", "gather", "launch")},
                  "host_rates": f"{source}, lower quartile", "cores": "counted"}  # fmt: skip
    fitted = {}
    ring = 2 * (ranks - 1)
    for op, latencies, wire in (("exchange", ranks - 1, ranks - 1), ("send", 1, 1), ("all_reduce", ring, ring / ranks)):
        if op in found:
            sizes, took = zip(*((size, typical(samples)) for size, samples in found[op]), strict=True)
            fitted[f"{op}.intra_node"], error = fit(sizes, took, latencies, wire)
            provenance[f"collectives.{op}.intra_node"] = f"{source}, {len(sizes)} sizes fitted, residual {error:.0%}"
    link = max(fitted.values(), key=lambda fit: fit.bandwidth, default=Link(bandwidth=1e9, latency=50e-6))  # the others add software
    told = f"{source}, its fastest operation" if fitted else "assumed: one rank has nobody to measure with"
    provenance |= {"intra_node.bandwidth": told, "intra_node.latency": told}
    if "overlap" in found:
        nbytes, lost = found["overlap"]
        device["overlap_tax"] = min(1.0, max(0.0, typical(lost) / (2 * nbytes / fitted["exchange.intra_node"].bandwidth)))
        provenance["device.overlap_tax"] = f"{source}, {nbytes} bytes there and back beside matrix products"
    # several servers played on this machine talk over the same loopback, so that `--set servers=2` asks a sensible question
    across = {key.replace("intra", "inter"): value for key, value in fitted.items()}
    provenance |= {key.replace("intra", "inter"): f"as inside the server: {told}" for key, told in provenance.items() if "intra" in key}
    return Cluster(name="measured", servers=1, gpus_per_server=ranks, device=Device(**device), intra_node=link, inter_node=link,
                   host_rates={what: 1 / typical(found[what]) for what in ("draw", "lay")}, cores=_cores(),
                   collectives={**fitted, **across}, provenance=provenance)  # fmt: skip


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
