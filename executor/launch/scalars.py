"""A run's metrics as TensorBoard's scalars, epoch by epoch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gnnplan.planner.gnn.workload import scores_of
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import make_folder, must_be_folder

# a field of metrics.jsonl -> TensorBoard's tag; a score's is its metric's and its part's
TAGS = {
    "loss": "loss",
    "epoch_s": "epoch/seconds",
    "bytes": "epoch/bytes sent",
    "peak_memory_bytes": "memory/peak bytes",
}
WITHIN = 5  # [s] in which TensorBoard sees an epoch


def installed(folder: str) -> str:
    """In a word; raises SpecError where TensorBoard is not, or cannot have its folder."""
    if find_spec("tensorboard") is None:
        raise SpecError("TensorBoard is not installed; pip install 'gnnplan[tensorboard]'")
    must_be_folder(Path(folder))
    return "installed"


class Scalars:
    """Writes rows of metrics.jsonl into an event file; rank 0 has one.

    first: epochs that an earlier process has trained. What it wrote of later ones is no longer
    shown. Raises SpecError if the folder cannot be made.
    """

    def __init__(self, folder: str, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes half a second

        make_folder(Path(folder))
        self.writer = SummaryWriter(
            folder, purge_step=first + 1 if first else None, flush_secs=WITHIN
        )

    def add(self, row: dict[str, Any]) -> None:
        """Add an epoch; one that is not evaluated has no scores of val and test."""
        parts = {name: name.partition("_") for name in scores_of(row)}
        scores = {name: f"{metric}/{part}" for name, (part, _, metric) in parts.items()}
        for field, tag in (TAGS | scores).items():
            if row.get(field) is not None:
                self.writer.add_scalar(tag, row[field], row["epoch"])

    def close(self) -> None:
        self.writer.close()
