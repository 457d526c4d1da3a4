"""The base class of specifications (pydantic models), the types of their fields, and mistakes in
them in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Document, Where, dotted, likeliest, meant, suggest
from gnnplan.planner.vocabulary.units import kind, quantity

Model = TypeVar("Model", bound=BaseModel)
MOST_MISTAKES = 20  # mistakes in one message
# pydantic's rule -> what the value must be that it could not read
PARSED = {
    "float_parsing": "a number{of}, as 2",
    **dict.fromkeys(("int_parsing", "int_parsing_size"), "a whole number{of}, as 2"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "dict_type": "a mapping (key: value)",
    "tuple_type": "a list, as [1, 2]",
}
EXAMPLES = {"B/s": "25GB/s", "s": "10us", "B": "24GiB", "flop/s": "27TFLOP/s", "W": "300W"}


def bounded(low: float, high: float, what: str, unit: str) -> BeforeValidator:
    """Make a validator that parses a quantity and refuses values that imply a wrong unit."""

    def check(value: str | float) -> float:
        number = quantity(value)
        if kind(value) not in ("", unit):
            raise ValueError(
                f"{what} is given in {unit}, but {value!r:.80} is in {kind(value)}. Check the unit"
            )
        if not low <= number <= high:
            raise ValueError(
                f"{what} must lie in [{low:g}, {high:g}] (SI: B, s, flop); {value!r:.80} is"
                f" {number:g}. Check the unit, as in {EXAMPLES[unit]}"
            )
        return number

    return BeforeValidator(check)


Bandwidth = Annotated[float, bounded(1e3, 1e14, "a bandwidth [B/s]", "B/s")]
Latency = Annotated[float, bounded(0.0, 0.1, "a latency [s]", "s")]
Duration = Annotated[float, bounded(0.0, 1.0, "a duration [s]", "s")]
Bytes = Annotated[float, bounded(1e6, 1e15, "a memory size [B]", "B")]
Size = Annotated[float, bounded(1.0, 1e13, "a size [B]", "B")]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
# message or tensor size [B] -> rate; a number alone holds for all sizes
Rates = Annotated[
    dict[Size, Bandwidth],
    BeforeValidator(lambda value: value if isinstance(value, dict) else {1.0: value}),
]
Rate = Annotated[float, bounded(1e6, 1e18, "a compute rate [flop/s]", "flop/s")]
Power = Annotated[float, bounded(0.1, 1e5, "a power [W]", "W")]


def _kinds(annotation: Any) -> set[Any]:
    """Return all types in an annotation such as `tuple[int, ...] | None`."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))


def _contains(value: Any, test: Callable[[Any], bool]) -> bool:
    """Whether the test is true of a value, or of any item if the value is a list."""
    if isinstance(value, list | tuple):
        return any(_contains(item, test) for item in value)
    return test(value)


class Spec(BaseModel):
    """A frozen pydantic model in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    usual: ClassVar[Mapping[str, str]] = {}  # other names of a field's values (files.meant)

    if not TYPE_CHECKING:  # editors complete the fields

        def __init__(self, /, **fields: Any) -> None:
            """Raises SpecError."""
            try:
                super().__init__(**fields)
            except ValidationError as error:
                kind = type(self)
                raise SpecError(mistakes(kind, error, fields, f"{kind.__name__}: ")) from error

        __init__.__pydantic_base_init__ = True  # model_validate does not call it

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_it_looks_like(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that pydantic misreads: true as 1, or text that C code cuts at a zero byte.

        Of names, take those that are meant. A specification nested in this one checks its own
        fields.
        """
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if bool not in kinds and _contains(value, lambda item: item is True or item is False):
            raise ValueError("must be a number or text, not true or false")
        if _contains(value, lambda item: isinstance(item, str) and "\0" in item):
            raise ValueError("must not hold a zero byte; leave it out")
        names = [name for name in kinds if isinstance(name, str)]  # of a Literal
        return meant(value, names, cls.usual) if names and isinstance(value, str) else value

    def to_yaml(self) -> str:
        """Return all fields as the text of a YAML file."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class Conflict(ValueError):
    """An invalid combination of the values of several fields.

    `fields` has the names of the fields, the likeliest mistake first."""

    def __init__(self, fields: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.fields = fields


def mistakes(
    kind: type[BaseModel],
    error: ValidationError,
    data: Mapping[Any, Any],
    source: Document | str,
    given: Collection[str] | None = None,
) -> str:
    """Return a line per mistake of data that are no specification of class `kind`.

    source, given: as for `checked` (planner/problem/inputs.py)."""
    errors = [
        item
        for item in error.errors(include_url=False)
        if item["type"] != "default_factory_not_called"  # a consequence of another mistake
    ]
    found = []
    for item in errors[:MOST_MISTAKES]:
        where, message = _mistake(kind, item["loc"], item["type"], item["msg"], item["input"])
        rule = item.get("ctx", {}).get("error")
        if not where and isinstance(rule, Conflict):
            known = data if given is None else given
            where = next(((name,) for name in rule.fields if name in known), ())
        if isinstance(source, Document):
            found.append(str(source.error(where, message)))
        else:
            fields = dotted(where) if where else ", ".join(given or ())
            fields = fields.replace("_", "-") if source == "--" else fields  # an option
            found.append(f"{source}{fields}".rstrip(".: ") + f": {message}")
    if len(errors) > MOST_MISTAKES:
        found.append(f"and {len(errors) - MOST_MISTAKES:,} more mistakes")
    return "\n".join(dict.fromkeys(found))


def read_as(
    kind: type[Model], data: Mapping[Any, Any], source: Document | str, context: object = None
) -> Model:
    """Return data as a `kind`. Raises SpecError with a line per mistake."""
    try:
        return kind.model_validate(data, context=context)
    except ValidationError as error:
        raise SpecError(mistakes(kind, error, data, source)) from error


def _mistake(
    kind: type[BaseModel], loc: Where, rule: str, message: str, given: object
) -> tuple[Where, str]:
    """Return a mistake's place and message, in the words of the file instead of pydantic's."""
    parent = _model_at(kind, loc[:-1])
    if rule == "extra_forbidden":
        return loc, f"unknown field{suggest(str(loc[-1]), parent.model_fields if parent else [])}"
    if rule == "missing":
        return loc, "missing; this field is required"
    if rule == "model_type" and (model := _model_at(kind, loc)):
        needed = [name for name, field in model.model_fields.items() if field.is_required()]
        fields = ", ".join(needed or model.model_fields)
        give = f"{fields} at least" if needed else f"some of {fields}"
        return loc, f"must be a mapping of fields; give {give}"
    if loc[:1] == ("fanout",):  # a union: pydantic reports each branch
        return loc[:1], "must be full, or a number of neighbours per layer such as 15,10"
    if loc[:1] == ("class_weights",):
        return loc[:1], "must be balanced, or a number for each class such as 1,2.5"
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    if rule.startswith(("greater", "less")):
        message += f", not {given!s:.80}"
    if rule in PARSED:
        field = parent.model_fields.get(str(loc[-1])) if parent else None
        of = f" of {field.description}" if field and field.description else ""
        message = f"must be {PARSED[rule].format(of=of)}, not {given!r:.80}"
    if rule == "literal_error":
        near = likeliest(given, re.findall(r"'([^']+)'", message))
        message = message.replace("or 'own'", "or a module of your own, as model.py:MyGNN")
        message += f", not {given!r:.80}" + (f"; did you mean {near}?" if near else "")
    return loc, message


def _model_at(kind: type[BaseModel], where: Where) -> type[BaseModel] | None:
    """Return the pydantic model at a path inside another one, also in a dictionary of models."""
    current: type[BaseModel] | None = kind
    for name in where:
        if current and name in current.model_fields:
            current = spec_in(current.model_fields[str(name)].annotation)
    return current


def spec_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as `Link`, `Link | None` or `dict[str, Link]`."""
    return next(
        (
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ),
        None,
    )
