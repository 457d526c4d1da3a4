"""Code that all verbs share: the typer program, printing of results, and construction of options.

A verb's options are its function's arguments, and the arguments of what it calls: a function of the
API, or the fields of a workload. The signature gives names, types and defaults; Args in the
docstring gives the help, where `name` is shown as the option --name. The API's files are parsed
instead of imported, since imports take a second and --help must come at once."""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Container, Iterable
from functools import cached_property, partial
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, get_args

import typer
from typer.core import TyperCommand
from typer.main import get_command

from gnnplan import __version__
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify, progress, say

if TYPE_CHECKING:
    from gnnplan.planner.vocabulary.files import Json

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=(
        "Choose a parallel strategy to train a graph neural network on your cluster: plan it,"
        " simulate it, run it, and see how wrong the prediction was.\n\nStart with: gnnplan plan -o"
        " plan.json && gnnplan simulate plan.json && gnnplan run plan.json --out run && gnnplan"
        " validate run\n\nExit codes: 0 done, 1 a check failed, 2 bad input, 3 nothing fits, 4 a"
        " rank was lost."
    ),
)

WRITTEN = {"output", "report", "csv"}  # options whose files are written
# verb -> option whose file --output may replace
IN_PLACE = {"tune": "plan_file", "measure": "cluster"}
LACKING = ("features", "labels", "split")  # options for what a graph's file may lack
PACKAGE = Path(__file__).parents[1]
API, FIELDS = PACKAGE / "api", PACKAGE / "planner" / "gnn" / "fields.py"
# annotation -> type of an option, for arguments of the API that become options as they are; for
# other annotations a verb declares an argument itself
TYPES = {
    **{"int": int, "float": float, "bool": bool, "str": str, "str | Path": Path},
    "str | Path | Cluster": str,
}
# argument -> settings of its typer option in every verb; flags: the option's names
SHARED: dict[str, dict[str, Any]] = {
    "as_json": {
        "flags": ("--json",),
        "help": "Print one JSON document, and nothing else, on standard output.",
    },
    "depths": {"flags": ("--explain",)},
    "emulate": {"metavar": "RATE"},
    "features": {"metavar": "FILE|WIDTH"},
    "graph": {
        "help": "The graph: a .npz, a folder of .npy files or of parts (gnnplan partition), a file"
        " or folder of DGL, PyG, OGB, GraphBolt,"
        " GraphSAINT, SciPy, NetworkX (GraphML), MatrixMarket or an edge list (CSV, TSV, Parquet),"
        " synthetic:community?vertices=..&edges=..&features=..&classes=..&seed=.. (or"
        " synthetic:rmat?..); or statistics only, to plan and simulate: a .yaml, or the name of a"
        " well-known graph (reddit)."
    },
    "labels": {"metavar": "FILE"},
    "output": {"flags": ("-o", "--output", "--out")},
    "plan_file": {"metavar": "PLAN", "help": "A plan.json."},
    "set_": {
        "flags": ("--set",),
        "metavar": "FIELD=VALUE",
        "help": "Change a field of the cluster or workload: servers=16, inter_node.bandwidth=25GB/s"
        " (inter_node is the link between servers, intra_node the link inside a server). May be"
        " given again.",
    },
    "split": {"metavar": "PATH"},
    "timeout_s": {"flags": ("--timeout",)},
}


@app.callback(invoke_without_command=True)
def _of_the_program(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"gnnplan {__version__}")
        raise typer.Exit


class Option(NamedTuple):
    """An argument of a verb, from which typer's option is made."""

    hint: Any  # type
    default: Any
    help: str | None
    by_place: bool = False  # a positional argument, without --name


Source = Callable[[], dict[str, Option]]


def helps_of(docstring: str | None) -> dict[str, str]:
    """Return argument -> help, read from a docstring's Args."""
    said = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", docstring or "", re.MULTILINE)
    return {name: re.sub(r"\n *", " ", text) for name, text in said}


def of_function(place: str, *only: str, given_only: bool = False) -> Source:
    """Return a source of a function's arguments that have a default and one of TYPES.

    place: the function, as 'planning.Plan.simulate'. only: take no other arguments than these.
    given_only: the default of every option is None, so that a verb sees which options are given.
    """

    def arguments_of_function() -> dict[str, Option]:
        module, *names = place.split(".")
        found = _declared(API / f"{module}.py", *names)
        own, helps, out = found.args, helps_of(ast.get_docstring(found)), dict[str, Option]()
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
            out[name] = Option(kind if kind is bool else kind | None, default, text)
        return out

    return arguments_of_function


def of_fields() -> dict[str, Option]:
    """Return a workload's fields as arguments with default None; the string below a field is the
    help."""
    out = {}
    for field, below in pairwise(_declared(FIELDS, "Fields").body):
        if hasattr(field, "annotation"):
            value = field.value.args[0] if isinstance(field.value, ast.Call) else field.value
            default, text = ast.literal_eval(value), re.sub(r"\n *", " ", below.value.value)
            kind: Any = TYPES.get(ast.unparse(field.annotation).removesuffix(" | None"), str)
            if default is not None:
                text += f"  [default: {default if kind is str else f'{default:g}'}]"
            out[field.target.id] = Option(kind | None, None, text)
    return out


def _declared(file: Path, *names: str) -> Any:
    """Return the syntax node of a function or class, or of a method; of overloads the last."""
    found: Any = ast.parse(file.read_text(encoding="utf-8"))
    for name in names:
        found = [one for one in found.body if getattr(one, "name", "") == name][-1]
    return found


def of_model() -> dict[str, Option]:
    """Return the workload's model as a positional argument."""
    text, _, _ = (of_fields()["model"].help or "").partition("  [default")
    return {"model": Option(str, Parameter.empty, text, by_place=True)}


class Verb(TyperCommand):
    """A verb that builds its options at first use, so that `gnnplan --help` is quick."""

    function: ClassVar[Callable[..., None]]
    sources: ClassVar[tuple[Source, ...]]
    details: ClassVar[dict[str, dict[str, Any]]]  # argument -> settings that add to SHARED

    @property
    def parameters(self) -> list[Parameter]:
        """The function's own arguments, then the sources' arguments of other names."""
        helps = helps_of(inspect.getdoc(self.function))
        found = {
            name: Option(one.annotation, one.default, helps.get(name), one.kind < one.KEYWORD_ONLY)
            for name, one in inspect.signature(self.function, eval_str=True).parameters.items()
            if one.kind is not Parameter.VAR_KEYWORD
        }
        for source in self.sources:
            for name, option in source().items():
                found.setdefault(name, option)
        if "as_json" in found:  # --json stands last
            found["as_json"] = found.pop("as_json")
        return [self._parameter(name, option, found) for name, option in found.items()]

    def _parameter(self, name: str, option: Option, among: Container[str]) -> Parameter:
        """Return an argument as an annotated parameter for typer; among: names of all arguments."""
        known = {**SHARED.get(name, {}), **self.details.get(name, {})}
        flags = known.pop("flags", (_flag(name),))
        text = re.sub(
            r"`(\w+)`",
            lambda of: _flag(of[1]) if of[1] in among else of[0],
            option.help or known.get("help", ""),
        )
        kind: Any = typer.Argument if option.by_place else partial(typer.Option, *flags)
        hint: Any = option.hint
        for number in (int, float):
            if number in (hint, *get_args(hint)):
                ends = known.get("min", -math.inf), known.get("max", math.inf)
                known["parser"] = partial(_number, number, max(flags, key=len), *ends)
                known.setdefault("metavar", f"<{number.__name__}>")
        annotation = Annotated[hint, kind(**{**known, "help": text})]
        return Parameter(
            name, Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation
        )

    @cached_property
    def whole(self) -> Any:
        """The typer command with all options."""

        def called(**given: Any) -> None:
            return self.function(**given)

        called.__signature__ = inspect.Signature(self.parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in self.parameters}
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(called)
        return get_command(alone)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. Raises SpecError for an empty one: Path("") would be this folder."""
        for before, word in pairwise(["", *args]):
            if not word or re.fullmatch(r"--[a-z-]+=", word):
                shown = word or f"{before} ''".strip()
                raise SpecError(
                    f"{shown}: is empty, as a shell variable without a value is; give it a value,"
                    " or leave it out"
                )
        rest: list[str] = super().parse_args(ctx, args)
        _must_keep_inputs(ctx.params, IN_PLACE.get(self.name or ""))
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        return list(self.whole.get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        with progress():
            return self.whole.invoke(ctx)


def _must_keep_inputs(given: dict[str, Any], replaced: str | None) -> None:
    """Raise SpecError for a file that one option reads or writes, and another writes over.

    replaced: the option whose file may be written over, with a file of the same kind."""
    options = (value for name, value in given.items() if name not in {*WRITTEN, replaced})
    texts = [str(one) for of in options for one in (of if isinstance(of, list) else [of])]
    read = [path for text in texts if os.path.exists(path := text.partition("?")[0])]
    written = {name: str(given[name]) for name in sorted(WRITTEN & given.keys()) if given[name]}
    for name, path in written.items():
        if os.path.exists(path) and any(os.path.samefile(path, one) for one in read):
            raise SpecError(
                f"{_flag(name)} {path}: is read too, and would be lost; give another name"
            )
    if len({*map(os.path.realpath, written.values())}) < len(written):
        raise SpecError(f"{' and '.join(map(_flag, written))} {path}: are one file; write two")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(
    kind: type[int] | type[float], flag: str, least: float, most: float, given: str | float
) -> float:
    """Return an option's value, from text or the default, as a number of `kind`.

    Raises SpecError if it is no such number, or out of its range."""
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
    """Return a decorator that makes a function a verb; its **arguments come from the sources.

    The docstring is the verb's help, and Args the options' help. Arguments before * are positional.
    details: argument -> settings of its typer option.
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


def print_json(document: Json) -> None:
    """Print a JSON document on standard output."""
    notify("")
    print(json.dumps(document, indent=1, allow_nan=False))


def numbers(text: str, option: str) -> list[int]:
    """Return the whole numbers of an option such as '2,4,8'.

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
    """Print notes on standard error."""
    for note in notes:
        say(f"note: {note}")


def show(answer: Any, as_json: bool = False) -> bool:
    """Print a result on standard output, as text or as JSON; return whether as text."""
    from gnnplan.api.view import WIDTH

    if as_json:
        print_json(answer.document)
    else:
        notify("")
        answer.print(width=None if sys.stdout.isatty() else WIDTH)
    return not as_json
