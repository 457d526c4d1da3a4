"""Memory ran out in a rank: what the plan says fills it, beside what does."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from gnnplan.executor.memory import allocated, free_memory, resident
from gnnplan.planner.units import show_bytes

WORDS = ("can't allocate memory", "std::bad_alloc", "out of memory")  # of torch's allocators, where they raise RuntimeError


def ran_out(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def killings() -> int:
    """Processes that this machine's kernel has killed since it started because memory ran out; 0 where it does not tell."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def account(predicted: Mapping[str, float]) -> str:
    """What fills the fullest rank [B] by use, as the plan has it."""
    uses = sorted(((size, use) for use, size in predicted.items() if size), reverse=True)
    width = max((len(use) for _, use in uses), default=0)
    lines = [f"  {use:<{width}}  {show_bytes(size):>10}" for size, use in uses]
    return "\n".join([f"the plan predicts for its fullest rank {show_bytes(sum(predicted.values()))}:", *lines])


def found(device: torch.device) -> str:
    """What fills this process now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_allocated(device)
        return f"measured: {show_bytes(mine)} in this rank's tensors, {show_bytes(free)} of {show_bytes(total)} free on {device}"
    data = allocated()
    counted = f"{show_bytes(data)} in this rank's tensors and arrays, " if data is not None else ""
    return f"measured: {counted}{show_bytes(resident())} in its pages, {show_bytes(free_memory())} free on this machine"


REMEDY = "plan again with more ranks, --set device.memory=.. for what each may fill, or a smaller workload"
