"""Files in and out: YAML with line numbers, presets, overrides, complete-or-absent writing."""

from __future__ import annotations

import contextlib
import difflib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from gnnplan.planner.errors import SpecError

PRESETS = Path(__file__).resolve().parent.parent / "presets"
MAX_YAML = 4 << 20  # [B]; a cluster or workload is a page of text
Where = tuple[str | int, ...]  # ('device', 'memory')
Model = TypeVar("Model", bound=BaseModel)


def cache_dir() -> Path:
    """$GNNPLAN_CACHE, else $XDG_CACHE_HOME/gnnplan, else ~/.cache/gnnplan. Not created here."""
    if own := os.environ.get("GNNPLAN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnnplan"


def write_atomically(path: str | Path, data: str | bytes, parents: bool = False) -> None:
    """Write all or nothing: a temporary file beside `path`, then os.replace. Raises SpecError when the folder is missing or closed."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as stream:  # not tempfile: the file keeps the permissions that the umask gives
                stream.write(data.encode() if isinstance(data, str) else data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except FileNotFoundError as error:
        raise SpecError(f"{path}: the folder {path.parent} does not exist; create it first") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be written ({error.strerror or error}); choose another place or free it") from error


# --- YAML with line numbers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A parsed file and the line of each of its values."""

    path: str
    data: dict[str, Any]
    lines: dict[Where, int]

    def error(self, where: Where, message: str) -> SpecError:
        """'cluster.yaml:7: device.memory: ...'; a value that is absent is reported at the line of its parent."""
        return SpecError(f"{self.path}:{self.line(where)}: {_dotted(where)}: {message}")

    def line(self, where: Where) -> int:
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


def read_yaml(path: str | Path) -> Document:
    """A YAML mapping. Raises SpecError (file, line) for bad syntax, duplicate keys, aliases and anything that is not plain data."""
    try:
        with open(path, "rb") as stream:
            raw = stream.read(MAX_YAML + 1)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) > MAX_YAML:
        raise SpecError(f"{path}: larger than {MAX_YAML:,} B, so not a specification; give the right file")
    lines: dict[Where, int] = {}
    try:
        loader = yaml.SafeLoader(raw.decode())
        node = loader.get_single_node()
        data = {} if node is None else _plain(loader, node, (), lines, str(path), set())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SpecError(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path}:1: must be a mapping of fields (key: value), not {type(data).__name__}")
    return Document(str(path), data, lines)


def _plain(loader: yaml.SafeLoader, node: yaml.Node, where: Where, lines: dict[Where, int], path: str, seen: set[int]) -> Any:
    """Plain data of a node, noting lines; by hand because SafeLoader keeps the last of two equal keys and forgets marks."""
    line = node.start_mark.line + 1
    lines.setdefault(where, line)
    if id(node) in seen:  # also what defuses a billion laughs
        raise SpecError(f"{path}:{line}: {_dotted(where)}: anchors and aliases (&, *) are not supported; write the value out")
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{path}:{key_line}: {_dotted(where)}: a key must be a word or a number")
            key = loader.construct_object(key_node)
            if key in mapping:
                raise SpecError(f"{path}:{key_line}: {_dotted((*where, key))}: given twice, first in line {lines[(*where, key)]}; keep one")
            lines[(*where, key)] = key_line
            mapping[key] = _plain(loader, value_node, (*where, key), lines, path, seen)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, child, (*where, i), lines, path, seen) for i, child in enumerate(node.value)]
    return loader.construct_object(node)


def _dotted(where: Where) -> str:
    return ".".join(map(str, where)) or "the file"


def suggest(word: str, allowed: Iterable[str]) -> str:
    """'; did you mean X? Allowed: ...' for a misspelt word."""
    allowed = list(allowed)
    near = difflib.get_close_matches(str(word), allowed, n=1, cutoff=0.5)
    return (f"; did you mean {near[0]}?" if near else "; ") + f" Allowed: {', '.join(allowed)}"
