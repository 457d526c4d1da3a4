"""Fixtures that tests share: ranks and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from gnnplan.planner.graph.graph import feature_arrays
from gnnplan.testing.ranks import ForkServer, Ranks


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    """The process that forks ranks."""
    return ForkServer()


# per package, not per session: Gloo's threads poll 100 times a second, so idle ranks must end
@pytest.fixture(scope="package")
def run_ranks(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[Ranks]:
    """Ranks to train with: run_ranks(world, case) returns the Result of ranks, and
    run_ranks.alone(case) that of one process, which an exact strategy must equal."""
    ranks = Ranks(fork_server, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small graph files with edge cases.

    rough    60 vertices, 6 of them isolated; self-loops, duplicates and edges in one direction
             only; 4 classes
    islands  two components of 30 that METIS separates, so that two ranks have no halo; training
             vertices on one only
    multi    rough with 5 labels per vertex
    sparse   rough with 40 features that are mostly zero, some rows empty and one full
    """
    folder = tmp_path_factory.mktemp("graphs")
    random = np.random.default_rng(7)
    n, width = 60, 12
    x = random.standard_normal((n, width), dtype=np.float32)
    y = random.integers(0, 4, n)
    y[:4] = range(4)
    train, val, test = (random.permutation(n) % 3 == i for i in range(3))
    masks = {"train_mask": train, "val_mask": val & ~train, "test_mask": test & ~val & ~train}
    src, dst = random.integers(0, n - 6, (2, 150))  # the last six stay isolated
    loops = np.arange(0, n, 7)
    src, dst = np.concatenate([src, src[:20], loops]), np.concatenate([dst, dst[:20], loops])
    np.savez(folder / "rough.npz", src=src, dst=dst, x=x, y=y, **masks)
    np.savez(folder / "multi.npz", src=src, dst=dst, x=x, y=random.random((n, 5)) < 0.4, **masks)
    kept = np.random.default_rng(9).random((n, 40)) < 0.05
    thin = np.random.default_rng(8).standard_normal((n, 40)) * kept
    thin[3] = 1.0
    thin[10:15] = 0.0
    csr = feature_arrays(sp.csr_matrix(thin))
    np.savez(folder / "sparse.npz", src=src, dst=dst, y=y, **masks, **csr, x_shape=thin.shape)
    a, b = random.integers(0, 30, (2, 120))
    c, d = random.integers(30, 60, (2, 120))
    ring = np.arange(30)
    src = np.concatenate([a, c, ring, 30 + ring])
    dst = np.concatenate([b, d, (ring + 1) % 30, 30 + (ring + 1) % 30])
    first = np.arange(n) < 30
    masks = {"train_mask": first & train, "val_mask": first & ~train, "test_mask": ~first}
    np.savez(folder / "islands.npz", src=src, dst=dst, x=x, y=y, **masks)
    return {path.stem: str(path) for path in Path(folder).glob("*.npz")}
