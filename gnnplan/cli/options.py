"""Options of a verb, as what it calls declares them: a function of the API, a workload's fields.

A function's signature has names, types and defaults, its docstring the help; `name` in it is the
option --name. They are read from the source, for importing the API takes a second, and --help comes
at once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import typer
from typer.core import TyperCommand
from typer.main import get_command

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import number_of

API = Path(__file__).parents[1] / "api"
# of arguments that become options; a verb declares an option for another type itself
TYPES = {"int": int, "float": float, "bool": bool, "str": str, "str | Path": Path}
Options = Callable[[], Iterable[Parameter]]


def of_function(
    place: str,
    only: Collection[str] = (),
    given_only: bool = False,
    **details: dict[str, Any],
) -> Options:
    """Options for the arguments of 'planning.Plan.simulate' that have a default and one of TYPES.

    only: of these. given_only: an option that is not given is None, whatever the argument's
    default. details: what typer.Option takes besides help, by argument; `flag` renames it.
    """

    def declared() -> Iterable[Parameter]:
        module, *names = place.split(".")
        found: Any = ast.parse((API / f"{module}.py").read_text(encoding="utf-8"))
        for name in names:  # of overloads the last
            found = [one for one in found.body if getattr(one, "name", "") == name][-1]
        text = ast.get_docstring(found) or ""
        helps = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE))
        own = found.args
        arguments = [*own.args[len(own.args) - len(own.defaults) :], *own.kwonlyargs]
        for argument, value in zip(arguments, [*own.defaults, *own.kw_defaults], strict=True):
            name = argument.arg
            kind = TYPES.get(ast.unparse(argument.annotation).removesuffix(" | None"))
            if kind is None or value is None or (only and name not in only):
                continue
            default, said = ast.literal_eval(value), helps[name]
            if given_only:
                said += f"  [default: {default:g}]" if default and kind is not bool else ""
                default = None
            yield option(name, kind, default, said, **details.get(name, {}))

    return declared


def of_fields() -> Iterable[Parameter]:
    """Options for the fields of a workload; None where one is not given."""
    from gnnplan.planner.gnn.fields import Fields

    for name, field in Fields.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        kind = next((kind for kind in (int, float) if kind in kinds), str)
        said = field.description or ""
        if "[default" not in said:
            said += f"  [default: {field.default if kind is str else f'{field.default:g}'}]"
        yield option(name, kind, None, said)


def of_model() -> Iterable[Parameter]:
    """An argument for a workload's model."""
    from gnnplan.planner.gnn.fields import Fields

    told = typer.Argument(help=Fields.model_fields["model"].description)
    yield Parameter("model", Parameter.KEYWORD_ONLY, annotation=Annotated[str, told])


def option(name: str, kind: type, default: Any, text: str, **details: Any) -> Parameter:
    """An option of a verb."""
    flag = details.pop("flag", f"--{name.replace('_', '-')}")
    told = typer.Option(flag, help=re.sub(r"\s+", " ", text), **details)
    hint: Any = kind if kind is bool else kind | None
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, told]
    )


class Verb(TyperCommand):
    """A verb, whose options are made when they are asked for, so that `gnnplan --help` is quick."""

    function: ClassVar[Callable[..., None]]
    sources: ClassVar[tuple[Options, ...]]

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """All options: the function's own, then those of the sources."""
        signature = inspect.signature(self.function, eval_str=True)
        own = {
            name: one.replace(kind=Parameter.KEYWORD_ONLY)
            for name, one in signature.parameters.items()
            if one.kind is not Parameter.VAR_KEYWORD
        }
        read = {one.name: one for source in self.sources[::-1] for one in source()}
        for one in read.values():
            told = one.annotation.__metadata__[0]
            told.help = re.sub(
                r"`(\w+)`",
                lambda of: f"--{of[1].replace('_', '-')}" if of[1] in read | own else of[0],
                told.help,
            )
        return own | {name: one for name, one in read.items() if name not in own}

    @cached_property
    def whole(self) -> Any:
        """The command with all of its options."""

        def called(**given: Any) -> None:
            return type(self).function(**given)

        called.__signature__ = inspect.Signature([*self.parameters.values()])  # type: ignore[attr-defined]
        called.__annotations__ = {name: one.annotation for name, one in self.parameters.items()}
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(called)
        return get_command(alone)

    def get_params(self, ctx: Any) -> list[Any]:
        return list(self.whole.get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises SpecError for a number that is not finite, or in other digits than 0 to 9.

        typer takes these; whether it takes the rest is its own to say."""
        numeric = {
            flag
            for one in self.whole.params
            if {int, float}.intersection(_kinds(self.parameters[one.name].annotation))
            for flag in one.opts
        }
        for word, after in pairwise([*args, ""]):
            flag, equals, value = word.partition("=")
            if flag in numeric:
                _must_be_number(flag, value if equals else after)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        return self.whole.invoke(ctx)


def _must_be_number(flag: str, text: str) -> None:
    try:
        float(text)
    except ValueError:
        return
    try:
        number_of(text, float)
    except ValueError:
        raise SpecError(
            f"{flag}: must be a finite number in the digits 0 to 9, as 12 or 0.5, not {text!r:.80}"
        ) from None


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The types of an option: of Annotated[int | None, ...] int and None."""
    kind = get_args(annotation)[0] if get_args(annotation) else annotation
    return (kind, *get_args(kind))
