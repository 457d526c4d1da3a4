"""Runs a user's code in another process, as rank 1 of 2, within limits of time and memory.

A `forward` that ends its process, hangs, or allocates without end does so in that process. And a
module that depends on its rank differs there from this process: ranks would train different ones.
"""

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
FORWARD_BYTES = 4e9  # on this graph, beside parameters
MAKING_SECONDS = 600.0  # a file may import large libraries, or load weights
# the environment that torchrun gives the second of two ranks
RANK = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


Rows = Callable[[nn.Module], Sequence[Tensor]]  # returns a module's outputs


@contextmanager
def seconds(most: float, what: str) -> Iterator[None]:
    """Raise Unfit in the block after so many seconds; other threads get no signal, and no limit."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Unfit(
            f"{what} takes more than {most:.0f} s; leave out what waits, asks or loads there"
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(more: float) -> None:
    """Limit the process to so many bytes more than it has now; larger allocations then fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(more)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def must_equal_in_ranks(module: nn.Module, make: Callable[[], nn.Module], rows: Rows) -> None:
    """Raise Unfit if the module of another rank has other outputs, or if its process ends."""
    unfit, failed, found = _as_rank(make, rows)
    if unfit:
        raise Unfit(unfit)
    expected = rows(module)
    if "forked subprocess" in failed:
        return  # it computes on a GPU, which a forked process cannot use
    if failed:
        raise Unfit(f"it fails in the process of rank 1 of 2 ({failed:.150}), and not in this one")
    if any(differing(*both) is not None for both in zip(expected, found, strict=True)):
        raise Unfit(
            "it makes other rows in the process of rank 1 of 2 than here: each rank would train"
            " another module; read nothing that processes differ in, as os.environ['RANK'] and the"
            " time, and draw parameters by torch, which is seeded, or numpy.random.default_rng(0)"
        )


def _as_rank(make: Callable[[], nn.Module], rows: Rows) -> tuple[str, str, list[Tensor]]:
    """Make a module in a forked process; return why it is Unfit, its other error, and its outputs.

    Raises Unfit if the process ends."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if not process:
        _be_rank(make, rows, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
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


def _be_rank(make: Callable[[], nn.Module], rows: Rows, write_end: int) -> NoReturn:
    """Run the forked process of `_as_rank`, and write its answer."""
    unfit, failed, found = "", "", list[Tensor]()
    try:
        os.environ |= RANK
        faulthandler.disable()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        torch.set_num_threads(1)  # a fork has no other threads
        _pretend_two_ranks()
        module = make()
        held = sum(p.numel() * 8 for p in module.parameters() if not is_lazy(p))
        limit_memory(FORWARD_BYTES + 4 * held)
        forward = f"forward on a graph of {VERTICES[0]} vertices"
        with seconds(FORWARD_SECONDS, forward):
            found = [tensor.detach().clone() for tensor in rows(module)]
    except Unfit as error:
        unfit = str(error)
    except BaseException as error:  # its class may exist in this process alone
        failed = f"{type(error).__name__}: {error}"
    data = BytesIO()
    torch.save((unfit, failed, found), data)
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(data.getbuffer())
    os._exit(0)


def _pretend_two_ranks() -> None:
    """Make torch.distributed report rank 1 of 2."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
