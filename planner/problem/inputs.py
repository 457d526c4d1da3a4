"""Reading of clusters and workloads from presets, YAML files, options and --set.

An error names the file and line, or the option. A datasheet does not state the speed of other
people's code and links. The file of a paper's testbed has datasheet values;
traces/quoted/fitted.csv has at most three factors on these values per testbed, and names the tables
that the factors were fitted to (benchmarks/papers/calibrate.py). A plan reads a preset with these
factors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError

from gnnplan.planner.cluster import machines
from gnnplan.planner.cluster.scaling import multiplied
from gnnplan.planner.cluster.spec import PRESETS, Cluster
from gnnplan.planner.gnn.workload import WORKLOADS, Workload, is_module
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import (
    Document,
    cache_dir,
    from_json,
    meant,
    quoted,
    read_yaml,
    suggest,
)
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.spec import mistakes, spec_in
from gnnplan.planner.vocabulary.units import number_of

# options of `plan` that look like fields of the cluster or the workload
OPTIONS = (
    "ranks",
    "strategy",
    "objective",
    "partitioner",
    "features",
    "labels",
    "cluster",
    "graph",
)
RENAMED = {"work": "core_s_per_byte"}  # old -> new name; files of 0.1.0 are read until 0.3.0
# Fields of older cluster files, which are ignored: each improved predictions by less than one
# percentage point (docs/explanation/cost-model.md).
LEFT_OUT = {
    *("weight_gradient", "device.weight_gradient", "memory_rates"),
    *("host_latency", "timeslice_slowdown", "cold_cache_penalty", "core_s_per_message"),
    *("cache_bandwidth", "device.cache_bandwidth", "crowding", "refill", "wake"),
}
Model = TypeVar("Model", bound=BaseModel)


def read_cluster(name_or_path: str) -> Cluster:
    """Read a cluster from a YAML file, a preset, or the name under which a cloud rents a server.

    The cluster 'local' is the file that `gnnplan measure` wrote in the cache directory; without
    that file, this machine's GPUs with the constants of their presets; without GPUs, a preset of
    two CPU ranks with cautious constants. Raises SpecError with file, line and field."""
    rented, name_or_path = machines.instance_types(), cluster_name(name_or_path)
    if name_or_path in rented:
        base = read_cluster(machines.base_of(name_or_path))
        return checked(Cluster, machines.fields_of(name_or_path, base), f"{name_or_path}: ")
    sizes = [name for name in rented if name.lower().startswith(name_or_path.lower())]
    if name_or_path and sizes and not Path(name_or_path).exists():
        raise SpecError(f"{name_or_path}: servers have a size too; use one of {', '.join(sizes)}")
    path = _file_of(name_or_path, PRESETS, rented)
    if name_or_path == "local":
        if (measured := cache_dir() / "local.yaml").exists():
            try:
                return read_cluster(str(measured))
            except SpecError as error:  # of another version, or damaged
                raise SpecError(f"{error}; `gnnplan measure` writes it anew") from error
        # imported here to spare training ranks the imports of this module
        from gnnplan.planner.cluster.machines import gpus_here

        if gpus := gpus_here():
            return gpus
    document = read_yaml(path)
    return checked(Cluster, document.data, document)


def cluster_name(name_or_path: str) -> str:
    """Return the name of a preset or of a cloud's server, which is meant in any case; a path as is.

    >>> cluster_name("DGX-A100"), cluster_name("mine.yaml")
    ('dgx_a100', 'mine.yaml')
    """
    return _name_of(name_or_path, [*machines.instance_types(), *names_in(PRESETS)])


def names_in(presets: Path) -> list[str]:
    """Return the names of the presets in a folder."""
    return sorted(preset.stem for preset in presets.glob("*.yaml"))


def _name_of(name_or_path: str, names: Collection[str]) -> str:
    return name_or_path if Path(name_or_path).exists() else meant(name_or_path, names)


def _file_of(name_or_path: str, presets: Path, others: Collection[str] = ()) -> Path:
    """Return the YAML file of a path, or of a preset in the folder `presets`.

    Raises SpecError, which suggests names of presets and `others`."""
    names = names_in(presets)
    name_or_path = _name_of(name_or_path, names)
    path = Path(name_or_path)
    if name_or_path in names:
        return presets / f"{name_or_path}.yaml"
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise SpecError(
            f"{name_or_path}: neither a .yaml file nor a preset"
            f"{suggest(name_or_path, [*names, *others])}"
        )
    return path


@dataclass(frozen=True)
class WorkloadRequest:
    """A workload as the user requested it, before a module of the user's is read.

    module: FILE.py:NAME of the user's own model, if any; the workload then lacks the fields that
    the module decides. given: the fields that the user set. fanout: with a module, the value that
    is checked once the module's number of layers is known."""

    workload: Workload
    module: str | None
    given: tuple[str, ...]
    fanout: object = None


def ask_workload(
    source: str | Mapping[str, Any] | None = None, flags: Mapping[str, object] | None = None
) -> WorkloadRequest:
    """Make a workload from the defaults, changed by `source`, then by `flags`.

    source: a YAML file, a preset (the settings of a paper), or a mapping of fields. flags: field ->
    value of its option; None if the user did not give the option. A module's path in a file is
    relative to the file. Raises SpecError with file, line and field, or with the option."""
    origin: Document | str
    if isinstance(source, str):
        path = _file_of(source, WORKLOADS)
        origin = read_yaml(path)
        data, module = _without_module(origin.data)
        module = str(path.resolve().parent / module) if module else None
    else:
        origin = "workload: "
        data, module = _without_module(source or {})
    fanout = data.pop("fanout", None) if module else None
    workload = checked(Workload, data, origin)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for name in given:
        if name not in Workload.model_fields:
            raise SpecError(
                f"{name}: neither an argument nor a field of a"
                f" workload{suggest(name, [*Workload.model_fields, *OPTIONS])}"
            )
    if "model" in given:
        given, module = _without_module(given)
    if module:
        fanout = given.pop("fanout", fanout)
    elif fanout is not None:  # an option replaces the file's module, but not the file's fanout
        given = {"fanout": fanout, **given}
    if given:
        workload = checked(Workload, workload.model_dump() | given, "--", given)
    named = dict.fromkeys([*data, *given, *(["fanout"] if module and fanout else [])])
    return WorkloadRequest(workload, module, tuple(map(str, named)), fanout if module else None)


def _without_module(fields: Mapping[Any, Any]) -> tuple[dict[Any, Any], str | None]:
    """Split off a `model` that is the user's module (FILE.py:NAME); None for any other model."""
    if not is_module(fields.get("model")):
        return dict(fields), None
    return {name: value for name, value in fields.items() if name != "model"}, fields["model"]


def apply_overrides(
    cluster: Cluster, workload: Workload, settings: Sequence[str]
) -> tuple[Cluster, Workload]:
    """Change cluster and workload by settings such as 'servers=16' and 'hidden=256'.

    The name of a field determines whether it belongs to the cluster or to the workload. Raises
    SpecError with the setting."""
    overrides: dict[str, dict[str, str]] = {"cluster": {}, "workload": {}}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key, first = key.strip(), key.strip().partition(".")[0]
        if not equals or not value.strip():
            raise SpecError(
                f"--set {setting}: must read field=value, as servers=16 or"
                " inter_node.bandwidth=25GB/s"
            )
        if first in OPTIONS:
            raise SpecError(
                f"--set {setting}: {first} is no field of the cluster or workload, but an option of"
                f" gnnplan plan: --{first} {value.strip()}"
            )
        if first not in Cluster.model_fields and first not in Workload.model_fields:
            raise SpecError(
                f"--set {setting}: no such"
                f" field{suggest(key, [*_leaves(Cluster), *_leaves(Workload)])}"
            )
        owner = overrides["cluster" if first in Cluster.model_fields else "workload"]
        if key in owner:
            raise SpecError(f"--set {key}: given twice; keep one")
        owner[key] = value.strip()
    return overridden(cluster, overrides["cluster"]), overridden(workload, overrides["workload"])


def overridden(model: Model, overrides: Mapping[str, str]) -> Model:
    """Replace dotted fields of a specification, and validate the result as a whole.

    The provenance of a cluster records '--set' for the numbers that were replaced. If it has fewer
    GPUs per server then, they are the first GPUs of its lists (islands, switches, NICs)."""
    if not overrides:
        return model
    data = model.model_dump()
    if isinstance(model, Cluster):
        with suppress(ValueError):  # no number: the model says so below
            gpus = int(number_of(overrides.get("gpus_per_server", "")))
            if 0 < gpus < model.gpus_per_server:
                data = model.shaped(model.servers, gpus).model_dump()
    about = ("ranges", "provenance")  # set last, since a number that is replaced drops its own
    for key in sorted(overrides, key=lambda key: key.startswith(about)):
        path = key.split(".")
        value: Any = overrides[key]
        # some keys contain a dot: collectives.all_reduce.intra_node.bandwidth, ranges.device.gemm
        if path[0] == "collectives" and len(path) > 2:
            path = [path[0], ".".join(path[1:-1]), path[-1]]
        elif path[0] in about:
            path = key.split(".", 1)
        if path[0] == "ranges":
            value = from_json(f"--set {key}={value}", value, "write low and high, as [0.8, 1.25]")
        target = data
        for name in path[:-1]:
            if target.get(name) is None:
                target[name] = {}
            target = target[name]
            if not isinstance(target, dict):
                raise SpecError(
                    f"--set {key}: {name} is a single value without"
                    f" fields{suggest(key, _leaves(type(model)))}"
                )
        target[path[-1]] = value
        if "provenance" in data and path[0] not in (*about, "name"):
            # The file's range of the old number is dropped too (scaling.py names constants).
            constant = path[0] if path[0] == "host_rates" else ".".join(path[:2])
            data["provenance"][constant] = "--set"
            data["ranges"].pop(constant, None)
    changed = checked(type(model), data, "--set ", overrides)
    if isinstance(model, Cluster) and isinstance(changed, Cluster):
        by_hand = {key.rpartition(".")[0].removeprefix("collectives.") for key in overrides}
        return type(model).model_validate(changed.carried(model, by_hand))
    return changed


def with_fields(cluster: Cluster, written: str) -> Cluster:
    """Replace the fields after the '?' of 'dgx_a100?price=2.20&servers=4', as --set does.

    Raises SpecError."""
    fields = fields_after(written)
    try:
        return overridden(cluster, fields)
    except SpecError as error:
        raise SpecError(f"--cluster {written}: {str(error).removeprefix('--set ')}") from error


def fields_after(written: str) -> dict[str, str]:
    """Return the fields after the '?' of 'dgx_a100?price=2.20&servers=4'.

    Raises SpecError if one is there twice."""
    pairs = [text.partition("=") for text in written.partition("?")[2].split("&") if text]
    fields = {field: value for field, _, value in pairs}
    if len(fields) < len(pairs):
        raise SpecError(f"--cluster {written}: a field is given twice; keep one")
    return fields


def checked(
    kind: type[Model],
    data: Mapping[Any, Any],
    source: Document | str,
    given: Collection[str] | None = None,
) -> Model:
    """Validate data as a specification of class `kind`. Raises SpecError with a line per mistake.

    source: a document, or the prefix of field names in messages, such as '--'. given: the fields
    that the user has just set, if the data has other fields too."""
    if kind is Cluster and isinstance(data, Mapping) and given is None:
        data = as_of_now(data, source.path if isinstance(source, Document) else source)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise SpecError(mistakes(kind, error, data, source, given)) from error
    except TypeError as error:  # a validator got a list, a mapping or None
        name = source.path if isinstance(source, Document) else source.strip()
        raise SpecError(
            f"{name}: a field is empty, a list or a mapping where a number is expected ({error})"
        ) from error


def as_of_now(data: Mapping[Any, Any], source: str) -> dict[Any, Any]:
    """Return a cluster's fields without obsolete ones, under present names; note renamed fields."""
    old: set[str] = set()

    def renamed(fields: Mapping[Any, Any]) -> dict[Any, Any]:
        old.update(RENAMED.keys() & fields.keys())
        return {
            RENAMED.get(name, name): renamed(value)
            if isinstance(value, Mapping) and name != "provenance"
            else value
            for name, value in fields.items()
            if name not in LEFT_OUT
        }

    out = renamed(data)
    with suppress(AttributeError, KeyError, TypeError, ZeroDivisionError):
        # Older files had a message's core seconds apart from its latency, which now includes them.
        ranks = data["gpus_per_server"] * (data["servers"] if data.get("one_machine") else 1)
        for name, link in out["collectives"].items():
            core_s = data["collectives"][name].get("core_s_per_message", 0.0)
            link["latency"] += core_s * ranks / data["cores"]
    if old:
        new = ", ".join(f"{name} is now {RENAMED[name]}" for name in sorted(old))
        say(f"note: {source}: old names of fields: {new}; please rename them")
    return out


def _leaves(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of all fields that --set can change."""
    names = []
    for name, field in kind.model_fields.items():
        inner = spec_in(field.annotation)
        names += (
            _leaves(inner, f"{prefix}{name}.")
            if inner and get_origin(field.annotation) is not dict
            else [prefix + name]
        )
    return names


# -- fitted presets --------------------------------------------------------------------------------


_INSIDE = ("island.bandwidth", "intra_node.bandwidth", "host.bandwidth")
_BETWEEN = ("inter_node.bandwidth",)
# Constant -> the fields that its factor multiplies, or divides if marked '/'. A larger factor on
# launch and tax means slower, on the other constants faster. A constant may also be the name of a
# GNN: its factor is the device's speed for that GNN.
CONSTANTS = {
    "device": ("device.gemm", "device.memory_bandwidth"),
    "gemm": ("device.gemm",),
    "launch": ("device.launch",),
    "tax": ("device.overlap_tax",),
    "links": (*_INSIDE, *_BETWEEN),
    "inside": _INSIDE,
    "between": _BETWEEN,
    "host": ("host.bandwidth",),
    # all work of the device
    "code": ("device.gemm", "device.memory_bandwidth", "/device.launch"),
    "sampler": ("host_rates", "device_rates"),
}
# Testbed -> the testbed whose factors it uses: the same code on other links or on more servers.
SAME = {"granndis_a6000_nvlink": "granndis_a6000_pcie", "gsplit_p3_16xlarge": "gsplit_p3_8xlarge"}


def kept_factors(testbed: str) -> dict[str, float]:
    """Return constant -> factor as written by `benchmarks/published.py fit`; empty if unfitted."""
    return {line["constant"]: float(line["factor"]) for line in _lines(testbed)}


def _lines(testbed: str) -> list[dict[str, str]]:
    return [line for line in quoted("fitted.csv") if line["testbed"] == SAME.get(testbed, testbed)]


def scaled(cluster: Cluster, factors: Mapping[str, float], model: str) -> Cluster:
    """Apply the factors to the cluster's constants; model: the GNN's name in Workload.model."""
    for constant, factor in factors.items():
        fields = CONSTANTS["device"] if constant == model else CONSTANTS.get(constant, ())
        cluster = multiplied(cluster, dict.fromkeys(fields, factor))
    return cluster


def read_fitted(name: str, model: str) -> tuple[Cluster, str]:
    """Read a cluster by its preset's name or its file; the note names fitted factors ('': none).

    A preset gets the factors of its testbed, which its field `provenance` records; a file gets
    none. model: the GNN's name, because one testbed has a factor for GraphSAGE alone.

    Raises SpecError.
    """
    name = cluster_name(name)
    plain = read_cluster(name)
    factors = {
        constant: factor
        for constant, factor in kept_factors(name).items()
        if constant in CONSTANTS or constant == model
    }
    if not factors:
        return plain, ""
    line = _lines(name)[0]
    source = f"fitted to {line['rows']} printed figures ({line['sources']})"
    fitted, provenance = scaled(plain, factors, model), dict(plain.provenance)
    for field, ratio in _changed(plain, fitted):
        before = f"{provenance[field]}, " if field in provenance else ""
        provenance[field] = f"{before}x {ratio:.3g} {source}"
    applied = ", ".join(f"{constant} x {factor:.3g}" for constant, factor in factors.items())
    note = (
        f"{name} has constants {source}: {applied};"
        f" --cluster {PRESETS / f'{name}.yaml'} plans with datasheet values"
    )
    return fitted.model_copy(update={"provenance": provenance}), note


def _changed(plain: Cluster, fitted: Cluster) -> Iterator[tuple[str, float]]:
    """Yield the dotted field and the ratio (fitted / plain) of every changed number."""
    before = plain.model_dump()
    for part, new in fitted.model_dump().items():
        for field, value in new.items() if isinstance(new, dict) else ():
            old = (before[part] or {}).get(field)
            if isinstance(value, float) and isinstance(old, float) and old and value != old:
                yield f"{part}.{field}", value / old
