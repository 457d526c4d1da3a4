"""The whole training: one answer from both modes and all sizes, and whether to distribute at all.

    on              GPUs  training  GPU hours
    the full graph     1   12.58 s    0.00349  use this
    the full graph    16    1.40 s    0.00622  fastest
    mini-batches       1   83.42 s     0.0232

Each mode is searched with the epochs that it is assumed to train (epochs.py). What is chosen of the
two is chosen as of two strategies (search.recommend).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.epochs import MODES, Epochs, with_fields
from gnnplan.planner.decision.objective import watts
from gnnplan.planner.decision.recommendation import range_of
from gnnplan.planner.decision.search import SearchResult, each_of, least_of, recommend
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible
from gnnplan.planner.vocabulary.units import show_count, show_long


@dataclass(frozen=True)
class Whole:
    """The answers to a question in each mode, and why a mode has none."""

    answers: Mapping[str, SearchResult]
    refused: Mapping[str, str]

    @property
    def mode(self) -> str:
        """The mode that is recommended.

        Each mode's best may be nearly as good as its least only (`slack`); it is compared with the
        least of both, so that what is given up does not add up.
        """
        answers = self.answers.values()
        least = min(least_of(found.ranked, comparable=True) for found in answers)
        bests = sorted((found.best for found in answers), key=lambda one: one.value)
        near = [best for best in bests if best.value <= best.objective.slack * least]
        return recommend(near).problem.workload.mode

    @property
    def found(self) -> SearchResult:
        """The answer in that mode."""
        return self.answers[self.mode]

    @cached_property
    def sizes(self) -> list[Candidate]:
        """The recommended candidate in each mode on each number of GPUs that was asked about."""
        out = []
        for found in self.answers.values():
            by_gpus: dict[int, list[Candidate]] = {}
            for candidate in found.ranked:
                by_gpus.setdefault(candidate.problem.ranks, []).append(candidate)
            by_gpus[found.best.problem.ranks] = [found.best]
            out += [recommend(by_gpus[gpus]) for gpus in sorted(by_gpus)]
        return out

    @property
    def line(self) -> str:
        """Whether to distribute at all, and in which mode, with what the others would take."""
        best, most = self.found.best, self.found.problem.ranks
        used, device = best.problem.ranks, best.problem.cluster.device
        said = f"{self._told(best)} in {show_long(best.time_s)}"
        unit = "CPU rank" if device.kind == "cpu" else device.name
        if used == 1:
            words = [f"one {unit} is enough: {said}"]
        else:
            words = [f"use {used} x {unit}: {said}"]
            words += self._against_one(best)
        words += self._against_all(best, most)
        for mode, found in self.answers.items():
            if mode != self.mode:
                other = f"{self._told(found.best)} would take {show_long(found.best.time_s)}"
                gpus = show_count(found.best.problem.ranks, "GPU")
                words.append(f"{other} on {gpus}" if found.best.problem.ranks != used else other)
        words += [f"{_is(mode)} refused: {why}" for mode, why in self.refused.items()]
        return "; ".join(words)

    def told_in(self, document: dict[str, Any]) -> dict[str, Any]:
        """The plan with the sizes; `document`: of `found`, from plan.make."""
        return {
            **document,
            "sizes": [self._row(candidate) for candidate in self.sizes],
            "summary": {"answer": self.line, **document["summary"]},
        }

    def _told(self, candidate: Candidate) -> str:
        mode = MODES[candidate.problem.workload.mode]
        return f"{show_count(round(candidate.epochs.usual), 'epoch')} of {mode}"

    def _against_one(self, best: Candidate) -> list[str]:
        ones = [c for c in self.sizes if c.problem.ranks == 1]
        if not ones:
            most = self.found.problem.ranks
            fits = best.problem.ranks < most or len(self.found.ranked) > 1
            is_asked = any(c.problem.ranks < most for c in self.sizes)
            return ["one alone has too little memory"] if fits and is_asked else []
        one = min(ones, key=lambda c: c.value)
        return [f"one alone would take {show_long(one.time_s)} ({one.time_s / best.time_s:.1f}x)"]

    def _against_all(self, best: Candidate, most: int) -> list[str]:
        mode = best.problem.workload.mode
        whole = [
            c for c in self.sizes if c.problem.ranks == most and c.problem.workload.mode == mode
        ]
        if best.problem.ranks == most or not whole:
            return []
        saved = best.time_s - whole[0].time_s
        if saved <= 0:
            return [f"{most} are slower"]
        hours = how_many(gpu_hours(whole[0]) / gpu_hours(best))
        return [f"{most} would save {show_long(saved)} and take {hours}"]

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        """A size's numbers, JSON-ready."""
        problem, epochs = candidate.problem, candidate.epochs
        low, high = range_of(candidate.drawn_time_s, candidate.time_s)
        dollars, power = candidate.dollars, watts(problem)
        return {
            "mode": problem.workload.mode,
            "gpus": problem.ranks,
            "servers": len(set(problem.servers)),
            "strategy": str(candidate.strategy),
            "exact": candidate.strategy.exact,
            "epochs": epochs.usual,
            "epoch_s": candidate.epoch_s,
            "training_s": candidate.time_s,
            "training_low_s": low,
            "training_high_s": high,
            "gpu_hours": gpu_hours(candidate),
            **({} if dollars is None else {"dollars": dollars * epochs.usual}),
            **({} if power is None else {"joules": power * candidate.time_s}),
            "memory_bytes": candidate.memory_bytes,
            "recommended": candidate is self.found.best,
        }


def _is(mode: str) -> str:
    return f"{MODES[mode]} {'is' if mode == 'full' else 'are'}"


def gpu_hours(candidate: Candidate) -> float:
    """Of the GPUs that train [h]; a server that is rented whole has more, which dollars count."""
    return candidate.problem.ranks * candidate.time_s / 3600


def how_many(times: float) -> str:
    """GPU hours in words, beside those of the answer.

    >>> how_many(1.8), how_many(1.02), how_many(0.9)
    ('1.8 times the GPU hours', 'as many GPU hours', 'fewer GPU hours')
    """
    if times >= 1.05:
        return f"{times:.1f} times the GPU hours"
    return f"{'as many' if times > 0.95 else 'fewer'} GPU hours"


def compare(
    problem: Problem,
    modes: Iterable[str],
    epochs: Mapping[str, Epochs],
    ask: Callable[[Problem], SearchResult],
) -> Whole:
    """The answers in these modes; `ask` is the search.

    Raises SpecError or Infeasible where no mode has one."""
    answers, refused = each_of(
        modes, lambda mode: ask(with_fields(problem, mode=mode, epochs=round(epochs[mode].usual)))
    )
    if not answers:
        first = next(iter(refused.values()))
        if len(refused) == 1 or not all(isinstance(why, Infeasible) for why in refused.values()):
            raise first
        raise Infeasible("\n".join(f"{MODES[mode]}: {why}" for mode, why in refused.items()))
    first_lines = {mode: str(why).splitlines()[0] for mode, why in refused.items()}
    reasons = {m: w.removeprefix("nothing fits: ").rstrip(":") for m, w in first_lines.items()}
    return Whole(answers, reasons)
