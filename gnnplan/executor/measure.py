"""`gnnplan measure`: this machine's numbers, or those of several servers, with all ranks active at once.

Processes, one per rank, do the same work in step (microbench.py); what they found is fitted to the cost model (planner/cost.py), so that
each number is defined by how the cost model uses it. Messages are fitted at every other size and checked at those between.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import lsq_linear

from gnnplan.executor import lab
from gnnplan.executor.kernels import keep_allocator
from gnnplan.executor.memory import free_memory
from gnnplan.executor.microbench import Bench
from gnnplan.executor.rehearsal import held_to
from gnnplan.executor.worker import as_torchrun_has_it, die_with_parent, wait_in_turn
from gnnplan.planner import scaled
from gnnplan.planner.alphabeta import Shape, beside_cores, beyond, fit, shapes
from gnnplan.planner.cost import Cost
from gnnplan.planner.errors import LostRank, SpecError
from gnnplan.planner.specs import Cluster, Device, Link

SECONDS = 0.2  # spent on each number
STUCK = 60  # [s] without an answer from a peer means that it is gone


def measure(ranks: int, progress: Callable[[str], None] | None = None, servers: int = 1, emulated: float | None = None,
            seconds: float = SECONDS) -> Cluster:  # fmt: skip
    """`ranks` ranks on each of so many servers, as measured now; a minute or two. `progress` is told what is being measured;
    `seconds` are spent on each number.

    Several servers are emulated on this machine, their cards `emulated` [B/s] wide (None: unshaped; lab.py). NCCL where every rank has a
    CUDA device of its own, Gloo on a machine without CUDA.
    """
    if min(ranks, servers) < 1:
        raise SpecError(f"ranks is {ranks} and servers {servers}; measure at least 1")
    if emulated is not None and servers == 1:
        raise SpecError("an emulated card is of what is between servers, and this is one server; give --servers 2 or more")
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < ranks * servers:
        raise SpecError(f"every rank needs a CUDA device (ranks: {ranks * servers}, devices: {torch.cuda.device_count()}); "
                        "use fewer ranks, or CUDA_VISIBLE_DEVICES= to measure the processor")  # fmt: skip
    tell = progress or (lambda what: None)
    memory = torch.cuda.mem_get_info()[0] if cuda else free_memory() / (ranks * servers)
    if servers == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                   "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # fmt: skip
        meeting |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}

        def start(command: list[str], **streams: Any) -> list[subprocess.Popen[str]]:
            return [subprocess.Popen(command, env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                                     stdin=subprocess.DEVNULL, **streams) for rank in range(ranks)]  # fmt: skip

        found = _run_ranks(start, seconds, tell)
    else:
        with lab.lab(servers, emulated) as made:
            places = [rank // ranks for rank in range(ranks * servers)]
            found = _run_ranks(lambda command, **streams: lab.start(made, places, command, **streams), seconds, tell)
    return cluster_of(found, servers, ranks, memory, one_machine=True)


def measure_as_rank(tell: Callable[[str], None], seconds: float = SECONDS) -> Cluster | None:
    """Be one of the ranks that torchrun or srun started on real servers; rank 0 returns what all have found."""
    env = as_torchrun_has_it()
    memory = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory() / int(env.get("LOCAL_WORLD_SIZE", "1"))
    try:
        found = _attempt(seconds, tell, one_machine=False)
        counts = Counter(found["places"])
        if len(set(counts.values())) > 1:
            ranks = ", ".join(f"{count} on server {server}" for server, count in sorted(counts.items()))
            raise SpecError(f"a cluster has equally many ranks on every server, and here are {ranks}; start as many on each")
        cluster = cluster_of(found, len(counts), counts[0], memory, one_machine=False) if dist.get_rank() == 0 else None
        dist.barrier()
    except RuntimeError as error:  # torch's, of peers that are gone
        raise LostRank(f"rank {env['RANK']} failed while measuring: {type(error).__name__}: {error}") from error
    return cluster


# -- processes -----------------------------------------------------------------------------------------------------------


def _run_ranks(start: Callable[..., list[subprocess.Popen[str]]], seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """What rank 0 found, all ranks' samples taken together. No process outlives this call. Raises LostRank."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gnnplan.executor", "measure", folder, str(seconds)]
        started = start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        said: SimpleQueue[str] = SimpleQueue()
        listener = Thread(target=lambda: [said.put(line) for line in started[0].stdout or ()], daemon=True)
        listener.start()
        try:
            while True:
                with suppress(Empty):
                    line = said.get(timeout=0.2)
                    if line.startswith("{"):  # Gloo talks on standard output
                        message = json.loads(line)
                        if "found" in message:
                            return message["found"]
                        tell(message["doing"])
                    continue
                if any(process.poll() for process in started):
                    time.sleep(0.5)  # whoever failed first has ended by now as well
                    raise LostRank(_lost(started, Path(folder)))
        finally:
            for process in started:
                process.kill()
                process.wait()
            listener.join()
            for process in started:
                if process.stdout:
                    process.stdout.close()


def _lost(started: Sequence[subprocess.Popen[str]], folder: Path) -> str:
    """Who failed first while measuring, and why."""
    notes = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    if notes:
        return f"{notes[0].name} of {len(started)} failed while measuring: {notes[0].read_text()}"
    rank, code = next((rank, code) for rank, process in enumerate(started) if (code := process.poll()))
    return f"rank {rank} of {len(started)} failed while measuring: exit code {code}"


def _attempt(seconds: float, tell: Callable[[str], None], one_machine: bool) -> dict[str, Any]:
    """One rank: measure; what all found."""
    torch.set_num_threads(1)
    keep_allocator()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    else:
        wait_in_turn()
    dist.init_process_group("nccl" if cuda else "gloo", "env://", timeout=datetime.timedelta(seconds=STUCK))
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, int(os.environ.get("GROUP_RANK", "0")))
    bench = Bench(dist.get_rank(), places, torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
                  None if cuda else cores(), one_machine, seconds)  # fmt: skip
    return {"places": places, **bench.all(tell)}


def main() -> None:
    folder, seconds, rank = Path(sys.argv[1]), float(sys.argv[2]), int(os.environ["RANK"])
    die_with_parent()

    def tell(what: str) -> None:
        if rank == 0:
            print(json.dumps({"doing": what}), flush=True)

    try:
        found = _attempt(seconds, tell, one_machine=True)
        dist.barrier()
        if rank == 0:
            print(json.dumps({"found": found}), flush=True)
    except Exception as error:
        (folder / f"rank {rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(4)
    os._exit(0)  # Gloo's threads sometimes abort an orderly exit


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- from samples to a cluster -------------------------------------------------------------------------------------------


def cluster_of(found: dict[str, Any], servers: int, each: int, memory: float, one_machine: bool) -> Cluster:
    """The cost model's numbers from all ranks' samples, and where each comes from."""
    active = found["active"]
    source = f"measured {datetime.date.today().isoformat()} on {found['name']}, {active} rank{'s' * (active > 1)} active"
    device, provenance = _device(found, memory, source)
    provenance |= {"device.memory": f"{source}, what is free", "host_rates": f"{source}, median", "cores": "counted",
                   "one_machine": "as started"}  # fmt: skip
    crowding = min(max(1.0, geometric_mean(found.get("crowding", [1.0]))), 10.0)  # as a cluster file may have it
    if "crowding" in found:
        provenance["crowding"] = (f"{source}, and all {servers * each}: {len(found['crowding'])} trainings, "
                                  f"{min(found['crowding']):.2f} to {max(found['crowding']):.2f}")  # fmt: skip
    refill = min(max(0.0, median(found.get("refill", [0.0]))), 1.0)
    if "refill" in found:
        provenance["refill"] = (f"{source}, and all {servers * each}, which wait for each other before each step: "
                                f"{len(found['refill'])} rounds, {1e3 * min(found['refill']):.2f} to {1e3 * max(found['refill']):.2f} ms")
    measured = {where: {op: found[f"{op}.{where}"] for op in ("exchange", "send", "all_reduce") if f"{op}.{where}" in found}
                for where in ("intra_node", "inter_node")}  # fmt: skip
    collectives, links = {}, {}
    within: dict[str, tuple[Link, Shape]] = {}  # exchanges inside servers, which those among all have in them
    for where, operations in measured.items():
        inside = where == "intra_node"
        for op, shape in (shapes(each) if inside else shapes(servers, each)).items():
            if op in operations:
                samples = operations[op] if inside or op not in within else beyond(operations[op], *within[op], servers)
                link, errors = fit(samples, shape)
                if inside and op == "exchange":
                    within[op] = link, shape
                if device["kind"] == "cpu":  # ranks on GPUs share no cores: all of it is latency
                    at_once, machines = (servers, 1) if one_machine and inside else (1, 1 if one_machine or inside else servers)
                    link = beside_cores(link, shape, at_once, machines * cores())
                collectives[f"{op}.{where}"] = link
                told = f"{len(operations[op])} sizes to {operations[op][-1][0]:,} B, each second one fitted; the others"
                provenance[f"collectives.{op}.{where}"] = f"{source}, {told} {median(errors):.0%} off, at most {max(errors):.0%}"
        fitted = [collectives[f"{op}.{where}"] for op in operations]
        if fitted:  # the fastest, as it carries large messages; the others add software
            sustained = {link.bandwidth * link.efficiency.get(max(link.efficiency, default=0.0), 1.0): link for link in fitted}
            software = {"efficiency": {}, "work": 0.0, "wake": 0.0}
            links[where] = sustained[max(sustained)].model_copy(update={"bandwidth": max(sustained), **software})
            provenance |= {f"{where}.{name}": f"{source}, its fastest operation" for name in ("bandwidth", "latency")}
    if "overlap" in found:
        nbytes, lost = found["overlap"]
        device["overlap_tax"] = min(1.0, max(0.0, median(lost) / (2 * nbytes / collectives["exchange.intra_node"].bandwidth)))
        provenance["device.overlap_tax"] = f"{source}, {nbytes} bytes there and back beside matrix products"
    intra = links.get("intra_node", Link(bandwidth=1e9, latency=50e-6))
    if "intra_node" not in links:
        told = "assumed: one rank of a server has nobody to measure with"
        provenance |= {"intra_node.bandwidth": told, "intra_node.latency": told}
    if servers == 1:  # several played on this machine talk over the same loopback, so that `--set servers=2` asks a sensible question
        collectives |= {key.replace("intra", "inter"): link for key, link in collectives.items()}
        provenance |= {key.replace("intra", "inter"): f"as inside the server: {told}" for key, told in provenance.items() if "intra" in key}
    cluster = Cluster(name="measured", servers=servers, gpus_per_server=each, device=Device(**device), intra_node=intra,
                      inter_node=links.get("inter_node", intra),
                      host_rates={what: 1 / median(found[what]) for what in ("draw", "lay")}, cores=cores(), crowding=crowding,
                      refill=refill, one_machine=one_machine, collectives=collectives)  # fmt: skip
    cluster, told = held_to(cluster, [median(rounds) for rounds in found["steps"]])
    slower = {f"device.{name}" for name in (*scaled.DEVICE, "memory_rates", "gather", "row_latency")} & provenance.keys()
    provenance |= {name: f"{provenance[name]}; {told}" for name in slower} | {"device.launch": f"{source}; {told}"}
    return cluster.model_copy(update={"provenance": provenance})


def _device(found: dict[str, Any], memory: float, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What computes, by its kernels alone, and where each number comes from."""
    cuda = torch.cuda.is_available()
    touched = {size: 1 / median(samples) for size, samples in found["touched"]}
    aggregation = _aggregation([(width, rows, edges, median(samples)) for width, rows, edges, samples in found["gather"]])
    edges, attended = found["weighed"]
    core = {"memory_rates": touched, "hash_rate": 1 / median(found["hashed"]), "edge_rate": 2 * edges / median(attended)}
    if cuda:  # so little work is the framework's own time there, which is counted already
        core = {}
    device = Device(name=found["name"], kind="cuda" if cuda else "cpu", memory=memory, gemm=1e12, memory_bandwidth=touched[max(touched)],
                    **aggregation, **core)  # fmt: skip
    plain = Cost.of(Cluster(device=device, intra_node=Link(bandwidth=1e9)))
    flops, seconds = [], []  # of a product and its two gradients
    for rows, h_in, h_out, samples in found["gemm"]:
        streamed, tensor = 3 * rows * (h_in + h_out) * 4, rows * max(h_in, h_out) * 4  # as the model counts them
        reading = 0.0 if cuda else streamed / float(plain.memory_rate(tensor))
        flops.append(3 * 2 * rows * h_in * h_out)
        seconds.append(max(median(samples) - reading, median(samples) / 2))
    gemm = sum(flops) / sum(seconds)  # wide layers decide, as they do in an epoch
    off = [n / s / gemm - 1 for n, s in zip(flops, seconds, strict=True)]
    provenance = {"device.gemm": f"{source}, {len(flops)} shapes together, shapes within {min(off):+.0%} and {max(off):+.0%}"}
    provenance |= {f"device.{name}": f"{source}, median" for name in ("memory_bandwidth", *aggregation, *core)}
    return device.model_dump() | {"gemm": gemm}, provenance


def _aggregation(samples: Sequence[tuple[int, int, int, float]]) -> dict[str, Any]:
    """By width and size, what the device needs for an edge, and at all of them for a row that is made, of a width, as of samples (width,
    rows, edges, seconds both ways). Least squares of what is predicted / what it took - 1; an edge takes half of that at least."""
    samples = sorted(samples, key=lambda sample: sample[2] / sample[1])  # the last one of a width and size has the most edges to a row
    numbers = {(width, rows): each for each, (width, rows) in enumerate(sorted({sample[:2] for sample in samples}))}
    took, least = np.zeros((len(samples), len(numbers) + 2)), np.zeros(len(numbers) + 2)
    for place, (width, rows, edges, seconds) in enumerate(samples):
        number, gathered, made = numbers[width, rows], 2 * edges * width * 4, 2 * rows * np.array([1, width * 4])
        took[place, number], took[place, -2:] = gathered / seconds, made / seconds
        least[number] = seconds / gathered / 2
    unit = took.max(axis=0)  # all of one magnitude
    *edge, latency, each_byte = (lsq_linear(took / unit, np.ones(len(samples)), (least * unit, np.inf)).x / unit).tolist()
    gather: dict[int, dict[float, float]] = {}
    for (width, rows), number in numbers.items():
        gather.setdefault(width, {})[rows * width * 4] = 1 / edge[number]
    return {"gather": gather, "row_latency": latency, "row_bandwidth": min(1 / max(each_byte, 1e-30), 1e13)}  # a file takes 1e14
