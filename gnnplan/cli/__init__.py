"""The command line: one file per verb, or per group of similar verbs.

A verb's signature and docstring define its options and their help; common.py adds the options of
the function that the verb calls. A verb imports modules when it is called, so that --help comes at
once.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import typer

from gnnplan.cli.common import app, print_json
from gnnplan.planner.vocabulary.progress import say

# in the order that --help lists the verbs
for _verbs in ["graphs", "plan", "training", "files"]:
    import_module(f"gnnplan.cli.{_verbs}")


def main() -> NoReturn:
    """Run the program; print an error that a user can mend as one line, and exit with its code.

    Exit codes: see `gnnplan --help`. Other errors keep their traceback.
    """
    from gnnplan.planner.vocabulary.errors import GnnplanError

    code: Any = 1
    output_error: OSError | None = None
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):  # the encoding may lack characters of a file's name
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # a stream shared with a forked process may refuse
                stream.reconfigure(errors="backslashreplace")
    # Collect garbage every 10,000 new objects instead of 700: it took a fifth of a plan's time.
    gc.set_threshold(10_000)
    try:
        code = app(standalone_mode=False)
    except GnnplanError as error:
        code = fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort) as error:
        if isinstance(error.__cause__, EOFError):  # which typer takes for the end of a prompt
            raise error.__cause__ from None
        code = 130
    except OSError as error:
        if error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            output_error = error  # without a file name: standard output
        else:
            code = _fail_by_system(error)
    except ValueError as error:
        named = _refused_variable(str(error))
        if named is None:
            raise
        code = fail(f"{named}={os.environ[named]!r:.80}: torch refuses it; mend or unset it", 2)
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "show"):
            raise
        if "--json" in sys.argv[1:]:
            print_json({"error": error.format_message(), "exit_code": 2})
        error.show()  # a wrong option: typer prints the verb's usage on standard error
        code = 2
    if code == 130:
        fail("interrupted", 130)
    flush_error = _flush()
    output_error = output_error or flush_error
    if isinstance(output_error, BrokenPipeError):  # `gnnplan plan | head`
        code = 1
    elif output_error is not None:
        said = f"standard output cannot be written ({output_error.strerror})"
        say(f"error: {said}, so the answer is not whole; send it to another place")
        code = 2
    gc.freeze()  # skip the collection at exit
    sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream (`gnnplan plan >&-`); otherwise the next file
    opened would get the stream's number, and the text printed to it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if number else "r")  # noqa: SIM115
            if stream.fileno() != number:
                os.dup2(stream.fileno(), number)
            os.set_inheritable(number, True)
            setattr(sys, name, stream)


def _flush() -> OSError | None:
    """Flush standard output; on an error, redirect it to /dev/null and return the error."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _refused_variable(said: str) -> str | None:
    """Return the environment variable whose value torch refuses, found in the error's text."""
    for name in ("TORCH_LOGS_FORMAT", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "LOGLEVEL"):
        value = os.environ.get(name)
        if value and (name in said or re.search(rf"(: |'){re.escape(value)}['.,]", f"{said}.")):
            return name
    return None


def _fail_by_system(error: OSError) -> int:
    """Print a refusal of the operating system; raise an error that may be a bug of gnnplan."""
    from gnnplan.planner.vocabulary.files import MOST_SHOWN, refusal, remedy_of

    if refusal(error) is None:
        raise error
    where = f"{str(error.filename)[:MOST_SHOWN]}: " if error.filename else ""
    return fail(f"{where}{error.strerror}; {remedy_of(error)}", 2)


def fail(message: str, code: int) -> int:
    """Print an error as text, and with --json also as JSON; return the exit code."""
    if "--json" in sys.argv[1:]:
        print_json({"error": message, "exit_code": code})
    say(f"error: {message}")
    return code
