"""The preflight check: compares a plan's requirements with this machine, before any process starts.

Each check compares one property and returns a row: equal enough ('ok'), different, so that the run
will differ from the prediction ('differs'), or so wrong that the run must fail ('stops'). All
checks look at this machine only; ranks that torchrun or srun started exchange theirs
(rank_process.py).
"""

from __future__ import annotations

import re
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from gnnplan import __version__
from gnnplan.executor.launch import emulation
from gnnplan.executor.launch.run_request import RunRequest
from gnnplan.executor.ranks.checkpoint import KEPT
from gnnplan.executor.ranks.machine import (
    ProcessRoom,
    cores,
    device_name,
    free_memory,
    gpus,
    process_room,
)
from gnnplan.executor.ranks.rendezvous import hosts_the_store, launcher_env
from gnnplan.planner.decision.plan import BEFORE
from gnnplan.planner.vocabulary.errors import GnnplanError, OtherData, SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, must_be_folder, nearest
from gnnplan.planner.vocabulary.units import show_bytes, show_count

LEAST_MEMORY = 200e6  # memory of a process that has imported torch [B]
# Predictions of memory are off by less than this factor, so what is refused cannot fit.
SLACK = 1.1
# open files of a rank: its own; per connection to a peer; per layer of a batch that a sampler
# sends; per sampler
FILES, FILES_OF_A_PEER, FILES_OF_A_LAYER, FILES_OF_A_SAMPLER = 64, 8, 10, 4
# least number of threads of a rank and of a sampler, including threads of lanes, Gloo and torch; a
# rank of a pipelined P3 has 14
THREADS, SAMPLER_THREADS = 8, 6
SHARED_MEMORY = Path("/dev/shm")
SHOWN = 12  # hexadecimal digits of a graph's hash in messages
OTHER_TIMES = "times will not be those predicted"
PLAN_HERE = "make a plan for this machine with gnnplan plan --cluster local"
Verdict = Literal["ok", "differs", "stops"]


@dataclass(frozen=True)
class Row:
    """One comparison of the plan with this machine."""

    what: str
    planned: str
    here: str
    verdict: Verdict = "ok"
    says: str = ""  # the consequence of a difference; for 'stops' the remedy

    def __str__(self) -> str:
        compared = f"{self.what}: planned {self.planned}, here {self.here}"
        return "; ".join(filter(None, (compared, self.says)))

    @property
    def document(self) -> dict[str, str]:
        return asdict(self)


def look(asked: RunRequest) -> list[Row]:
    """Return all rows of the table."""
    parts = _software(asked), _training(asked), _devices(asked), _resources(asked)
    return [row for part in (*parts, _meeting(asked.env)) for row in part]


def _installed(folder: str) -> str:
    """Return 'installed'. Raises SpecError without TensorBoard, or if `folder` is unusable."""
    if find_spec("tensorboard") is None:
        raise SpecError("TensorBoard is not installed; pip install 'gnnplan[tensorboard]'")
    must_be_folder(Path(folder))
    return "installed"


def must_start(asked: RunRequest) -> list[Row]:
    """Return the rows that differ. Raises SpecError with all rows that stop the run."""
    rows = look(asked)
    _refuse(rows)
    return [row for row in rows if row.verdict == "differs"]


def must_meet() -> None:
    """Check that this process and other ranks can reach each other. Raises SpecError."""
    _refuse(_meeting(launcher_env()))


def _refuse(rows: Iterable[Row]) -> None:
    """Raise SpecError with all rows that stop the run, if there are any."""
    stops = [str(row) for row in rows if row.verdict == "stops"]
    if len(stops) > 1:
        raise SpecError("\n  ".join([f"{len(stops)} things stop this run:", *stops]))
    if stops:
        raise SpecError(stops[0])


def _row(
    what: str, planned: str, here: str, is_met: bool, says: str, verdict: Verdict = "stops"
) -> Row:
    """Return a comparison; `says` and `verdict` apply unless `is_met`."""
    return Row(what, planned, here) if is_met else Row(what, planned, here, verdict, says)


def _unless_refused(what: str, planned: str, here: Callable[[], str]) -> Row:
    """Return a row with `here()`, or with its error, whose remedy follows the first semicolon."""
    try:
        return Row(what, planned, here())
    except GnnplanError as error:
        found, _, remedy = str(error).partition("; ")
        return Row(what, planned, found, "stops", remedy)


# -- the rows --------------------------------------------------------------------------------------


def _software(asked: RunRequest) -> Iterator[Row]:
    made_by, here = str(asked.document["gnnplan"]), __version__
    rows = f"gnnplan {made_by[:MOST_SHOWN]}", f"gnnplan {here}"
    if made_by == BEFORE != here:
        says = "its old names are read; plan again for this version's predictions"
        yield Row("version", *rows, "differs", says)
    else:
        yield _row("version", *rows, made_by == here, "plan again")
    planned, here = str(asked.document.get("torch", "unknown")), torch.__version__
    # 2.9+cpu and 2.9+cu128 are builds of the same code
    is_met = planned == "unknown" or planned.partition("+")[0] == here.partition("+")[0]
    says = f"{OTHER_TIMES}; measure again with gnnplan measure, and plan again"
    yield _row("torch", planned, here, is_met, says, "differs")


def _training(asked: RunRequest) -> Iterator[Row]:
    """Compare what is trained, and where; without the rows that depend on a row that stops."""
    resume, board, about = asked.options.resume, asked.options.tensorboard, asked.document["graph"]

    def folder() -> str:
        last = asked.last
        return f"of epoch {last}, in {asked.out}" if last else str(asked.out)

    planned = f"{about['source']}, hash {about['hash'][:SHOWN]}"
    try:
        row = Row("graph", planned, f"hash {asked.problem.stats.hash[:SHOWN]}")
    except OtherData as error:
        says = "it was made for other data: plan again"
        row = Row("graph", planned, error.here, "stops", says)
    except GnnplanError as error:
        row = Row("graph", planned, "not read", "stops", str(error))
    yield row
    if row.verdict == "ok":
        planned = f"{asked.strategy}, {show_count(asked.epochs, 'epoch')}"
        row = _unless_refused("training", planned, lambda: str(asked.settled))
        yield row
    # ranks of torchrun or srun may have disks of their own; they compare them once they have met
    if not asked.launched and (row.verdict == "ok" or not resume):
        yield _unless_refused(
            "run folder", "a checkpoint to go on from" if resume else "new", folder
        )
    if board:
        yield _unless_refused("TensorBoard", board, lambda: _installed(board))


def _devices(asked: RunRequest) -> Iterator[Row]:
    device, found, servers = asked.cluster.device, gpus(), len(set(asked.servers))
    kind, name = "cuda" if found else "cpu", device.name
    if name in ("unnamed", "CPU"):
        name = ""
    own_name = device_name(torch.device(kind))
    planned = f"{name or 'CUDA'} GPUs" if device.kind == "cuda" else "CPU ranks"
    if name and device.kind != "cuda":
        planned += f" ({name})"
    here = f"{own_name} GPUs" if found else f"CPU ranks ({own_name})"
    is_met = kind == device.kind and _model_numbers(name) <= _model_numbers(own_name)
    yield _row("device", planned, here, is_met, f"{OTHER_TIMES}; {PLAN_HERE}", "differs")

    each = max(Counter(asked.servers).values())
    if device.kind == "cuda":
        # a launcher may make only its own GPU visible to each rank
        is_met = found >= each or (asked.launched and found == 1)
        says = "ranks share GPUs" if found else "ranks are on the processor"
        says += " and talk over Gloo"
        yield _row("GPUs", f"{each} of a server", str(found), is_met, says, "differs")
    else:
        needed = asked.cluster.cores or each
        if not (asked.launched or asked.cluster.one_machine):
            needed *= servers
        is_met = cores() >= min(needed, asked.ranks_here)
        says = f"ranks take turns, which the plan does not know; plan with --set cores={cores()}"
        yield _row("cores", str(needed), str(cores()), is_met, says, "differs")

    def emulated() -> str:
        emulation.check()
        return str(servers)

    if asked.emulate:
        yield _unless_refused("servers", str(servers), emulated)
    else:
        says = "messages between servers do not cross the plan's links; start it with torchrun or"
        says += " srun"
        if not asked.launched:
            says += " there, or emulate the servers here with --emulate RATE"
        is_met = servers == asked.servers_here
        yield _row("servers", str(servers), str(asked.servers_here), is_met, says, "differs")

    ranks = len(asked.servers)
    started = int(asked.env["WORLD_SIZE"]) if asked.launched else ranks
    here, is_met = str(ranks) if started == ranks else f"{started} started", started == ranks
    says = f"start {ranks}, or plan again with --ranks {started}"
    yield _row("ranks", str(ranks), here, is_met, says)


def _model_numbers(name: str) -> set[str]:
    """Return the words of a device's name that distinguish it from others of its maker.

    >>> sorted(_model_numbers("NVIDIA A100-SXM4-40GB")), _model_numbers("one core of my Xeon")
    (['a100', 'sxm4'], set())
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {word for word in words if re.search(r"\d", word) and not re.fullmatch(r"\d+gb", word)}


def _resources(asked: RunRequest) -> Iterator[Row]:
    ranks, is_cpu = asked.ranks_here, asked.cluster.device.kind == "cpu"
    predicted, options = asked.predicted, asked.options
    prefetch = getattr(asked.strategy, "prefetch", 0)

    free, each = free_memory(), LEAST_MEMORY
    if is_cpu and not gpus():
        each = max(each, sum(predicted.values()) / SLACK)
    planned = f"{show_count(ranks, 'rank')} with {show_bytes(each)} each at least"
    servers = asked.servers_here if asked.emulate else 1  # emulated by this machine
    graph = asked.host_bytes * servers / SLACK
    if graph:
        planned += f", and {show_bytes(graph)} of graph data"
    says = (
        f"enough for {int((free - graph) / each):,}: stop the processes that fill it, plan"
        " again with --ranks or for a smaller workload, or start it with torchrun on several"
        " servers"
    )
    if graph > free:
        left = show_bytes(free / servers).replace(" ", "")
        says = f"stop the processes that fill it, or plan again with --set host_memory={left}"
    is_met = ranks * each + graph <= free
    yield _row("memory", planned, f"{show_bytes(free)} free", is_met, says)

    place, planned, needed = nearest(asked.out), "no checkpoints", 0.0
    free = shutil.disk_usage(place).free
    if 0 < options.checkpoint_every <= asked.epochs:
        # weights and optimizer state: as many numbers as `state_per_weight`, which counts gradients
        # and optimizer state; a plan does not know the size of a strategy's carried state
        one = predicted.get("parameters", 0.0) * asked.workload.state_per_weight
        # a checkpoint is written while KEPT others exist; a resumed run has written those already
        needed = ranks * one * (1 if options.resume else KEPT + 1)
        planned = f"{show_bytes(needed)} of checkpoints at least"
    says = "free the disk, give another --out, or train with --checkpoint-every 0"
    yield _row("disk", planned, f"{show_bytes(free)} free at {place}", needed <= free, says)

    if SHARED_MEMORY.is_dir():
        free, planned, needed = shutil.disk_usage(SHARED_MEMORY).free, "none that is known", 0.0
        if prefetch:
            # batches in the prediction: those in training (and the next one), and those that wait
            copies = getattr(asked.strategy, "in_flight", 2) + prefetch * is_cpu
            needed = predicted.get("graph", 0.0) * prefetch / copies * ranks
            planned = f"{show_bytes(needed)} of batches that wait at least"
        here = f"{show_bytes(free)} free at {SHARED_MEMORY}"
        says = "give the container more (docker --shm-size, a larger /dev/shm), or plan with"
        yield _row("shared memory", planned, here, needed <= SLACK * free, f"{says} prefetch=0")
    else:
        yield Row("shared memory", "as much as there is", "no /dev/shm")

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    sent = asked.workload.layers * (1 + prefetch)
    files = FILES + FILES_OF_A_PEER * len(asked.servers)
    files += FILES_OF_A_LAYER * sent + FILES_OF_A_SAMPLER * prefetch
    is_bounded = most != resource.RLIM_INFINITY
    here, says = f"{most:,}" if is_bounded else "any number", f"(ulimit -n {max(files, 4096)})"
    is_met = not is_bounded or most >= files
    yield _row("open files", f"up to {files:,} in a rank", here, is_met, f"allow more {says}")

    threads = ranks * (THREADS + SAMPLER_THREADS * prefetch)
    room = process_room() or ProcessRoom(threads, "", "")
    here = f"{max(room.left, 0):,} more ({room.limit})" if room.limit else "any number"
    planned = f"at least {threads:,} with their threads"
    yield _row("processes", planned, here, room.left >= threads, room.remedy)


def _meeting(env: Mapping[str, str]) -> Iterator[Row]:
    """Compare what ranks need to reach each other; else a rank cannot even report to the others."""
    wanted = [name for name in env.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    planned = f"{', '.join(wanted)} (GLOO_SOCKET_IFNAME)" if wanted else "any"
    says = "set GLOO_SOCKET_IFNAME to one of these, or unset it"
    yield _row("interface", planned, ", ".join(present), set(wanted) <= set(present), says)

    planned = here = "loopback"
    if "MASTER_ADDR" in env:
        planned, here = f"{env['MASTER_ADDR'][:80]!r} (MASTER_ADDR)", "known"
        try:
            socket.getaddrinfo(env["MASTER_ADDR"], None)
        except (OSError, UnicodeError) as error:
            here = f"no host that is known ({getattr(error, 'strerror', None) or error})"
    is_met = here in ("loopback", "known")
    yield _row("address", planned, here, is_met, "use the address of rank 0's server")

    planned = here = "any"
    says = "choose another"
    if hosts_the_store(env) and "MASTER_PORT" in env:
        port = env["MASTER_PORT"]
        planned, here = f"{port!r:.80} (MASTER_PORT)", "free"
        if not (port.isascii() and port.isdecimal() and len(port) < 9 and int(port) < 1 << 16):
            here, says = "no such port", "use a number below 65536, as 29500"
        else:
            with socket.socket() as probe:
                # as the store does: allows the port of a server that has just ended
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", int(port)))
                except OSError as error:
                    here = f"taken ({error.strerror})"
    yield _row("port", planned, here, here in ("any", "free"), says)
