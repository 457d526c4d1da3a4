"""One rank's process: `python -m gnnplan.executor launch ...` trains, `measure ...` measures; its launcher starts it."""

import gc
import sys
from importlib import import_module

gc.disable()  # a seventh of a rank's start: to look for circles, again and again, in what is imported and stays
module = import_module(f"gnnplan.executor.{sys.argv.pop(1)}")
gc.freeze()
gc.enable()
module.main()
