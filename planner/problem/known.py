"""What has been computed about problems, by all that it depends on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from gnnplan.planner.graph.kept import Stopwatch

P = ParamSpec("P")
T = TypeVar("T")

RECENT = 16  # answers of a kind that `recent` keeps


class Known:
    """Answers by their questions; problems that are made of one another share one.

    A question is a tuple of all that its answer depends on. So an answer never becomes wrong, and
    nothing has to be forgotten when a problem changes.
    """

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[Any, float]] = {}  # and how long it took [s]
        self._recent: dict[str, OrderedDict[Hashable, Any]] = {}  # by the kind of question

    def answer(self, question: Hashable, make: Callable[[], T]) -> T:
        """The answer to a question, made when it is first asked."""
        if question not in self._answers:
            with Stopwatch() as watch:
                made = make()
            self._answers[question] = made, watch.seconds
        found: T = self._answers[question][0]
        return found

    def recent(self, kind: str, question: Hashable, make: Callable[[], T], most: int = RECENT) -> T:
        """Like `answer`, of which only the `most` last ones of their kind are kept.

        What-ifs ask thousands, and some answers are large.
        """
        known = self._recent.setdefault(kind, OrderedDict())
        if question not in known:
            known[question] = make()
            if len(known) > most:
                known.popitem(last=False)
        known.move_to_end(question)
        found: T = known[question]
        return found

    def seconds_of(self, answer: object) -> float:
        """How long it took to make an answer [s]."""
        return next((s for made, s in self._answers.values() if made is answer), 0.0)


def answered(*fields: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Keep the answers of a problem's method; besides its arguments they depend on these fields."""
    of = attrgetter(*fields)

    def keep(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def ask(*args: P.args, **options: P.kwargs) -> T:
            problem: Any = args[0]
            question = (method.__name__, args[1:], *options.items(), of(problem))
            found: T = problem.known.answer(question, lambda: method(*args, **options))
            return found

        return ask

    return keep
