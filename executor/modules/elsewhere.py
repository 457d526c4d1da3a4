"""Runs a user's code in another process, as a rank will, and limits what it may take.

A forward that ends its process, waits or allocates without end does so there, and what a module
makes of the number of its rank shows: ranks would train different modules."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnplan.executor.modules.bind import VERTICES
from gnnplan.executor.modules.cut import differing
from gnnplan.executor.modules.record import Unfit

FORWARD_SECONDS = 60.0  # on a graph of few vertices
FORWARD_BYTES = 4e9  # on such a graph, beside parameters
MAKING_SECONDS = 600.0  # a file that is executed may import much, or load weights
# what torchrun tells the second of two ranks
RANK = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


Rows = Callable[[nn.Module], Sequence[Tensor]]


@contextmanager
def seconds(most: float, what: str) -> Iterator[None]:
    """Have the block end with Unfit after so many seconds. Threads other than the main one, which
    gets no signal, take as long as they take."""

    def ends(number: int, frame: FrameType | None) -> None:
        raise Unfit(
            f"{what} takes more than {most:.0f} s; leave out what waits, asks or loads there"
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ends)
    signal.setitimer(signal.ITIMER_REAL, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(more: float) -> None:
    """Have allocations fail, from now on, that make the process so many bytes larger than it is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(more)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def must_be_alike(module: nn.Module, make: Callable[[], nn.Module], rows: Rows) -> None:
    """Raise Unfit if `rows` of the module that a rank makes are others, or its process ends."""
    unfit, failed, found = _as_rank(make, rows)
    if unfit:
        raise Unfit(unfit)
    expected = rows(module)
    if "forked subprocess" in failed:
        return  # it computes on a GPU, which only one of the two can
    if failed:
        raise Unfit(f"it fails in the process of rank 1 of 2 ({failed:.150}), and not in this one")
    if any(differing(*both) is not None for both in zip(expected, found, strict=True)):
        raise Unfit(
            "it makes other rows in the process of rank 1 of 2 than here: each rank would train"
            " another module; read nothing that processes differ in, as os.environ['RANK']"
        )


def _as_rank(make: Callable[[], nn.Module], rows: Rows) -> tuple[str, str, list[Tensor]]:
    """Why a process of its own refuses the module, or what it raises, or makes. Raises Unfit if
    that ends."""
    given, taken = os.pipe()
    process = os.fork()
    if not process:
        _be_rank(make, rows, taken)
    os.close(taken)
    with os.fdopen(given, "rb") as pipe:
        data = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if not data:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise Unfit(
            f"its process ends {how} while forward runs on a small graph: it leaves, or compiled"
            " code of it reads what is not there; run it with python to see more"
        )
    found: tuple[str, str, list[Tensor]] = torch.load(BytesIO(data), weights_only=True)
    return found


def _be_rank(make: Callable[[], nn.Module], rows: Rows, taken: int) -> NoReturn:
    """Be the process that `_as_rank` waits for."""
    unfit, failed, found = "", "", list[Tensor]()
    try:
        os.environ |= RANK
        faulthandler.disable()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        torch.set_num_threads(1)  # those of the other process are not here
        _meet_nobody()
        module = make()
        held = sum(p.numel() * 8 for p in module.parameters() if not is_lazy(p))
        limit_memory(FORWARD_BYTES + 4 * held)
        forward = f"forward on a graph of {VERTICES[0]} vertices"
        with seconds(FORWARD_SECONDS, forward):
            found = [tensor.detach().clone() for tensor in rows(module)]
    except Unfit as error:
        unfit = str(error)
    except BaseException as error:  # of a class that this process alone may have
        failed = f"{type(error).__name__}: {error}"
    data = BytesIO()
    torch.save((unfit, failed, found), data)
    with os.fdopen(taken, "wb") as pipe:
        pipe.write(data.getbuffer())
    os._exit(0)


def _meet_nobody() -> None:
    """Have torch.distributed say that this is rank 1 of 2."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
