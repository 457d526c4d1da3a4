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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from gnnplan import __version__
from gnnplan.executor.launch import emulation
from gnnplan.executor.launch.run_request import RunRequest
from gnnplan.executor.ranks.checkpoint import KEPT
from gnnplan.executor.ranks.machine import cores, device_name, free_memory, gpus, process_room
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
    rows = [_gnnplan(asked), _torch(asked), *_training_rows(asked)]
    return rows + [check(asked) for check in CHECKS] + [check(asked.env) for check in MEETING]


def _training_rows(asked: RunRequest) -> list[Row]:
    """Compare what is trained, and where; without the rows that depend on a row that stops."""
    resume, board = asked.options.resume, asked.options.tensorboard
    rows = [_graph(asked)]
    if rows[-1].verdict == "ok":
        planned = f"{asked.strategy}, {show_count(asked.epochs, 'epoch')}"
        rows.append(_unless_refused("training", planned, lambda: str(asked.settled)))
    # ranks of torchrun or srun may have disks of their own; they compare them once they have met
    if not asked.launched and (rows[-1].verdict == "ok" or not resume):
        planned = "a checkpoint to go on from" if resume else "new"
        rows.append(_unless_refused("run folder", planned, lambda: _folder(asked)))
    if board:
        rows.append(_unless_refused("TensorBoard", board, lambda: _installed(board)))
    return rows


def _folder(asked: RunRequest) -> str:
    last = asked.last
    return f"of epoch {last}, in {asked.out}" if last else str(asked.out)


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
    env = launcher_env()
    _refuse([check(env) for check in MEETING])


def _refuse(rows: Sequence[Row]) -> None:
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


# -- the plan's software, data and cluster ---------------------------------------------------------


def _gnnplan(asked: RunRequest) -> Row:
    made_by = str(asked.document["gnnplan"])
    planned, here = f"gnnplan {made_by[:MOST_SHOWN]}", f"gnnplan {__version__}"
    if made_by == __version__:
        return Row("version", planned, here)
    if made_by == BEFORE:
        says = "its old names are read; plan again for this version's predictions"
        return Row("version", planned, here, "differs", says)
    return Row("version", planned, here, "stops", "plan again")


def _torch(asked: RunRequest) -> Row:
    planned, here = str(asked.document.get("torch", "unknown")), torch.__version__
    # 2.9+cpu and 2.9+cu128 are builds of the same code
    is_met = planned == "unknown" or planned.partition("+")[0] == here.partition("+")[0]
    says = f"{OTHER_TIMES}; measure again with gnnplan measure, and plan again"
    return _row("torch", planned, here, is_met, says, "differs")


def _graph(asked: RunRequest) -> Row:
    about = asked.document["graph"]
    planned = f"{about['source']}, hash {about['hash'][:SHOWN]}"
    try:
        return Row("graph", planned, f"hash {asked.problem.stats.hash[:SHOWN]}")
    except OtherData as error:
        return Row("graph", planned, error.here, "stops", "it was made for other data: plan again")
    except GnnplanError as error:
        return Row("graph", planned, "not read", "stops", str(error))


def _device(asked: RunRequest) -> Row:
    device, found = asked.cluster.device, gpus()
    kind = "cuda" if found else "cpu"
    name = "" if device.name in ("unnamed", "CPU") else device.name
    here_name = device_name(torch.device(kind))
    if device.kind == "cuda":
        planned = f"{name or 'CUDA'} GPUs"
    else:
        planned = f"CPU ranks ({name})" if name else "CPU ranks"
    here = f"{here_name} GPUs" if found else f"CPU ranks ({here_name})"
    is_met = kind == device.kind and _model_numbers(name) <= _model_numbers(here_name)
    return _row("device", planned, here, is_met, f"{OTHER_TIMES}; {PLAN_HERE}", "differs")


def _model_numbers(name: str) -> set[str]:
    """Return the words of a device's name that distinguish it from others of its maker.

    >>> sorted(_model_numbers("NVIDIA A100-SXM4-40GB")), _model_numbers("one core of my Xeon")
    (['a100', 'sxm4'], set())
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {word for word in words if re.search(r"\d", word) and not re.fullmatch(r"\d+gb", word)}


def _devices_per_server(asked: RunRequest) -> Row:
    """Compare the GPUs, or cores, per server."""
    each = max(asked.servers.count(server) for server in set(asked.servers))
    if asked.cluster.device.kind == "cuda":
        found = gpus()
        # a launcher may make only its own GPU visible to each rank
        is_met = found >= each or (asked.launched and found == 1)
        says = "ranks share GPUs" if found else "ranks are on the processor"
        says += " and talk over Gloo"
        return _row("GPUs", f"{each} of a server", str(found), is_met, says, "differs")
    needed = asked.cluster.cores or each
    if not (asked.launched or asked.cluster.one_machine):
        needed *= len(set(asked.servers))
    is_met = cores() >= min(needed, asked.ranks_here)
    says = f"ranks take turns, which the plan does not know; plan with --set cores={cores()}"
    return _row("cores", str(needed), str(cores()), is_met, says, "differs")


def _servers(asked: RunRequest) -> Row:
    planned, here = len(set(asked.servers)), asked.servers_here

    def played() -> str:
        emulation.check()
        return str(planned)

    if asked.emulate:
        return _unless_refused("servers", str(planned), played)
    says = "messages between servers do not cross the plan's links; start it with torchrun or srun"
    if not asked.launched:
        says += " there, or emulate the servers here with --emulate RATE"
    return _row("servers", str(planned), str(here), planned == here, says, "differs")


def _ranks(asked: RunRequest) -> Row:
    planned = len(asked.servers)
    here = int(asked.env["WORLD_SIZE"]) if asked.launched else planned
    if here == planned:
        return Row("ranks", str(planned), str(here))
    says = f"start {planned}, or plan again with --ranks {here}"
    return Row("ranks", str(planned), f"{here} started", "stops", says)


# -- resources of this machine ---------------------------------------------------------------------


def _memory(asked: RunRequest) -> Row:
    ranks, free = asked.ranks_here, free_memory()
    each = LEAST_MEMORY
    if asked.cluster.device.kind == "cpu" and not gpus():
        each = max(each, sum(asked.predicted.values()) / SLACK)
    planned = f"{show_count(ranks, 'rank')} with {show_bytes(each)} each at least"
    here = f"{show_bytes(free)} free"
    servers = asked.servers_here if asked.emulate else 1  # emulated by this machine
    graph = asked.host_bytes * servers / SLACK
    if graph:
        planned += f", and {show_bytes(graph)} of graph data"
    if graph > free:
        room = show_bytes(free / servers)
        says = (
            "stop the processes that fill it, or plan again with --set"
            f" host_memory={room.replace(' ', '')}"
        )
    else:
        says = (
            f"enough for {int((free - graph) / each):,}: stop the processes that fill it, plan"
            " again with --ranks or for a smaller workload, or start it with torchrun on several"
            " servers"
        )
    return _row("memory", planned, here, ranks * each + graph <= free, says)


def _disk(asked: RunRequest) -> Row:
    every, workload = asked.options.checkpoint_every, asked.workload
    place = nearest(asked.out)
    free = shutil.disk_usage(place).free
    here = f"{show_bytes(free)} free at {place}"
    if not 0 < every <= asked.epochs:
        return Row("disk", "no checkpoints", here)
    # weights and optimizer state: as many numbers as `state_per_weight`, which counts gradients and
    # optimizer state; a plan does not know the size of a strategy's carried state
    one = asked.predicted.get("parameters", 0.0) * workload.state_per_weight
    # a checkpoint is written while KEPT others exist; a resumed run has written those already
    needed = asked.ranks_here * one * (1 if asked.options.resume else KEPT + 1)
    planned = f"{show_bytes(needed)} of checkpoints at least"
    says = "free the disk, give another --out, or train with --checkpoint-every 0"
    return _row("disk", planned, here, needed <= free, says)


def _shared_memory(asked: RunRequest) -> Row:
    if not SHARED_MEMORY.is_dir():
        return Row("shared memory", "as much as there is", "no /dev/shm")
    free = shutil.disk_usage(SHARED_MEMORY).free
    here = f"{show_bytes(free)} free at {SHARED_MEMORY}"
    prefetch = getattr(asked.strategy, "prefetch", 0)
    spread = getattr(asked.strategy, "structure", "") == "spread"
    if not prefetch or spread:  # the prediction then adds up blocks of batches and adjacency lists
        return Row("shared memory", "none that is known", here)
    # copies that the prediction counts
    copies = 2 + (prefetch if asked.cluster.device.kind == "cpu" else 0)
    degrees = 16 * asked.document["graph"]["vertices"] if asked.cluster.device.kind == "cpu" else 0
    blocks = max(asked.predicted.get("graph", 0.0) - degrees, 0.0) * prefetch / copies
    needed = asked.ranks_here * blocks
    planned = f"{show_bytes(needed)} of batches that wait at least"
    says = "give the container more (docker --shm-size, a larger /dev/shm), or plan with prefetch=0"
    return _row("shared memory", planned, here, needed <= SLACK * free, says)


def _files(asked: RunRequest) -> Row:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    prefetch, ranks = getattr(asked.strategy, "prefetch", 0), len(asked.servers)
    sent = asked.workload.layers * (1 + prefetch)
    needed = (
        FILES + FILES_OF_A_PEER * ranks + FILES_OF_A_LAYER * sent + FILES_OF_A_SAMPLER * prefetch
    )
    is_bounded = most != resource.RLIM_INFINITY
    here = f"{most:,}" if is_bounded else "any number"
    says = f"allow more (ulimit -n {max(needed, 4096)})"
    is_met = not is_bounded or most >= needed
    return _row("open files", f"up to {needed:,} in a rank", here, is_met, says)


def _processes(asked: RunRequest) -> Row:
    samplers = getattr(asked.strategy, "prefetch", 0)
    needed = asked.ranks_here * (THREADS + SAMPLER_THREADS * samplers)
    planned, room = f"at least {needed:,} with their threads", process_room()
    if room is None:
        return Row("processes", planned, "any number")
    here = f"{max(room.left, 0):,} more ({room.limit})"
    return _row("processes", planned, here, room.left >= needed, room.remedy)


# -- connections between ranks ---------------------------------------------------------------------


def _interface(env: Mapping[str, str]) -> Row:
    wanted = [name for name in env.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    planned, here = ", ".join(wanted), ", ".join(present)
    if not wanted:
        return Row("interface", "any", here)
    planned, is_met = f"{planned} (GLOO_SOCKET_IFNAME)", set(wanted) <= set(present)
    says = "set GLOO_SOCKET_IFNAME to one of these, or unset it"
    return _row("interface", planned, here, is_met, says)


def _address(env: Mapping[str, str]) -> Row:
    if "MASTER_ADDR" not in env:
        return Row("address", "loopback", "loopback")
    planned = f"{env['MASTER_ADDR'][:80]!r} (MASTER_ADDR)"
    try:
        socket.getaddrinfo(env["MASTER_ADDR"], None)
    except (OSError, UnicodeError) as error:
        here = f"no host that is known ({getattr(error, 'strerror', None) or error})"
        return Row("address", planned, here, "stops", "use the address of rank 0's server")
    return Row("address", planned, "known")


def _port(env: Mapping[str, str]) -> Row:
    if not (hosts_the_store(env) and "MASTER_PORT" in env):
        return Row("port", "any", "any")
    port = env["MASTER_PORT"]
    planned = f"{port!r:.80} (MASTER_PORT)"
    if not (port.isascii() and port.isdecimal() and len(port) < 9 and int(port) < 1 << 16):
        return Row("port", planned, "no such port", "stops", "use a number below 65536, as 29500")
    with socket.socket() as probe:
        # as the store does: allows the port of a server that has just ended
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            return Row("port", planned, f"taken ({error.strerror})", "stops", "choose another")
    return Row("port", planned, "free")


CHECKS: tuple[Callable[[RunRequest], Row], ...] = (
    _device,
    _devices_per_server,
    _servers,
    _ranks,
    _memory,
    _disk,
    _shared_memory,
    _files,
    _processes,
)
# if these fail, a rank cannot even report to the others
MEETING: tuple[Callable[[Mapping[str, str]], Row], ...] = (_interface, _address, _port)
