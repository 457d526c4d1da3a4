"""The one front door: a file per verb. Every verb imports what it needs when it is called, so that --help is instant."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer

from gnnplan.cli.common import app, emit, say

for _verb in ("profile", "plan", "simulate", "run", "validate", "measure"):  # in the order of --help
    import_module(f"gnnplan.cli.{_verb}")


def main() -> NoReturn:
    """Errors that a user can mend are a line, not a traceback; the exit code says whose turn it is."""
    from gnnplan.planner.errors import GnnplanError

    code: Any = 1
    gc.set_threshold(10_000)  # of new objects, not 700: a fifth of a plan's time was looking for circles, mostly in what is imported
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except GnnplanError as error:
        code = fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # `gnnplan plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "show"):
            raise
        if "--json" in sys.argv[1:]:
            emit({"error": error.format_message(), "exit_code": 2})
        error.show()  # typer's, of a wrong option: with the verb's usage, on standard error
        code = 2
    if code == 130:
        fail("interrupted", 130)
    gc.freeze()  # nor at the end
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> int:
    """Say it to people, and to programs that asked for JSON."""
    if "--json" in sys.argv[1:]:
        emit({"error": message, "exit_code": code})
    say(f"error: {message}")
    return code
