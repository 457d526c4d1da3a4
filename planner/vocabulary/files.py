"""Reading and writing files: YAML with line numbers, JSON, and atomic writes.

A file that cannot be read or written raises SpecError, which names the file and a remedy."""

from __future__ import annotations

import contextlib
import csv
import difflib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes

MAX_YAML = 1 << 18  # a specification is a page of text [B]
MOST_SHOWN = 80  # characters of a wrong value that a message repeats
MOST_MEMORY, PER_VALUE = 7e8, 56  # Python's memory [B] for a JSON document, and for one value
MOST_DIGITS = 300  # digits of a whole number, so that it fits a float
_NUMBERS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
_SCALARS = _NUMBERS | {f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "null")}
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # a file that `write_atomically` has not renamed yet
_OTHER = "choose another place or free it"
_OPEN = "allow more open files (ulimit -n 4096) and start again"
_REFUSALS = {  # errors of the system, no fault of the program -> remedy
    errno.EACCES: "get the right to use it, or choose another",
    errno.EMFILE: _OPEN,
    errno.ENFILE: _OPEN,
    errno.ENOSPC: "free the disk",
    errno.EDQUOT: "free the disk",
    errno.EROFS: _OTHER,
    errno.EIO: _OTHER,
    errno.ENAMETOOLONG: "choose a shorter name",
}
QUOTED = Path(__file__).resolve().parents[2] / "traces" / "quoted"  # tables that plans quote
Json = dict[str, Any]  # an object of a JSON document
Where = tuple[str | int, ...]  # the path of a value in a document, as ('device', 'memory')


def cache_dir() -> Path:
    """Return $GNNPLAN_CACHE, else $XDG_CACHE_HOME/gnnplan, else ~/.cache/gnnplan; may be absent."""
    if own := os.environ.get("GNNPLAN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnnplan"


def quoted(name: str) -> list[dict[str, str]]:
    """Return the rows of a table in `traces/quoted`: measured runs, or figures from papers."""
    with (QUOTED / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_atomically(
    path: str | Path, data: str | bytes | memoryview, parents: bool = False, at_once: bool = False
) -> None:
    """Write a temporary file next to `path`, then rename it, so that a file is complete or absent.

    Pipes and devices are written directly; a symbolic link is followed. parents: make missing
    folders. at_once: skip fsync, because a rank that waits for the disk looks dead to its peers.
    Raises SpecError if the file cannot be written.
    """
    path, raw = Path(path), data.encode() if isinstance(data, str) else data
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_bytes(raw)
            return
        path = _followed(path)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # The tempfile module would ignore the umask in the file's permissions.
            with open(temporary, "xb") as stream:
                stream.write(raw)
                stream.flush()
                if not at_once:
                    os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            must_have_parent(path)
        raise cannot_write(path, error) from error


def whole_lines(path: Path, most: int) -> tuple[int, int]:
    """Return the number of complete lines among a file's first `most`, and their bytes; 0, 0 if
    the file is absent."""
    if not path.exists():
        return 0, 0
    must_be_file(path)
    with open(path, "rb") as stream:
        lengths = [len(line) for line in islice(stream, most) if line.endswith(b"\n")]
    return len(lengths), sum(lengths)


def numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return number -> path of the files whose name matches, by rising number."""
    found = ((pattern.fullmatch(path.name), path) for path in folder.glob("*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def forget_unfinished(folder: Path) -> None:
    """Remove temporary files that killed writers left in a folder; nobody may be writing there."""
    for path in folder.glob(".*"):
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):  # a folder of that name belongs to the user
                path.unlink()


@contextlib.contextmanager
def _allowed(path: str | Path, refused: str, remedy: str) -> Iterator[None]:
    """Run a block that uses a path. Raises SpecError if the system refuses the path or its name."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name that contains a zero byte
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: {refused} ({why}); {remedy}") from error


def cannot_write(path: str | Path, error: OSError) -> SpecError:
    """Make the error for a file that cannot be written."""
    return SpecError(f"{path}: cannot be written ({error.strerror or error}); {remedy_of(error)}")


def refusal(error: BaseException) -> OSError | None:
    """Return the system's refusal of a file (a full disk, too many open files) behind an error.

    None for other errors. C++ libraries raise RuntimeErrors whose message alone names the refusal.

    >>> refusal(RuntimeError("socket: Too many open files")).errno == errno.EMFILE
    True
    """
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return error
    message = str(error)
    numbers = (number for number in _REFUSALS if os.strerror(number) in message)
    return next((OSError(number, os.strerror(number)) for number in numbers), None)


def remedy_of(error: OSError) -> str:
    """Return a remedy, in words, for an error of the system about a file."""
    return _REFUSALS.get(error.errno or 0, _OTHER)


def _followed(path: Path) -> Path:
    """Return the file that a symbolic link leads to; another path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def must_be_writable(path: Path) -> None:
    """Raise SpecError if `path` cannot become a file; called before long work."""
    must_have_parent(path)
    with _allowed(f"{str(path)[:MOST_SHOWN]}...", "cannot be written", "choose another name"):
        if path.is_dir():
            raise SpecError(f"{path}: is a folder; give the name of a file")


def must_have_parent(path: Path) -> None:
    """Raise SpecError if the folder of `path` is absent, or no file can be made in it."""
    if not path.parent.is_dir():
        must_be_folder(path.parent)
        raise SpecError(f"{path}: the folder {path.parent} does not exist; create it first")
    folder = _followed(path).parent
    if not os.access(folder, os.W_OK | os.X_OK) and (path.is_file() or not path.exists()):
        raise SpecError(f"{path}: cannot be written ({folder} is read-only); choose another place")


def must_be_folder(path: Path) -> None:
    """Raise SpecError unless `path` is a folder or can become one; called before long work."""
    place = nearest(path)
    if not place.is_dir():
        raise SpecError(f"{place}: is a file, but a folder is needed; give another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise SpecError(
            f"{path}: the folder cannot be written ({place} is not writable); choose another place"
        )


def nearest(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing parent. Raises SpecError."""
    path = path.absolute()
    with _allowed(path, "the folder cannot be made", "choose another place"):
        return next(place for place in (path, *path.parents) if place.exists())


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless it exists. Raises SpecError."""
    with _allowed(path, "the folder cannot be made", "choose another place"):
        if path.exists() and not path.is_dir():
            raise SpecError(f"{path}: is a file, but a folder is needed; give another place")
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def folder_lock(folder: Path, other: str, remedy: str) -> Iterator[None]:
    """Lock a folder for a block, against other processes of this machine that call this function.

    other: the start of the message if another process has the lock, as 'another run trains in'.
    The operating system releases the lock when this process ends, even if it is killed. Raises
    SpecError."""
    import fcntl  # not on Windows

    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"{other} {folder}; wait for its end, or {remedy}") from None
        except OSError:  # the file system has no locks
            pass
        yield
    finally:
        os.close(lock)


# -- reading


def must_be_file(path: str | Path, remedy: str = "give a file") -> None:
    """Raise SpecError unless `path` is a regular file: reading a pipe or a device may never end."""
    with _allowed(path, "cannot be read", remedy):
        mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        what = "Is a directory" if stat.S_ISDIR(mode) else "Is a pipe, a socket or a device"
        raise SpecError(f"{path}: cannot be read ({what}); {remedy}")


def read_bytes(path: str | Path, most: int, remedy: str = "give a file") -> bytes:
    """Read a file's content. Raises SpecError if it cannot be read or exceeds `most` [B]."""
    must_be_file(path, remedy)
    with _allowed(path, "cannot be read", remedy), open(path, "rb") as stream:
        # read(most) would allocate a buffer of `most` bytes.
        size = os.fstat(stream.fileno()).st_size
        raw = stream.read(size + 1) if size <= most else b""
    if max(size, len(raw)) > most:
        raise SpecError(
            f"{path}: larger than {show_bytes(most)}, so not what is expected here; {remedy}"
        )
    return raw


def read_json(path: str | Path, most: int, remedy: str) -> Any:
    """Read a file's JSON document. Raises SpecError if it is not JSON or exceeds `most` [B]."""
    raw = read_bytes(path, most, remedy)
    must_be_readable(path, raw, remedy)
    return from_json(path, raw, remedy)


def must_be_readable(path: str | Path, raw: bytes, remedy: str) -> None:
    """Raise SpecError if Python's objects for a JSON text would fill more than MOST_MEMORY.

    The number of values is bounded by the separators: a value follows a comma, colon or bracket.
    """
    values = sum(raw.count(mark) for mark in (b",", b"[", b"{", b":", b"\n"))
    need = 2.0 * len(raw) + PER_VALUE * values
    if need > MOST_MEMORY:
        raise SpecError(
            f"{path}: {show_bytes(len(raw))} with {values:,} values would fill {show_bytes(need)}"
            f" of memory, and {show_bytes(MOST_MEMORY)} are the most that is read; {remedy}"
        )


def from_json(where: str | Path, raw: str | bytes, remedy: str) -> Any:
    """Parse a JSON document with finite numbers. Raises SpecError, which names `where`."""

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


# -- YAML with line numbers


@dataclass(frozen=True)
class Document:
    """A parsed YAML file, with the line number of each value."""

    path: str
    data: dict[str, Any]
    lines: dict[Where, int]

    def error(self, where: Where, message: str) -> SpecError:
        """Make an error about a value, as 'cluster.yaml:7: device.memory: ...'."""
        return SpecError(f"{self.path}:{self.line(where)}: {dotted(where)}: {message}")

    def line(self, where: Where) -> int:
        """Return the line of a value; if the value is absent, the line of its nearest parent."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


def read_yaml(path: str | Path) -> Document:
    """Read a file's YAML mapping.

    Raises SpecError, with the line, for bad syntax, duplicate keys, aliases and tags of anything
    but plain data.
    """
    raw = read_bytes(path, MAX_YAML, "give the file of a specification")
    try:
        reader = _Plain(str(path), yaml.SafeLoader(raw.decode()))
        node = reader.loader.get_single_node()
        data = {} if node is None else reader.of(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SpecError(
            f"{path}:{mark.line + 1 if mark else 1}: not valid YAML:"
            f" {error.problem or error.context}; mend this line"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(
            f"{path}: not valid YAML: {str(error).splitlines()[0]}; save it as text in UTF-8"
        ) from error
    if not isinstance(data, dict):
        raise SpecError(
            f"{path}:1: must be a mapping of fields (key: value), not {type(data).__name__}"
        )
    return Document(str(path), data, reader.lines)


@dataclass
class _Plain:
    """A converter of YAML nodes to plain data, which records the nodes' lines.

    PyYAML's SafeLoader silently keeps the last of two equal keys, and drops the lines.
    """

    path: str
    loader: yaml.SafeLoader
    lines: dict[Where, int] = field(default_factory=dict)
    seen: set[yaml.Node] = field(default_factory=set)

    def of(self, node: yaml.Node, where: Where) -> Any:
        """Convert a node to plain data. Raises SpecError."""
        self.lines.setdefault(where, node.start_mark.line + 1)
        if node in self.seen:  # an alias; a few lines of them can mean gigabytes ("billion laughs")
            text = "anchors and aliases (&, *) are not supported; write the value out"
            raise self.wrong(node, where, text)
        self.seen.add(node)
        if isinstance(node, yaml.MappingNode):
            mapping: dict[Any, Any] = {}
            for key_node, value_node in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    raise self.wrong(key_node, where, "a key must be a word or a number")
                key = self.scalar(key_node, where)
                inside = (*where, key)
                if key in mapping:
                    first = self.lines[inside]
                    raise self.wrong(
                        key_node, inside, f"given twice, first in line {first}; keep one"
                    )
                self.lines[inside] = key_node.start_mark.line + 1
                mapping[key] = self.of(value_node, inside)
            return mapping
        if isinstance(node, yaml.SequenceNode):
            return [self.of(child, (*where, i)) for i, child in enumerate(node.value)]
        return self.scalar(node, where)

    def scalar(self, node: yaml.Node, where: Where) -> Any:
        """Convert a scalar node to text, a number, a boolean, a date or None.

        Raises SpecError for other tags, and for text that contradicts its tag ('!!timestamp soon').
        """
        if "\0" in node.value:
            raise self.wrong(node, where, "must not hold a zero byte; leave it out")
        if node.tag not in _SCALARS or (node.tag in _NUMBERS and len(node.value) > MOST_SHOWN):
            text = f"must be text or a number of at most {MOST_SHOWN} digits; write it so"
            raise self.wrong(node, where, text)
        try:
            return self.loader.construct_object(node)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:  # all by PyYAML
            tag = node.tag.rpartition(":")[2]
            raise self.wrong(node, where, f"not what its tag {tag} says; leave it out") from error

    def wrong(self, node: yaml.Node, where: Where, text: str) -> SpecError:
        """Make an error with the line of a node and the path of its value."""
        return SpecError(f"{self.path}:{node.start_mark.line + 1}: {dotted(where)}: {text}")


def dotted(where: Where) -> str:
    """Return the path of a value as text, as 'device.memory'."""
    return ".".join(str(name)[:MOST_SHOWN] for name in where) or "the file"


def meant(word: str, allowed: Iterable[str], usual: Mapping[str, str] | None = None) -> str:
    """Return the allowed name that a word means, in any case and with - or _; else the word.

    usual: other names in use, in lower case with _ -> an allowed name.

    >>> meant("GCN", ["gcn", "sage"]), meant("Data-Parallel", ["data_parallel"]), meant("x", ["y"])
    ('gcn', 'data_parallel', 'x')
    """
    names, plain = {_plain(name): name for name in allowed}, _plain(word)
    other = (usual or {}).get(plain, "")
    return word if word in names.values() else names.get(plain) or names.get(other) or word


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "_")


def one_of(what: str, word: object, allowed: Iterable[str]) -> str:
    """Return the allowed name that a word means (`meant`).

    what: the beginning of the message, such as '--for'. Raises SpecError with the nearest name.
    """
    allowed = list(allowed)
    if (name := meant(str(word), allowed)) not in allowed:
        raise SpecError(f"{what} {word!r:.100} is unknown{suggest(str(word), allowed)}")
    return name


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Return the end of a message about a misspelt word: '; did you mean X? Allowed: ...'."""
    allowed = list(allowed)
    if not allowed:
        return ""
    near = likeliest(word, allowed)
    return (f"; did you mean {near}? Allowed: " if near else "; allowed: ") + ", ".join(allowed)


def likeliest(word: object, allowed: Iterable[str]) -> str:
    """Return the allowed name that is most like a misspelt word; '' if none is."""
    lower, text = {name.lower(): name for name in allowed}, str(word)[:MOST_SHOWN].lower()

    def likeness(name: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, name, text).ratio(), name[:1] == text[:1]

    near = max(lower, key=likeness, default="")
    return lower[near] if near and likeness(near)[0] >= 0.5 else ""
