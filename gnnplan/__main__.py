"""The command line, as `python -m gnnplan`."""

from gnnplan.cli import main

main()
