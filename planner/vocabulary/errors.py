"""Errors that a user sees, and their exit codes.

Every message gives the rule, the numbers and a remedy."""


class GnnplanError(Exception):
    """The base of all errors that a user sees without a traceback."""

    exit_code = 1


class SpecError(GnnplanError):
    """An error in the user's input.

    The message names the file, line or field, the rule, and the allowed values.
    """

    exit_code = 2


class Infeasible(GnnplanError):
    """The valid answer that nothing fits into memory.

    The message says what fills the memory and what would fit.
    """

    exit_code = 3


class LostRank(GnnplanError):
    """The death or the silence of a rank during training.

    The message names the rank and the state that is safe on disk.
    """

    exit_code = 4


class Mismatch(GnnplanError):
    """A contradiction between a plan and its data, or between a schedule and a recorded trace.

    The cause is a bug of gnnplan or a stale file.
    """

    exit_code = 2


class OtherData(Mismatch):
    """A contradiction between the data that a plan was made for and the data that were loaded."""

    def __init__(self, message: str, here: str) -> None:
        super().__init__(message)
        self.here = here  # description of the loaded data, in words


class Deadlock(GnnplanError):
    """A schedule in which a task waits for an event that never happens: a bug of gnnplan."""
