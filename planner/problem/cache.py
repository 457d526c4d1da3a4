"""A cache of results about problems, keyed by everything that a result depends on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from gnnplan.planner.graph.disk_cache import Stopwatch

P = ParamSpec("P")
T = TypeVar("T")

RECENT = 16  # default number of answers per kind that `get_recent` keeps


class Cache:
    """A cache of answers keyed by questions; a problem derived from another one shares its cache.

    A question is a tuple of everything that the answer depends on. An answer therefore stays
    correct, and no entry needs to be invalidated.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any, float]] = {}  # answer, seconds to compute it [s]
        self._recent: dict[str, OrderedDict[Hashable, Any]] = {}  # kind -> question -> answer

    def get(self, question: Hashable, make: Callable[[], T]) -> T:
        """Return the answer to a question, which `make` computes at the first request."""
        if question not in self._results:
            with Stopwatch() as watch:
                answer = make()
            self._results[question] = answer, watch.seconds
        cached: T = self._results[question][0]
        return cached

    def get_recent(
        self, kind: str, question: Hashable, make: Callable[[], T], most: int = RECENT
    ) -> T:
        """Return the answer like `get`, but keep only the `most` recently used ones of a kind.

        What-if analyses ask thousands of questions, and some answers are large.
        """
        answers = self._recent.setdefault(kind, OrderedDict())
        if question not in answers:
            answers[question] = make()
            if len(answers) > most:
                answers.popitem(last=False)
        answers.move_to_end(question)
        cached: T = answers[question]
        return cached

    def seconds_of(self, answer: object) -> float:
        """Return the time that computing an answer took [s]; 0 for an object not in the cache."""
        return next((s for cached, s in self._results.values() if cached is answer), 0.0)


def cached_by(*fields: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method of a problem: cache results, keyed by the arguments and these fields."""
    values = attrgetter(*fields)

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def ask(*args: P.args, **options: P.kwargs) -> T:
            problem: Any = args[0]
            question = (method.__name__, args[1:], *options.items(), values(problem))
            answer: T = problem.cache.get(question, lambda: method(*args, **options))
            return answer

        return ask

    return decorate
