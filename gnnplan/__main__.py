"""python -m gnnplan"""

from gnnplan.cli import main

main()
