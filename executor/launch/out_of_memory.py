"""What to say when memory runs out in a rank, or the processes that it may start.

Of memory: what the plan predicted, beside what is there."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from gnnplan.executor.ranks.machine import process_room
from gnnplan.executor.ranks.memory import allocated, free_memory, resident
from gnnplan.planner.vocabulary.units import show_bytes

# Python's RuntimeError where the kernel gives no thread: too many there are, or a stack has no room
NO_THREAD = "can't start new thread"
FEW = 32  # processes that are left where their limit is what has stopped a rank
# parts of the RuntimeErrors of torch's allocators
OUT_OF_MEMORY = ("can't allocate memory", "std::bad_alloc", "out of memory", NO_THREAD)
REMEDY = (
    "plan again with more ranks, --set device.memory=.. for what each may fill, or a smaller"
    " workload"
)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)


def no_more_processes(error: BaseException) -> str:
    """The limit of processes that an error comes from, and the remedy; "" where it is another."""
    refused = isinstance(error, OSError) and error.errno == errno.EAGAIN  # of fork
    room = process_room() if refused or NO_THREAD in str(error) else None
    if room is None or room.left > FEW:
        return ""
    said = "Processes and their threads have reached their limit"
    return f"{said} ({room.limit}): {room.remedy}"


def killings() -> int:
    """Processes that the kernel has killed for memory since this machine started.

    0 where the kernel does not count them.
    """
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def account(predicted: Mapping[str, float]) -> str:
    """A table of what fills the fullest rank [B] by use, as the plan predicts it."""
    uses = sorted(((size, use) for use, size in predicted.items() if size), reverse=True)
    width = max((len(use) for _, use in uses), default=0)
    lines = [f"  {use:<{width}}  {show_bytes(size):>10}" for size, use in uses]
    total = show_bytes(sum(predicted.values()))
    return "\n".join([f"the plan predicts for its fullest rank {total}:", *lines])


def found(device: torch.device) -> str:
    """What fills this process now, in a line."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        return (
            f"measured: {show_bytes(used)} in this rank's tensors, {show_bytes(free)} of"
            f" {show_bytes(total)} free on {device}"
        )
    data = allocated()
    counted = f"{show_bytes(data)} in this rank's tensors and arrays, " if data is not None else ""
    return (
        f"measured: {counted}{show_bytes(resident())} in its pages, {show_bytes(free_memory())}"
        " free on this machine"
    )
