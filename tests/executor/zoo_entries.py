"""What zoo.py and zoo_dgl.py say of their modules, and the fields of a graph that these read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])
# a field: sizes of a row, numpy's type, and how many whole numbers there are
EDGE = {"edge_attr": ((5,), "<f8", 0), "edge_weight": ((), "<f8", 0), "edge_type": ((), "<i8", 2)}
EDGE |= {"pseudo": ((2,), "<f8", 0)}
VERTEX = {"pos": ((3,), "<f8", 0), "batch": ((), "<i8", 2)}


@dataclass(frozen=True)
class Entry:
    """Fields that a module needs, and words of its refusal: always, or if edges are one way; and the
    kind of our own layers that take its place."""

    fields: tuple[str, ...] = ()
    refused: str = ""
    one_way: str = ""
    ours: str = ""

    @property
    def vertex(self) -> dict[str, Any]:
        return {name: shape for name, shape in VERTEX.items() if name in self.fields}

    @property
    def edge(self) -> dict[str, Any]:
        return {name: shape for name, shape in EDGE.items() if name in self.fields}


def needs(*fields: str, refused: str = "", one_way: str = "", ours: str = "") -> Callable[[T], T]:
    """Enter a module into the zoo."""

    def entered(made: T) -> T:
        made.entry = Entry(fields, refused, one_way or refused, ours)  # type: ignore[attr-defined]
        return made

    return entered
