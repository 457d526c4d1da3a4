"""What zoo.py and zoo_dgl.py say of their modules, and the fields of a graph that these read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])
# a field: sizes of a row, numpy's type, and how many whole numbers there are
EDGE = {"edge_attr": ((5,), "<f8", 0), "edge_weight": ((), "<f8", 0), "edge_type": ((), "<i8", 2)}
VERTEX = {"pos": ((3,), "<f8", 0), "batch": ((), "<i8", 2)}


@dataclass(frozen=True)
class Entry:
    """Fields that a module needs, words of its refusal if edges are one way, and the kind of our own
    layers that take its place."""

    fields: tuple[str, ...] = ()
    one_way: str = ""
    ours: str = ""

    @property
    def vertex(self) -> dict[str, Any]:
        return {name: shape for name, shape in VERTEX.items() if name in self.fields}

    @property
    def edge(self) -> dict[str, Any]:
        return {name: shape for name, shape in EDGE.items() if name in self.fields}


def needs(*fields: str, one_way: str = "", ours: str = "") -> Callable[[T], T]:
    """Enter a module into the zoo."""

    def entered(made: T) -> T:
        made.entry = Entry(fields, one_way, ours)  # type: ignore[attr-defined]
        return made

    return entered
