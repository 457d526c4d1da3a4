"""The base class of specifications (pydantic models), and the types of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from gnnplan.planner.vocabulary.files import meant
from gnnplan.planner.vocabulary.units import kind, quantity

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
