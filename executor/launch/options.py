"""How a plan is run: the options of `gnnplan run`, which a run keeps in options.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, read_bytes, write_atomically

MAX_FILE = 1 << 16  # [B]
MOST = 10**9  # epochs, restarts
LONGEST_S = 10**6  # that a rank waits [s]; torch and Gloo count milliseconds in 32 bits
NOT_INHERITED = ("resume", "restarts", "quiet")  # each call of `gnnplan run` says these anew


@dataclass(frozen=True)
class Options:
    """How a plan is run."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    epochs: Annotated[int, Field(ge=1, le=MOST)] | None = None  # None: the workload's
    eval_every: Annotated[int, Field(ge=0, le=MOST)] = 10
    # that a rank waits for its peers
    timeout_s: Annotated[float, Field(ge=1.0, le=LONGEST_S)] = 30.0
    staleness_errors: bool = False
    gradient_errors: bool = False
    checkpoint_every: Annotated[int, Field(ge=0, le=MOST)] = 10  # epochs; 0: never
    resume: bool = False  # go on from the last checkpoint in the run's folder
    restarts: Annotated[int, Field(ge=0, le=MOST)] = 0  # of all ranks, when one is lost
    # folder of TensorBoard's event files; a resumed run may be called from elsewhere
    tensorboard: Annotated[str, AfterValidator(os.path.abspath)] | None = None
    quiet: bool = False  # no lines about epochs

    @classmethod
    def of(cls, out: Path, given: Mapping[str, Any], resume: bool) -> Options:
        """Combine the options of a command line with those of the run that it resumes.

        A value of None in `given` means that the option was not given. A resumed run then keeps
        its own option, a new run takes the default. Raises SpecError.
        """
        path, earlier = out / "options.json", dict[str, Any]()
        if resume and path.exists():
            earlier = asdict(cls.read(path))
            for name in NOT_INHERITED:
                del earlier[name]
        chosen = {name: value for name, value in given.items() if value is not None}
        try:
            return TypeAdapter(cls).validate_json(
                json.dumps({**earlier, **chosen, "resume": resume}, default=_plain), strict=True
            )
        except ValidationError as error:
            first = error.errors()[0]
            option = str(first["loc"][0]).removesuffix("_s").replace("_", "-")
            rule = first["msg"].replace("Input should be", "must be")
            raise SpecError(f"--{option} {str(first['input'])[:MOST_SHOWN]}: {rule}") from error

    @classmethod
    def read(cls, path: Path) -> Options:
        """The options of a run. Raises SpecError."""
        remedy = "remove it, and give its options again"
        content = read_bytes(path, MAX_FILE, remedy)
        try:
            return TypeAdapter(cls).validate_json(content, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(name)[:MOST_SHOWN] for name in first["loc"]) or "the file"
            raise SpecError(f"{path} is damaged ({field}: {first['msg']}); {remedy}") from error

    def write(self, out: Path) -> None:
        """Keep the options in the run's folder."""
        write_atomically(out / "options.json", json.dumps(asdict(self)))


def _plain(value: Any) -> str | int:
    """A path, or another library's whole number, as JSON has them."""
    return os.fspath(value) if isinstance(value, os.PathLike) else index(value)
