"""Whose fault it is, and the exit code that says so. Every message: rule, numbers, remedy."""


class GnnplanError(Exception):
    """Base of all errors that a user sees without a traceback."""

    exit_code = 1


class SpecError(GnnplanError):
    """The input is wrong: names file, line or field, the rule and the allowed values."""

    exit_code = 2


class Infeasible(GnnplanError):
    """A right answer to a right question: nothing fits; says what fills the memory and what would fit."""

    exit_code = 3


class LostRank(GnnplanError):
    """A rank died or stopped answering; names the rank and what is safe on disk."""

    exit_code = 4


class Mismatch(GnnplanError):
    """Two things that must agree do not (plan and data, schedule and record): our bug or a stale file."""

    exit_code = 2


class Deadlock(GnnplanError):
    """A schedule waits for something that never happens: our bug."""
