"""What tests of several packages share: real graphs where there are some, and a cache of their own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from started import Start, starting

# Machines are busy, so no test is on time; the same examples everywhere. To look for new ones: pytest --hypothesis-profile=explore
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("steady")


@pytest.fixture
def dataset() -> Callable[[str], str]:
    """dataset('squirrel') -> path of the real graph; skips where it is absent.

    Looks in $GNNPLAN_DATASETS, else in shared/datasets beside the repository or one of its parents.
    """

    def find(name: str) -> str:
        own = os.environ.get("GNNPLAN_DATASETS")
        folders = [Path(own)] if own else [parent / "shared" / "datasets" for parent in Path(__file__).resolve().parents[1:]]
        for folder in folders:
            if (folder / f"{name}.npz").is_file():
                return str(folder / f"{name}.npz")
        pytest.skip(f"real graph {name}.npz not found; set GNNPLAN_DATASETS to the folder that holds it")

    return find


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nor do fixtures that several tests share: what `gnnplan measure` has found of this machine is none of their business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts with an empty cache and leaves the user's alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GNNPLAN_CACHE", str(folder))
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(plan, ...) begins a `gnnplan run`; whatever is left of it at the end of the test is killed and fails the test."""
    yield from starting(tmp_path)
