"""Errors that a user sees, and their exit codes.

Every message gives the rule, the numbers and a remedy."""


class GnnplanError(Exception):
    """The base of all errors that a user sees without a traceback."""

    exit_code = 1


class SpecError(GnnplanError):
    """The input is wrong.

    The message names the file, line or field, the rule, and the allowed values.
    """

    exit_code = 2


class Infeasible(GnnplanError):
    """Nothing fits, which is a valid answer.

    The message says what fills the memory and what would fit.
    """

    exit_code = 3


class LostRank(GnnplanError):
    """A rank died or stopped answering.

    The message names the rank and what is safe on disk.
    """

    exit_code = 4


class Mismatch(GnnplanError):
    """Two things that must agree do not, as a plan and its data, or a schedule and its record.

    It is a bug of ours or a stale file.
    """

    exit_code = 2


class OtherData(Mismatch):
    """A plan was made for other data than are here."""

    def __init__(self, message: str, here: str) -> None:
        super().__init__(message)
        self.here = here  # what the data are, in words


class Deadlock(GnnplanError):
    """A schedule waits for something that never happens. It is a bug of ours."""
