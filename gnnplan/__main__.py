"""The command line, as `gnnplan` and as `python -m gnnplan`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the program; Ctrl-C during its imports also ends it without a traceback."""
    try:
        from gnnplan.cli import main as program
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    program()


if __name__ == "__main__":
    main()
