"""Files in and out: YAML with line numbers, presets, overrides, complete-or-absent writing."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from gnnplan.planner.errors import SpecError
from gnnplan.planner.specs import Cluster, Workload
from gnnplan.planner.units import show_bytes

PRESETS = Path(__file__).resolve().parent.parent / "presets"
MAX_YAML = 1 << 18  # [B]; a cluster or workload is a page of text
MOST_SHOWN = 80  # characters of a wrong value that a message repeats
MOST_MISTAKES = 20  # told at once
MOST_DIGITS = 300  # of a whole number, which must fit a float
_NUMBERS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
_SCALARS = _NUMBERS | {f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "null")}
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
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.exists():
            raise SpecError(f"{path}: the folder {path.parent} does not exist; create it first") from error
        raise SpecError(f"{path}: cannot be written ({error.strerror or error}); choose another place or free it") from error


def must_be_writable(path: Path) -> None:
    """Raises SpecError before long work rather than after it."""
    if not path.parent.is_dir():
        raise SpecError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise SpecError(f"{path}: is a folder; give the name of a file")


def make_folder(path: Path) -> None:
    """With its parents. Raises SpecError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise SpecError(f"{path}: is a file, but a folder is needed; give another place") from error
    except OSError as error:
        raise SpecError(f"{path}: the folder cannot be made ({error.strerror or error}); choose another place") from error


# --- reading ---------------------------------------------------------------------------------------------------------------------------


def must_be_file(path: str | Path, remedy: str = "give a file") -> None:
    """Raises SpecError for what is absent, and for what reading might never come back from: a pipe, a socket, a device."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise SpecError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {remedy}") from error
    if not stat.S_ISREG(mode):
        what = "Is a directory" if stat.S_ISDIR(mode) else "Is a pipe, a socket or a device"
        raise SpecError(f"{path}: cannot be read ({what}); {remedy}")


def read_bytes(path: str | Path, most: int, remedy: str = "give a file") -> bytes:
    """A whole file. Raises SpecError where it is none, is closed to us, or is larger than `most` [B]."""
    must_be_file(path, remedy)
    try:
        with open(path, "rb") as stream:
            raw = stream.read(min(os.fstat(stream.fileno()).st_size, most) + 1)  # no buffer of the size that is allowed
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from error
    if len(raw) > most:
        raise SpecError(f"{path}: larger than {show_bytes(most)}, so not what is expected here; {remedy}")
    return raw


def read_json(path: str | Path, most: int, remedy: str) -> Any:
    """A file of one JSON document of at most `most` [B]. Raises SpecError."""
    return from_json(path, read_bytes(path, most, remedy), remedy)


def from_json(where: str | Path, raw: str | bytes, remedy: str) -> Any:
    """Plain data, with finite numbers. Raises SpecError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    def number(digits: str) -> int:
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    def real(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text[:MOST_SHOWN]} is too large a number")
        return value

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        return json.loads(text, parse_constant=refuse, parse_int=number, parse_float=real)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not JSON ({error}); {remedy}") from error


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
    raw = read_bytes(path, MAX_YAML, "give the file of a specification")
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
            key = _scalar(loader, key_node, where, path, key_line)
            if key in mapping:
                raise SpecError(f"{path}:{key_line}: {_dotted((*where, key))}: given twice, first in line {lines[(*where, key)]}; keep one")
            lines[(*where, key)] = key_line
            mapping[key] = _plain(loader, value_node, (*where, key), lines, path, seen)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, child, (*where, i), lines, path, seen) for i, child in enumerate(node.value)]
    return _scalar(loader, node, where, path, line)


def _scalar(loader: yaml.SafeLoader, node: yaml.Node, where: Where, path: str, line: int) -> Any:
    """Text, a number, a truth value, a date or nothing. Raises SpecError for a tag that its text does not suit ('!!timestamp soon')."""
    if node.tag not in _SCALARS or (node.tag in _NUMBERS and len(node.value) > MOST_SHOWN):
        raise SpecError(f"{path}:{line}: {_dotted(where)}: must be text or a number of at most {MOST_SHOWN} digits; write it so")
    try:
        return loader.construct_object(node)
    except (ValueError, LookupError, AttributeError, OverflowError) as error:  # what PyYAML lets through
        raise SpecError(f"{path}:{line}: {_dotted(where)}: not what its tag {node.tag.rpartition(':')[2]} says; leave it out") from error


def _dotted(where: Where) -> str:
    return ".".join(str(name)[:MOST_SHOWN] for name in where) or "the file"


def suggest(word: str, allowed: Iterable[str]) -> str:
    """'; did you mean X? Allowed: ...', the end of a message about a misspelt word."""
    allowed = list(allowed)
    if not allowed:
        return ""
    near = difflib.get_close_matches(str(word)[:MOST_SHOWN], allowed, n=1, cutoff=0.5)
    return (f"; did you mean {near[0]}? Allowed: " if near else "; allowed: ") + ", ".join(allowed)


# --- specifications --------------------------------------------------------------------------------------------------------------------


def read_cluster(name_or_path: str, overrides: Mapping[str, str] | None = None) -> Cluster:
    """A cluster from a YAML file or a preset; `overrides` as {'inter_node.bandwidth': '25GB/s'}.

    'local' is what `gnnplan measure` left in the cache directory, else cautious defaults. Raises SpecError with file, line and field.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        presets = sorted(preset.stem for preset in PRESETS.glob("*.yaml"))
        if name_or_path not in presets:
            raise SpecError(f"{name_or_path}: neither a .yaml file nor a preset{suggest(name_or_path, presets)}")
        path = PRESETS / f"{name_or_path}.yaml"
        if name_or_path == "local" and (measured := cache_dir() / "local.yaml").exists():
            path = measured
    document = read_yaml(path)
    return _overridden(checked(Cluster, document.data, document), overrides or {})


def read_workload(path: str | None = None, flags: Mapping[str, object] | None = None,
                  overrides: Mapping[str, str] | None = None) -> Workload:
    """A workload: the defaults, then the file, then `flags` (by field name; None is not given), then `overrides`."""
    document = read_yaml(path) if path else Document("the defaults", {}, {})
    workload = checked(Workload, document.data, document)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for name in given:
        if name not in Workload.model_fields:
            raise SpecError(f"--{name}: not a field of a workload{suggest(name, Workload.model_fields)}")
    if given:
        workload = checked(Workload, workload.model_dump() | given, "--")
    return _overridden(workload, overrides or {})


def apply_overrides(cluster: Cluster, workload: Workload, settings: Sequence[str]) -> tuple[Cluster, Workload]:
    """Both after settings such as 'servers=16', 'inter_node.bandwidth=25GB/s', 'hidden=256'; the field's name says whose it is."""
    ours: dict[str, dict[str, str]] = {"cluster": {}, "workload": {}}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key, first = key.strip(), key.strip().partition(".")[0]
        if not equals or not value.strip():
            raise SpecError(f"--set {setting}: must read field=value, as servers=16 or inter_node.bandwidth=25GB/s")
        if first not in Cluster.model_fields and first not in Workload.model_fields:
            raise SpecError(f"--set {setting}: no such field{suggest(key, [*_leaves(Cluster), *_leaves(Workload)])}")
        ours["cluster" if first in Cluster.model_fields else "workload"][key] = value.strip()
    return _overridden(cluster, ours["cluster"]), _overridden(workload, ours["workload"])


def _overridden(model: Model, overrides: Mapping[str, str]) -> Model:
    """The model with dotted fields replaced, checked as a whole; a cluster remembers in its provenance that a number was set by hand."""
    if not overrides:
        return model
    data = model.model_dump()
    for key, value in overrides.items():
        path = key.split(".")
        if path[0] == "collectives" and len(path) > 2:  # its keys have a dot themselves: collectives.all_reduce.intra_node.bandwidth
            path = [path[0], ".".join(path[1:-1]), path[-1]]
        target = data
        for name in path[:-1]:
            if target.get(name) is None:
                target[name] = {}
            target = target[name]
            if not isinstance(target, dict):
                raise SpecError(f"--set {key}: {name} is a single value without fields{suggest(key, _leaves(type(model)))}")
        target[path[-1]] = value
        if "provenance" in data and path[0] not in ("provenance", "name"):
            data["provenance"][key] = "--set"
    changed = checked(type(model), data, "--set ")
    if isinstance(model, Cluster) and isinstance(changed, Cluster):
        by_hand = {key.rpartition(".")[0].removeprefix("collectives.") for key in overrides}
        return type(model).model_validate(changed.carried(model, by_hand))
    return changed


def checked(kind: type[Model], data: Mapping[Any, Any], source: Document | str) -> Model:
    """A model of the data, or SpecError with a line per mistake; `source` is a document or what to put before a field's name."""
    if kind is Workload and isinstance(data, Mapping) and isinstance(fanout := data.get("fanout"), str) and fanout != "full":
        data = {**data, "fanout": tuple(number.strip() for number in fanout.split(","))}
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        mistakes = []
        errors = error.errors(include_url=False, include_context=False)
        for item in errors[:MOST_MISTAKES]:
            where, message = _mistake(kind, item["loc"], item["type"], item["msg"])
            mistakes.append(str(source.error(where, message)) if isinstance(source, Document) else
                            f"{source}{_dotted(where) if where else ''}".strip() + f": {message}")
        mistakes += [f"and {len(errors) - MOST_MISTAKES:,} more mistakes"] * (len(errors) > MOST_MISTAKES)
        raise SpecError("\n".join(dict.fromkeys(mistakes))) from error
    except TypeError as error:  # from a validator that was given a list, a mapping or nothing
        name = source.path if isinstance(source, Document) else source.strip()
        raise SpecError(f"{name}: a field is empty, a list or a mapping where a number is expected ({error})") from error


def _mistake(kind: type[BaseModel], loc: Where, rule: str, message: str) -> tuple[Where, str]:
    """Where and what, in the file's words rather than pydantic's."""
    parent = _model_at(kind, loc[:-1])
    if rule == "extra_forbidden":
        return loc, f"unknown field{suggest(str(loc[-1]), parent.model_fields if parent else [])}"
    if rule == "missing":
        return loc, "missing; this field is required"
    if loc[:1] == ("fanout",):  # a union: pydantic reports each branch
        return loc[:1], "must be full, or a number of neighbours per layer such as 15,10"
    return loc, message.removeprefix("Value error, ").replace("Input should be", "must be")


def _model_at(kind: type[BaseModel], where: Where) -> type[BaseModel] | None:
    """The model that sits at a place of another; the keys of a dictionary of models lead to its models."""
    current: type[BaseModel] | None = kind
    for name in where:
        if current and name in current.model_fields:
            current = _inner(current.model_fields[str(name)].annotation)
    return current


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The model in `Link`, `Link | None` or `dict[str, Link]`."""
    return next((kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _leaves(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all fields that --set can name."""
    names = []
    for name, field in kind.model_fields.items():
        inner = _inner(field.annotation)
        names += _leaves(inner, f"{prefix}{name}.") if inner and get_origin(field.annotation) is not dict else [prefix + name]
    return names
