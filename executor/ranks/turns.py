"""A rank of a run that trains in turns waits here (launch/turns.py)."""

from __future__ import annotations

import time
from pathlib import Path

FILE = "turns"  # in the run's folder: how many epochs may be trained, or "end"
LOOK_S = 0.02  # [s] between two looks


def may_train(folder: Path, epoch: int) -> bool:
    """Wait until this epoch, counted from 0, may be trained -> False: no more will be."""
    while (turns := (folder / FILE).read_text()) != "end":
        if epoch < int(turns):
            return True
        time.sleep(LOOK_S)
    return False
