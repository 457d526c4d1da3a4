"""Runs a user's code in another process, as a rank will.

A process that ends itself shows there, and so does what a module makes of the number of its rank:
ranks would train different modules."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnplan.executor.modules.cut import differing
from gnnplan.executor.modules.record import Unfit

# what torchrun tells the second of two ranks
RANK = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


def must_be_alike(
    there: Callable[[], Sequence[Tensor]], here: Callable[[], Sequence[Tensor]]
) -> None:
    """Raise Unfit if a rank's process makes other tensors, or ends."""
    error, found = _as_rank(there)
    if isinstance(error, Unfit):
        raise error
    expected = here()
    if "forked subprocess" in str(error):
        return  # it computes on a GPU, which only one of the two can
    if error:
        raise Unfit(f"it fails in the process of rank 1 of 2 ({error!r:.150}), and not in this one")
    if any(differing(*both) is not None for both in zip(expected, found, strict=True)):
        raise Unfit(
            "it makes other rows in the process of rank 1 of 2 than here: each rank would train"
            " another module; read nothing that processes differ in, as os.environ['RANK']"
        )


def _as_rank(run: Callable[[], Sequence[Tensor]]) -> tuple[Exception | None, list[Tensor]]:
    """What `run` raises and makes in a process of its own. Raises Unfit if that ends."""
    given, taken = os.pipe()
    process = os.fork()
    if not process:
        _be_rank(run, taken)
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
    error, arrays = pickle.loads(data)
    return error, [torch.from_numpy(array) for array in arrays]


def _be_rank(run: Callable[[], Sequence[Tensor]], taken: int) -> None:
    """Be the process that `_as_rank` waits for."""
    result: tuple[Exception | None, list[Any]]
    try:
        os.environ |= RANK
        faulthandler.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)  # those of the other process are not here
        _meet_nobody()
        result = None, [tensor.numpy() for tensor in run()]
    except Unfit as unfit:
        result = Unfit(str(unfit)), []
    except BaseException as error:  # of a class that this process alone may have
        result = RuntimeError(f"{type(error).__name__}: {error}"), []
    with os.fdopen(taken, "wb") as pipe:
        pipe.write(pickle.dumps(result))
    os._exit(0)


def _meet_nobody() -> None:
    """Have torch.distributed say that this is rank 1 of 2."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
