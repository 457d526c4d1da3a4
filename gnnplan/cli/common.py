"""What verbs share: the program, how answers are printed, and options: a verb's own arguments, and
those of what it calls, a function of the API or the fields of a workload.

A signature has names, types and defaults, the docstring's Args the help; `name` in it is the option
--name. Files are read and not imported, which takes a second: --help comes at once."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Container, Iterable
from functools import cached_property, partial
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_args

import typer
from typer.core import TyperCommand
from typer.main import get_command

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify, progress, say

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=(
        "Which parallel strategy to train a graph neural network with on your cluster: plan it,"
        " simulate it, run it, and see how wrong the prediction was.\n\nStart with: gnnplan plan -o"
        " plan.json && gnnplan simulate plan.json && gnnplan run plan.json --out run && gnnplan"
        " validate run\n\nExit codes: 0 done, 1 a check failed, 2 bad input, 3 nothing fits, 4 a"
        " rank was lost."
    ),
)

LACKING = ("features", "labels", "split")  # of a graph's file
PACKAGE = Path(__file__).parents[1]
API, FIELDS = PACKAGE / "api", PACKAGE / "planner" / "gnn" / "fields.py"
# of the API's arguments that become options; a verb has arguments of its own for other types
TYPES = {"int": int, "float": float, "bool": bool, "str": str, "str | Path": Path}
# what typer is told of an argument wherever it stands; flags: names of its option
SHARED: dict[str, dict[str, Any]] = {
    "as_json": {
        "flags": ("--json",),
        "help": "One JSON document on standard output and nothing else there.",
    },
    "depths": {"flags": ("--explain",)},
    "emulate": {"metavar": "RATE"},
    "features": {"metavar": "FILE|WIDTH"},
    "graph": {
        "help": "a .npz, a folder of .npy or of parts (gnnplan partition), a file or folder of DGL,"
        " PyG, OGB, GraphBolt,"
        " GraphSAINT, SciPy, NetworkX (GraphML), MatrixMarket or an edge list (CSV, TSV, Parquet),"
        " synthetic:community?vertices=..&edges=..&features=..&classes=..&seed=.. (or"
        " synthetic:rmat?..), a .yaml of"
        " statistics, or the name of a well-known graph, of which only statistics are here (reddit)"
    },
    "labels": {"metavar": "FILE"},
    "output": {"flags": ("-o", "--output")},
    "plan_file": {"metavar": "PLAN", "help": "A plan.json."},
    "set_": {
        "flags": ("--set",),
        "help": "Override a field of the cluster or workload: servers=16; inter_node is the link"
        " between servers, intra_node the one inside: inter_node.bandwidth=25GB/s.",
    },
    "split": {"metavar": "PATH"},
    "timeout_s": {"flags": ("--timeout",)},
}


class Told(NamedTuple):
    """An argument: its type, default and help."""

    hint: Any
    default: Any
    help: str | None
    by_place: bool = False  # it has no --name


Source = Callable[[], dict[str, Told]]


def helps_of(docstring: str | None) -> dict[str, str]:
    """The help of each argument, from Args."""
    said = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", docstring or "", re.MULTILINE)
    return {name: re.sub(r"\n *", " ", text) for name, text in said}


def of_function(place: str, *only: str, given_only: bool = False) -> Source:
    """The arguments of 'planning.Plan.simulate' that have a default and one of TYPES, or these.

    given_only: one that is not given is None, whatever its default.
    """

    def told() -> dict[str, Told]:
        module, *names = place.split(".")
        found = _declared(API / f"{module}.py", *names)
        own, helps, out = found.args, helps_of(ast.get_docstring(found)), dict[str, Told]()
        arguments = [*own.args[len(own.args) - len(own.defaults) :], *own.kwonlyargs]
        for argument, value in zip(arguments, [*own.defaults, *own.kw_defaults], strict=True):
            name = argument.arg
            kind = TYPES.get(ast.unparse(argument.annotation).removesuffix(" | None"))
            if kind is None or value is None or (only and name not in only):
                continue
            default, text = ast.literal_eval(value), helps[name]
            if given_only:
                text += f"  [default: {default:g}]" if type(default) in (int, float) else ""
                default = None
            out[name] = Told(kind if kind is bool else kind | None, default, text)
        return out

    return told


def of_fields() -> dict[str, Told]:
    """The fields of a workload, each None where it is not given; the help is below the field."""
    out = {}
    for field, below in pairwise(_declared(FIELDS, "Fields").body):
        if hasattr(field, "annotation"):
            value = field.value.args[0] if isinstance(field.value, ast.Call) else field.value
            default, text = ast.literal_eval(value), re.sub(r"\n *", " ", below.value.value)
            kind: Any = TYPES.get(ast.unparse(field.annotation).removesuffix(" | None"), str)
            if default is not None:
                text += f"  [default: {default if kind is str else f'{default:g}'}]"
            out[field.target.id] = Told(kind | None, None, text)
    return out


def _declared(file: Path, *names: str) -> Any:
    """A function or a class of a file, or what is in a class; of overloads the last."""
    found: Any = ast.parse(file.read_text(encoding="utf-8"))
    for name in names:
        found = [one for one in found.body if getattr(one, "name", "") == name][-1]
    return found


def of_model() -> dict[str, Told]:
    """A workload's model, by its place."""
    text, _, _ = (of_fields()["model"].help or "").partition("  [default")
    return {"model": Told(str, Parameter.empty, text, by_place=True)}


class Verb(TyperCommand):
    """A verb, whose options are made when they are asked for, so that `gnnplan --help` is quick."""

    function: ClassVar[Callable[..., None]]
    sources: ClassVar[tuple[Source, ...]]
    details: ClassVar[dict[str, dict[str, Any]]]  # what typer is told of an argument here

    @property
    def parameters(self) -> list[Parameter]:
        """The function's own arguments, then those of the sources that it has not itself."""
        helps = helps_of(inspect.getdoc(self.function))
        found = {
            name: Told(one.annotation, one.default, helps.get(name), one.kind < one.KEYWORD_ONLY)
            for name, one in inspect.signature(self.function, eval_str=True).parameters.items()
            if one.kind is not Parameter.VAR_KEYWORD
        }
        for source in self.sources:
            for name, told in source().items():
                found.setdefault(name, told)
        if "as_json" in found:  # --json stands last
            found["as_json"] = found.pop("as_json")
        return [self._parameter(name, told, found) for name, told in found.items()]

    def _parameter(self, name: str, told: Told, among: Container[str]) -> Parameter:
        """An argument as typer takes it."""
        known = {**SHARED.get(name, {}), **self.details.get(name, {})}
        flags = known.pop("flags", (_flag(name),))
        text = re.sub(
            r"`(\w+)`",
            lambda of: _flag(of[1]) if of[1] in among else of[0],
            told.help or known.get("help", ""),
        )
        kind: Any = typer.Argument if told.by_place else partial(typer.Option, *flags)
        hint: Any = told.hint
        for number in (int, float):
            if number in (hint, *get_args(hint)):
                ends = known.get("min", -math.inf), known.get("max", math.inf)
                known["parser"] = partial(_number, number, max(flags, key=len), *ends)
                known.setdefault("metavar", f"<{number.__name__}>")
        annotation = Annotated[hint, kind(**{**known, "help": text})]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=told.default, annotation=annotation)

    @cached_property
    def whole(self) -> Any:
        """The command with all of its options."""

        def called(**given: Any) -> None:
            return self.function(**given)

        called.__signature__ = inspect.Signature(self.parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in self.parameters}
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(called)
        return get_command(alone)

    def get_params(self, ctx: Any) -> list[Any]:
        return list(self.whole.get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        with progress():
            return self.whole.invoke(ctx)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(
    kind: type[int] | type[float], flag: str, least: float, most: float, given: str | float
) -> float:
    """The number of an option, as written or its default.

    Raises SpecError where it is none, or out of its range."""
    from gnnplan.planner.vocabulary.units import number_of

    text = str(given)
    try:
        value = number_of(text, kind)
    except ValueError:
        like = "a whole number, as 12" if kind is int else "a finite number, as 12 or 0.5"
        raise SpecError(f"{flag}: must be {like}, not {text:.80}") from None
    if value < least:
        raise SpecError(f"{flag}: must be at least {least:g}, not {text}")
    if value > most:
        raise SpecError(f"{flag}: must be at most {most:g}, not {text}")
    return value


def verb(*sources: Source, name: str | None = None, **details: Any) -> Callable[[Any], Any]:
    """Make a function a verb; its **arguments are those of the sources that it has not itself.

    Its docstring is the help, Args that of options. Arguments before * are given by their place.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        own = {"function": staticmethod(function), "sources": sources, "details": details}
        text = inspect.getdoc(function) or ""
        kind = type("Verb", (Verb,), own)
        app.command(name or function.__name__, cls=kind, help=text.partition("\n\nArgs:")[0])(
            lambda: None
        )
        return function

    return made


def print_json(document: dict[str, Any]) -> None:
    """Print a JSON document on standard output."""
    notify("")
    print(json.dumps(document, indent=1, allow_nan=False))


def numbers(text: str, option: str) -> list[int]:
    """The whole numbers of an option such as '2,4,8'.

    Raises SpecError.
    """
    from gnnplan.planner.vocabulary.units import number_of

    try:
        return [int(number_of(part)) for part in text.split(",")]
    except ValueError:
        raise SpecError(
            f"{option} {text!r:.80} is not a list of whole numbers; write it as 2,4,8"
        ) from None


def say_notes(notes: Iterable[str]) -> None:
    """Print what a user should know beside an answer, on standard error."""
    for note in notes:
        say(f"note: {note}")


def show(answer: Any, as_json: bool = False) -> bool:
    """Print an answer on standard output, for people or its document; whether for people."""
    from gnnplan.api.view import WIDTH

    if as_json:
        print_json(answer.document)
    else:
        notify("")
        answer.print(width=None if sys.stdout.isatty() else WIDTH)
    return not as_json
