"""The choice between our own Triton kernels and torch's kernels on this GPU."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType


@functools.cache
def triton_kernels() -> ModuleType | None:
    """Return triton_kernels.py if Triton works on this GPU; else None, for torch's kernels.

    Triton comes with torch's builds for CUDA; to start kernels it also needs a C compiler.
    """
    try:
        from gnnplan.executor.layers.kernels import triton_kernels as ours

        ours.probe()
    except Exception as reason:  # the compiler's, the driver's, or a missing package's
        warnings.warn(
            f"Triton does not work here ({type(reason).__name__}: {reason}); sums over edges,"
            " attention and dropout take torch's kernels, which are slower and need more memory",
            stacklevel=2,
        )
        return None
    return ours
