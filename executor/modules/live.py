"""A live module in a file, from which every rank has what it trains.

That is the module with its code, or its parameters alone where our layers are taken."""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

from torch import nn

from gnnplan.executor.modules.parameters import Parameters
from gnnplan.executor.modules.record import Unfit, is_the_users
from gnnplan.planner.vocabulary.files import write_atomically

PICKLED = ".pickle"


def keep(kept: nn.Module | Parameters, folder: Path, name: str) -> tuple[Path, str]:
    """Write a file that `loaded` reads; its path and its SHA-256, which its name has too.

    Raises Unfit for what cannot be pickled."""
    import cloudpickle

    code = _code_of(kept) if isinstance(kept, nn.Module) else set()
    for each in code:
        cloudpickle.register_pickle_by_value(each)
    try:
        data = cloudpickle.dumps(kept)
    except Exception as error:
        raise Unfit(
            f"ranks cannot be given it ({type(error).__name__}: {str(error)[:100]}); name the file"
            " that it is in, as 'model.py:MyGNN'"
        ) from error
    finally:
        for each in code:
            cloudpickle.unregister_pickle_by_value(each)
    sha256 = hashlib.sha256(data).hexdigest()
    path = folder.resolve() / f"{name}-{sha256[:12]}{PICKLED}"
    if not path.exists():
        write_atomically(path, data, parents=True)
    return path, sha256


def loaded(data: bytes) -> nn.Module | Parameters:
    """What is in a file of `keep`."""
    import cloudpickle

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that it imports
        kept = cloudpickle.loads(data)
    assert isinstance(kept, (nn.Module, Parameters))
    return kept


def _code_of(module: nn.Module) -> set[ModuleType]:
    """Code of its parts that a rank cannot import: the user's, and what PyG generates for the
    user's classes."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    values = [value for kind in kinds for value in (kind, *vars(kind).values())]
    names = {str(getattr(value, "__module__", "")) for value in values} - {"__main__"}
    code = {sys.modules[name] for name in names if name in sys.modules}
    return {each for each in code if is_the_users(getattr(each, "__file__", None) or "<none>")}
