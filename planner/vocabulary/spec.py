"""The base of specifications, which check themselves, and the types of their fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from gnnplan.planner.vocabulary.units import kind, quantity


def bounded(low: float, high: float, what: str, unit: str) -> BeforeValidator:
    """A validator that parses a quantity, and refuses what can only be a mix-up of units."""

    def check(value: str | float) -> float:
        number = quantity(value)
        if kind(value) not in ("", unit):
            raise ValueError(
                f"{what} is given in {unit}, but {value!r:.80} is in {kind(value)}. Check the unit"
            )
        if not low <= number <= high:
            raise ValueError(
                f"{what} must lie in [{low:g}, {high:g}] (SI: B, s, flop); {value!r:.80} is"
                f" {number:g}. Check the unit"
            )
        return number

    return BeforeValidator(check)


Bandwidth = Annotated[float, bounded(1e3, 1e14, "a bandwidth [B/s]", "B/s")]
Latency = Annotated[float, bounded(0.0, 10.0, "a latency [s]", "s")]
Bytes = Annotated[float, bounded(1e6, 1e15, "a memory size [B]", "B")]
Size = Annotated[float, bounded(1.0, 1e13, "a size [B]", "B")]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
# By size; a number alone holds for all sizes.
Rates = Annotated[
    dict[Size, Bandwidth],
    BeforeValidator(lambda value: value if isinstance(value, dict) else {1.0: value}),
]
Rate = Annotated[float, bounded(1e6, 1e18, "a compute rate [flop/s]", "flop/s")]
Power = Annotated[float, bounded(0.1, 1e5, "a power [W]", "W")]


def _kinds(annotation: Any) -> set[Any]:
    """All types in an annotation such as `tuple[int, ...] | None`."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))


def _holds(value: Any, is_such: Callable[[Any], bool]) -> bool:
    """Whether a value, or what its lists hold, is such."""
    if isinstance(value, list | tuple):
        return any(_holds(one, is_such) for one in value)
    return is_such(value)


class Spec(BaseModel):
    """A frozen model in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_it_looks_like(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would take for something else: true for 1, text that C cuts short.

        What lies in a specification inside this one is that one's to check.
        """
        field = cls.model_fields[info.field_name or ""]
        if bool not in _kinds(field.annotation) and _holds(
            value, lambda one: one is True or one is False
        ):
            raise ValueError("must be a number or text, not true or false")
        if _holds(value, lambda one: isinstance(one, str) and "\0" in one):
            raise ValueError("must not hold a zero byte; leave it out")
        return value

    def to_yaml(self) -> str:
        """The text of a file with all fields."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
