"""The command line: a file per verb.

common.py has what the verbs share. Every verb imports what it needs when it is called, so that
--help comes at once.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer

from gnnplan.cli.common import app, print_json
from gnnplan.planner.vocabulary.progress import say

# in the order of --help
for _verb in (
    "convert",
    "profile",
    "check",
    "plan",
    "simulate",
    "tune",
    "run",
    "validate",
    "trace",
    "emit",
    "report",
    "measure",
):
    import_module(f"gnnplan.cli.{_verb}")


def main() -> NoReturn:
    """Run the program; an error that a user can mend is one line and an exit code.

    Exit codes: see `gnnplan --help`. Other errors keep their traceback.
    """
    from gnnplan.planner.vocabulary.errors import GnnplanError

    code: Any = 1
    # The collector runs after 10,000 new objects instead of 700: it took a fifth of a plan's time.
    gc.set_threshold(10_000)
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
            print_json({"error": error.format_message(), "exit_code": 2})
        error.show()  # a wrong option: typer prints the verb's usage on standard error
        code = 2
    if code == 130:
        fail("interrupted", 130)
    gc.freeze()  # and not once more at exit
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> int:
    """Print an error for people, and as JSON for programs that asked for it."""
    if "--json" in sys.argv[1:]:
        print_json({"error": message, "exit_code": code})
    say(f"error: {message}")
    return code
