"""The program of a process that gnnplan's launcher starts.

python -P -m gnnplan.executor launch FOLDER                        trains as one rank
python -P -m gnnplan.executor measure FOLDER SECONDS DTYPE EACH    measures as one rank
python -P -m gnnplan.executor check FOLDER                         compares gradients as one rank
"""

import gc
import signal
import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = {
    "launch": "gnnplan.executor.launch.rank_process",
    "measure": "gnnplan.executor.measure.measure",
    "check": "gnnplan.executor.launch.check",
}

signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher handles Ctrl-C
# Imported objects stay alive. Searching them for reference cycles took a seventh of a rank's start.
gc.disable()
work = import_module(PROGRAMS[sys.argv.pop(1)]).work
be_rank = import_module("gnnplan.executor.launch.failure").be_rank
gc.freeze()
gc.enable()
be_rank(Path(sys.argv[1]), work)
