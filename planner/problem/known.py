"""What has been computed about problems, by all that it depends on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from gnnplan.planner.graph.partition import Stopwatch

T = TypeVar("T")

RECENT = 16  # answers that `recent` keeps


class Known:
    """Answers by their questions; problems that are made of one another share one.

    A question is a tuple of all that its answer depends on. So an answer never becomes wrong, and
    nothing has to be forgotten when a problem changes.
    """

    def __init__(self) -> None:
        self._answers: dict[Hashable, Any] = {}
        self._recent: OrderedDict[Hashable, Any] = OrderedDict()
        self._last: dict[Hashable, tuple[Hashable, Any]] = {}  # by the kind of question
        self._seconds: dict[int, float] = {}  # by id() of an answer, which is kept

    def answer(self, question: Hashable, make: Callable[[], T]) -> T:
        """The answer to a question, made when it is first asked."""
        if question not in self._answers:
            with Stopwatch() as watch:
                made = self._answers[question] = make()
            self._seconds[id(made)] = watch.seconds
        found: T = self._answers[question]
        return found

    def recent(self, question: Hashable, make: Callable[[], T]) -> T:
        """Like `answer`, of which only the RECENT last ones are kept: what-ifs ask thousands."""
        if question not in self._recent:
            self._recent[question] = make()
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(question)
        found: T = self._recent[question]
        return found

    def last(self, kind: str, question: Hashable, make: Callable[[], T]) -> T:
        """Like `answer`, of which only the last one of its kind is kept: for large ones."""
        asked, found = self._last.get(kind, (None, None))
        if asked != question:
            found = make()
            self._last[kind] = question, found
        answer: T = found
        return answer

    def seconds_of(self, answer: object) -> float:
        """How long it took to make an answer [s]."""
        return self._seconds.get(id(answer), 0.0)
