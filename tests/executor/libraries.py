"""Which library multiplies on the CPU, for tests of what that changes."""

import pytest

from gnnplan.executor.layers.kernels import matmul


def multiply(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """By MKL, which writes products into place, or by oneDNN, which has ReLU inside."""
    if not in_place and not matmul.has_onednn():
        pytest.skip("this torch has no oneDNN product")
    monkeypatch.setattr(matmul, "by_onednn", lambda: not in_place)
