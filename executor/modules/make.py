"""Makes a user's module from a file, a class or a function, and keeps a live module in a file.

The file is executed, so the user names it: in `--model file.py:MyGNN`, or in a plan that they run.
The module also runs in another process, as rank 1 of 2, within limits of time and memory. A
`forward` that ends its process, hangs, or allocates without end does so there. And a module that
depends on its rank differs there from this process: ranks would train different ones."""

from __future__ import annotations

import faulthandler
import hashlib
import inspect
import os
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import BytesIO
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnplan.executor.modules.bind import FORWARD_BYTES, GRAPHS, VERTICES, WIDTHS, field_of
from gnnplan.executor.modules.convert import Parameters
from gnnplan.executor.modules.cut import differing
from gnnplan.executor.modules.record import Unfit, is_the_users, is_written_by_user, words_of
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import read_bytes, suggest, write_atomically

MAX_SOURCE = 1 << 22  # [B] of a file that is executed
PICKLED = ".pickle"
USER = "gnnplan_user_"  # a user's file as a Python module, which has under IMPORTED the names of
IMPORTED = "__imported_by_gnnplan__"  # the user's modules that it imports
FORWARD_SECONDS = 60.0  # on a graph of few vertices
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
def seeded(seed: int) -> Iterator[None]:
    """Let torch and numpy draw from a seed in the block, and go on as before after it."""
    state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            np.random.set_state(state)


def source_of(model: str) -> tuple[Path, str, str]:
    """Return the file and the name of FILE.py:NAME, and the file's SHA-256. Raises SpecError."""
    path, _, name = model.rpartition(":")
    if not path.endswith(".py"):
        raise SpecError(f"model {model}: must read FILE.py:NAME, as model.py:MyGNN")
    file = Path(path).resolve()
    return file, name, _digest(read_bytes(file, MAX_SOURCE))


def imports_of(file: Path) -> tuple[tuple[str, str], ...]:
    """Return the user's files that a file imported when it was executed, and their SHA-256."""
    names = vars(sys.modules[f"{USER}{file.stem}"])[IMPORTED]
    files = {str(sys.modules[name].__file__) for name in names if name in sys.modules}
    return tuple((each, _digest(read_bytes(Path(each), MAX_SOURCE))) for each in sorted(files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def as_planned(file: Path, sha256: str, most: int = MAX_SOURCE) -> bytes:
    """Return the content of a file. Raises SpecError if it has changed since the plan."""
    content = read_bytes(file, most, "plan again")
    if _digest(content) != sha256:
        raise SpecError(
            f"{file} has changed since the plan was made; plan again, or put the file back"
        )
    return content


def in_file(file: Path, name: str) -> object:
    """Execute a file and return the object of a name in it. Raises SpecError."""
    with (
        _blamed(file, f"{file} cannot be executed"),
        seconds(MAKING_SECONDS, "the file"),
        redirect_stdout(sys.stderr),
    ):
        code = _execute(file)
    found = getattr(code, name, None)
    if found is None:
        names = [
            key
            for key, value in vars(code).items()
            if isinstance(value, nn.Module)
            or (isinstance(value, type) and issubclass(value, nn.Module))
        ]
        raise SpecError(f"{file} has no {name}{suggest(name, names)}")
    return found


def make(
    found: object,
    name: str,
    file: Path | None,
    values: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module that `found` is or makes, and the arguments of the call that made it.

    file: the source, for errors. values: fields of a workload, 'features' and 'classes'. given: the
    arguments of an earlier call; None: the values that the parameters' names mean. Raises
    SpecError."""
    where = f"{file}: " if file else ""
    if isinstance(found, nn.Module):
        return found, {}
    if not callable(found):
        raise SpecError(
            f"{where}{name} is a {type(found).__name__}; name a torch.nn.Module, a class of"
            " one, or a function that makes one"
        )
    arguments = _arguments(where, name, found, values) if given is None else dict(given)
    shown = f"{name}({', '.join(map(str, arguments.values()))})"
    with (
        _blamed(file, f"{shown} cannot be made"),
        seconds(MAKING_SECONDS, shown),
        redirect_stdout(sys.stderr),
    ):
        made = found(**arguments)
    if not isinstance(made, nn.Module):
        raise SpecError(
            f"{where}{name} makes a {type(made).__name__}; let it make a torch.nn.Module"
        )
    return made, arguments


def _execute(file: Path) -> ModuleType:
    """Execute a file as a Python module; it can import files beside it, and its package.

    What it and earlier files imported is imported anew: a file may have changed, and files of two
    folders may have one name."""
    code, root, packages = ModuleType(f"{USER}{file.stem}"), file.parent, ""
    for each in [module for name, module in sys.modules.items() if name.startswith(USER)]:
        for name in vars(each).get(IMPORTED, ()):  # code that PyG generates has none
            sys.modules.pop(name, None)
    before = {*sys.modules}
    while (root / "__init__.py").exists():
        root, packages = root.parent, f"{root.name}.{packages}"
    code.__file__, code.__package__ = str(file), packages.rstrip(".")
    vars(code)[IMPORTED] = imported = list[str]()
    sys.modules[code.__name__] = code
    sys.path[:0] = [str(file.parent), str(root)]
    try:
        with warnings.catch_warnings(action="ignore"):  # libraries that it imports may warn
            # without Python's cache, which takes two files of the same second and size for one
            exec(compile(file.read_bytes(), str(file), "exec"), vars(code))
    finally:
        sys.path.remove(str(file.parent))
        sys.path.remove(str(root))
        imported += [
            name
            for name, module in sys.modules.items()
            if name not in before
            and (source := str(getattr(module, "__file__", None))).endswith(".py")
            and is_written_by_user(name, source)
        ]
    return code


@contextmanager
def _blamed(file: Path | None, what: str) -> Iterator[None]:
    """Raise a SpecError with the user's line instead of what their code raises."""
    try:
        yield
    except (KeyboardInterrupt, SpecError):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        remedy = "run it with python to see more"
        if isinstance(error, SystemExit):
            remedy = (
                "the file is imported, not run: what reads arguments, exits or trains belongs under"
                ' if __name__ == "__main__"'
            )
        place = f"{file}{f', line {lines[-1]}' if lines else ''}: " if file else ""
        raise SpecError(f"{place}{what} ({words_of(error)}); {remedy}") from error


def _arguments(
    where: str, name: str, factory: Callable[..., object], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that a class or function needs, by its parameters' names."""
    out: dict[str, Any] = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        own = parameter.name
        if parameter.default is not parameter.empty and own not in WIDTHS:
            continue
        if not (field := field_of(own)):
            remedy = (
                f"take it in forward, as forward(self, {own}, x): each rank has its part of it"
                if own in GRAPHS
                else "give it a default, or the name of what it is: in_channels, hidden_channels,"
                " out_channels, num_layers, heads or dropout"
            )
            raise SpecError(f"{where}{name} requires {own}, which we do not know; {remedy}")
        out[own] = values[field]
    return out


def keep(kept: nn.Module | Parameters, folder: Path, name: str) -> tuple[Path, str]:
    """Write a file that `loaded` reads; return its path and its SHA-256, which is part of the name.

    Raises Unfit for an object that cannot be pickled."""
    import cloudpickle

    code = _code_of(kept) if isinstance(kept, nn.Module) else set()
    for each in code:
        cloudpickle.register_pickle_by_value(each)
    try:
        data = cloudpickle.dumps(kept)
    except Exception as error:
        raise Unfit(
            f"ranks cannot be given it ({words_of(error)}); name the file"
            " that it is in, as 'model.py:MyGNN'"
        ) from error
    finally:
        for each in code:
            cloudpickle.unregister_pickle_by_value(each)
    sha256 = _digest(data)
    path = folder.resolve() / f"{name}-{sha256[:12]}{PICKLED}"
    if not path.exists():
        write_atomically(path, data, parents=True)
    return path, sha256


def loaded(data: bytes) -> nn.Module | Parameters:
    """Return the object in a file of `keep`. Raises SpecError."""
    import cloudpickle

    try:
        with warnings.catch_warnings(action="ignore"):  # libraries that it imports may warn
            kept = cloudpickle.loads(data)
    except Exception as error:
        raise SpecError(
            f"a live module's file cannot be read ({words_of(error)}), as"
            " another version of gnnplan or of a library wrote it; plan again"
        ) from error
    assert isinstance(kept, (nn.Module, Parameters))
    return kept


def _code_of(module: nn.Module) -> set[ModuleType]:
    """Return the Python modules that a rank cannot import: the user's own, and the code that PyG
    generates for the user's classes."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    values = [value for kind in kinds for value in (kind, *vars(kind).values())]
    names = {str(getattr(value, "__module__", "")) for value in values} - {"__main__"}
    code = {sys.modules[name] for name in names if name in sys.modules}
    return {each for each in code if is_the_users(getattr(each, "__file__", None) or "<none>")}


# -- limits, and another process -------------------------------------------------------------------


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
            " time, and draw parameters by torch or numpy, which are seeded, and not by random"
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
