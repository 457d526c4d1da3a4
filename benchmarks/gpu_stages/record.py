"""The record of a stage: a JSON document that is written anew after every row."""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TRAINED = ("one", "shared", "further", "modules")  # stages whose losses are the CPU's


class LeftOut(Exception):
    """Something that this machine cannot do; says why."""


@dataclass(frozen=True)
class Setting:
    """Where stages run, and where they write."""

    out: Path
    device: str  # 'cuda' or 'cpu'
    small: bool = False  # sizes of a rehearsal
    only: tuple[str, ...] = ()  # attempts whose name has one of these words; none: all

    @property
    def torch_device(self) -> Any:
        """The device with its number; RuntimeError if there is none."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} finds no CUDA device; look at `nvidia-smi`, or rehearse"
                " with --device cpu --small"
            )
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")


def about(setting: Setting) -> Row:
    """The machine: processor, card, driver's CUDA and versions."""
    import torch

    found: Row = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": setting.device,
        "name": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    if setting.torch_device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {
            "name": properties.name,
            "cards": torch.cuda.device_count(),
            "memory": properties.total_memory,
            "l2": getattr(properties, "L2_cache_size", None),
            "cuda": torch.version.cuda,
            "nccl": nccl,
        }
    return found


class Record:
    """The document of one stage. `path`: STAGE.json in the output folder."""

    def __init__(self, setting: Setting, stage: str) -> None:
        self.path = setting.out / f"{stage}.json"
        self.stage, self.only = stage, setting.only
        self.began = time.monotonic()
        self.document: dict[str, Any] = {
            "stage": stage,
            "small": setting.small,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "ended": False,  # stays so if the process dies
            "under_way": "",  # what it does then
            "rows": [],
            "failed": [],
            "left_out": [],
        }
        self._write()

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        return list(self.document["rows"])

    def asks(self, what: str) -> bool:
        """Whether an attempt of this name is asked for."""
        return not self.only or any(words in what for words in self.only)

    def attempt(self, what: str, work: Callable[[], Row | Sequence[Row] | None]) -> None:
        """Do some work, and keep its rows, or its error.

        What a row calls `wrong`, a list of words, is noted as failed too.
        """
        if not self.asks(what):
            return
        self.note(under_way=what)
        print(f"{self.stage}: {what}", flush=True)
        try:
            made = work()
        except LeftOut as reason:
            self.leave_out(what, str(reason))
            return
        except Exception as error:
            self.fail(what, error)
            return
        rows = [made] if isinstance(made, dict) else list(made or ())
        self.document["rows"] += rows
        for row in rows:
            for words in row.get("wrong", ()):
                self.document["failed"].append({"what": what, "error": words, "trace": ""})
        self._write()

    def leave_out(self, what: str, why: str) -> None:
        """Note what is not done here."""
        self.document["left_out"].append({"what": what, "why": why})
        self._write()

    def fail(self, what: str, error: Exception) -> None:
        """Note an error."""
        words = f"{type(error).__name__}: {error}"
        print(f"{self.stage}: {what} FAILED: {words}", flush=True)
        trace = "".join(traceback.format_exception(error))[-4000:]
        self.document["failed"].append({"what": what, "error": words[:2000], "trace": trace})
        self._write()
        _free_memory()

    def note(self, **more: Any) -> None:
        """Keep something besides rows."""
        self.document |= more
        self._write()

    def end(self) -> dict[str, Any]:
        """The stage is over."""
        self.note(ended=True, under_way="")
        return self.document

    def _write(self) -> None:
        self.document["seconds"] = round(time.monotonic() - self.began, 2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.document)


def write_json(path: Path, document: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    temporary.replace(path)


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
