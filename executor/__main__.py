"""The program of a process that gnnplan's launcher starts.

python -P -m gnnplan.executor launch ...     trains as one rank
python -P -m gnnplan.executor measure ...    measures as one rank
python -P -m gnnplan.executor check ...      compares gradients as one rank
"""

import gc
import sys
from importlib import import_module

PROGRAMS = {
    "launch": "gnnplan.executor.launch.rank_process",
    "measure": "gnnplan.executor.measure.measure",
    "check": "gnnplan.executor.launch.check",
}

# Imported objects stay alive. Searching them for reference cycles took a seventh of a rank's start.
gc.disable()
module = import_module(PROGRAMS[sys.argv.pop(1)])
gc.freeze()
gc.enable()
module.main()
