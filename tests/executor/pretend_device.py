"""A CUDA device that does not exist: its tensors say `cuda:0`, and their numbers lie on the host.

What a GPU would refuse is refused: operations on tensors of two devices. What it would be given is
counted: launches, copies between host and device, and waits of the host. So tests see without a GPU
where a step waits, and how many kernels it is made of; times they cannot see.

A launch is an operation of torch that computes something. Views and allocations launch nothing; a
few operations of torch are several kernels (`SEVERAL`), and the product's own kernels are one
(`OURS`). Autograd's operations are counted like others.

A CUDA graph is captured and replayed (`Graph`)."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map_only

from gnnplan.executor.layers.kernels import (
    GOLDEN,
    Block,
    aggregation,
    attention,
    hashed_dropout,
    mapped,
    mix,
)
from gnnplan.planner.gnn.trace import summing

T = TypeVar("T")
CUDA = torch.device("cuda", 0)
ROUNDED = 512  # [B] of which torch's allocator hands out multiples
ALLOCATE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
SEVERAL = {"slice_backward": 2, "select_backward": 2, "index_select_backward": 2}
READ = {  # the host reads what the device has computed, if only how large a result is
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "equal", "is_nonzero", "_assert_scalar",
}  # fmt: skip


def _alone(method: Callable[..., T]) -> Callable[..., T]:
    """A method of the device that one thread calls at a time: copies have a thread of their own."""

    @functools.wraps(method)
    def locked(device: Device, *args: Any) -> T:
        with device.lock:
            return method(device, *args)

    return locked


class Device:
    """What the pretend device has been asked for, and the bytes that live there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.counts = collections.Counter[str]()  # launches, copies, bytes, waits
        self.operations = collections.Counter[str]()  # by name
        self.may_wait = True
        # storages by address of their C++ object: whether it lives, its bytes, and who made it
        self.storages: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.graph: Graph | None = None  # that is being captured
        self.most = 0  # bytes that ever lived at once
        self.at_most = collections.Counter[str]()  # then, by who made them

    @_alone
    def hold(self, made: Tensor, name: str) -> None:
        """Count a tensor's storage, which torch's allocator rounds up."""
        storage = made.untyped_storage()
        if storage.nbytes() and storage._cdata not in self.storages:
            self.live()  # what has died makes room first
            size = -(-storage.nbytes() // ROUNDED) * ROUNDED
            self.storages[storage._cdata] = StorageWeakRef(storage), size, f"{name} {_line()}"
            self.watch()

    @_alone
    def live(self) -> int:
        """Bytes that live now."""
        for address in [a for a, (storage, *_) in self.storages.items() if storage.expired()]:
            del self.storages[address]
        return sum(size for _, size, _ in self.storages.values())

    def watch(self) -> None:
        if (now := self.live()) > self.most:
            self.most, self.at_most = now, collections.Counter()
            for _, size, who in self.storages.values():
                self.at_most[who] += size

    @_alone
    def launch(self, name: str, times: int = 1) -> None:
        self.counts["launches"] += times
        self.operations[name] += times

    @_alone
    def wait(self, why: str) -> None:
        """The host waits for all that it has asked for. Raises AssertionError if it may not."""
        if self.graph is not None:
            self.graph.must_not(why)
        assert self.may_wait, f"the host waits for the device: {why}"
        self.counts["waits"] += 1
        self.operations[f"wait: {why}"] += 1

    @_alone
    def copy(self, host: Tensor, in_background: bool, what: str) -> None:
        """Numbers cross between host and device."""
        if self.graph is not None:
            self.graph.must_not(what)
        if host.numel():
            self.counts["copies"] += 1
            self.counts["bytes"] += host.nbytes
            if not (in_background and is_pinned(host)):
                self.wait(f"{what}, not in the background or not of page-locked memory")

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """The host may not wait in this block."""
        self.may_wait = False
        try:
            yield
        finally:
            self.may_wait = True


class Graph:
    """A CUDA graph. A replay computes again, into the same tensors, what was launched in `capture`.

    CUDA computes nothing while it captures. Here numbers are computed, and put back at the end."""

    def __init__(self) -> None:
        self.launched: list[tuple[Callable[[], Any], Any]] = []  # functions, and their results
        self.before: dict[int, tuple[Any, Any]] = {}  # changed storages, and what they held
        self.thread, self.mode, self.refused = 0, "", ""

    @contextlib.contextmanager
    def capture(self, capture_error_mode: str = "global") -> Iterator[None]:
        self.thread, self.mode = threading.get_ident(), capture_error_mode
        DEVICE.graph = self
        try:
            yield
        finally:
            DEVICE.graph = None
            for storage, numbers in self.before.values():
                storage.copy_(numbers)
        if self.refused:
            raise RuntimeError(f"operation failed due to a previous error: {self.refused}")

    def must_not(self, what: str) -> None:
        """Refuse a wait or a copy in the capturing thread; in mode 'global' in any thread."""
        if self.mode == "global" or threading.get_ident() == self.thread:
            self.refused = f"operation not permitted when stream is capturing ({what})"
            raise RuntimeError(self.refused)

    def keep(self, tensors: Iterable[Any]) -> None:
        """Keep what tensors hold before an operation changes them."""
        for storage in (t.host.untyped_storage() for t in tensors if isinstance(t, OnDevice)):
            if storage._cdata not in self.before:
                self.before[storage._cdata] = storage, storage.clone()

    def replay(self) -> None:
        for compute, results in self.launched:
            before, after = (tree_flatten(each)[0] for each in (results, compute()))
            for result, fresh in zip(before, after, strict=True):
                if isinstance(result, Tensor) and fresh is not result:
                    result.copy_(fresh)


PINNED: dict[int, Any] = {}  # storages in page-locked memory, by address


def is_pinned(host: Tensor) -> bool:
    return not isinstance(host, OnDevice) and host.untyped_storage().data_ptr() in PINNED


def pin(host: Tensor) -> Tensor:
    copy = host.clone()
    PINNED[copy.untyped_storage().data_ptr()] = copy.untyped_storage()
    return copy


DEVICE = Device()


def _line() -> str:
    """The line of the product that is under way."""
    frame = sys._getframe(1)
    while frame.f_back and "/executor/" not in frame.f_code.co_filename.replace(
        "tests/executor", ""
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class OnDevice(Tensor):
    """A tensor of the pretend device; `host` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, name: str = "") -> OnDevice:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype,
        )  # fmt: skip
        made.host = host
        DEVICE.hold(host, name)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        """Keep memory for a stream."""

    def __repr__(self, **_: object) -> str:
        return f"OnDevice({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, flat = func._schema.name.split("::")[1], tree_flatten((args, kwargs))[0]
        is_copy = name in ("copy_", "_copy_from")
        if is_copy and not all(isinstance(t, OnDevice) for t in args[:2]):
            host = next(t for t in args[:2] if not isinstance(t, OnDevice))
            if host.dim() or not isinstance(args[0], OnDevice):
                DEVICE.copy(host, args[2] if len(args) > 2 else False, "copy")
        else:
            for other in flat:
                if (
                    isinstance(other, Tensor)
                    and not isinstance(other, cls)
                    and other.dim()
                    and other.numel()
                ):
                    raise RuntimeError(f"{name}: expected all tensors on one device, not {other}")
        if name in READ or _sizes_itself(name, args, kwargs or {}):
            DEVICE.wait(name)
        given = {t.host.untyped_storage().data_ptr() for t in flat if isinstance(t, OnDevice)}
        if "device" in (kwargs or {}):
            kwargs["device"] = None
        if func is torch.ops.aten.mm.dtype:  # CPUs have no such product
            func, args = torch.ops.aten.mm.default, [a.host.to(args[2]) for a in args[:2]]
        if (graph := DEVICE.graph) is not None and func._schema.is_mutable:
            graph.keep(flat)
        on_host = tree_map_only(OnDevice, _host, (tuple(args), kwargs or {}))
        out = func(*on_host[0], **on_host[1])
        made = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.numel()]
        is_view = (
            not func._schema.is_mutable
            and made
            and all(t.untyped_storage().data_ptr() in given for t in made)
        )
        if not (is_view or name in ALLOCATE) and (made or func._schema.is_mutable):
            DEVICE.launch(name, SEVERAL.get(name, 1))
            if graph is not None:
                graph.launched.append((lambda: func(*on_host[0], **on_host[1]), out))
        if name == "sum" and args[0].dim() > 1 and list(args[1:2]) == [[0]]:
            rows, sums = len(args[0]), out if isinstance(out, Tensor) else out[0]
            OnDevice(torch.empty(int(summing(rows, sums.numel(), sums.itemsize)), dtype=torch.int8))
        if is_copy and not isinstance(args[0], OnDevice):
            return args[0]
        return tree_map_only(Tensor, lambda tensor: OnDevice(tensor, name), out)


def _host(tensor: OnDevice) -> Tensor:
    return tensor.host


def _sizes_itself(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the size of an operation's result depends on numbers."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        return masks and (name == "index" or args[2].numel() > 1)
    return False


def _is_cuda(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"  # type: ignore[arg-type]


def _made_by(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of torch that makes tensors, on the pretend device if it is asked to."""

    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if _is_cuda(device):
            needs_gradient = kwargs.pop("requires_grad", False)
            make_it = functools.partial(factory, *args, **kwargs)
            out = make_it() if factory.__name__ == "empty" else _again(make_it)
            if factory.__name__ == "tensor":
                DEVICE.copy(out, False, "torch.tensor")
            elif factory.__name__ != "empty" and out.numel():
                DEVICE.launch(factory.__name__)
            return OnDevice(out).requires_grad_(needs_gradient)
        out = factory(*args, **kwargs, **({} if device is None else {"device": device}))
        return pin(out) if pin_memory else out

    return make


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to, with CUDA devices in place of which there is only the pretend one."""
    asked = {name: kwargs.get(name) for name in ("device", "dtype", "non_blocking")}
    asked = {name: value for name, value in asked.items() if value is not None}
    words = [arg for arg in args if not isinstance(arg, Tensor)]
    device, dtype, non_blocking = None, None, False
    if args or asked:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*words, **asked)  # type: ignore[attr-defined]
    rest = {} if dtype is None else {"dtype": dtype}
    if kwargs.get("copy"):
        rest["copy"] = True
    if device is None or _is_cuda(device) == isinstance(tensor, OnDevice):
        return TO(tensor, **rest) if rest else tensor
    if isinstance(tensor, OnDevice):
        tensor, rest["copy"] = TO(tensor, dtype) if dtype else tensor, True
        DEVICE.copy(tensor.host, non_blocking, "copy to the host")
        return tensor.host.clone()
    DEVICE.copy(tensor, non_blocking, "copy to the device")
    return OnDevice(TO(tensor.detach(), dtype or tensor.dtype, copy=True))


def _new_empty(tensor: Tensor, *size: Any, device: Any = None, **kwargs: Any) -> Tensor:
    out = NEW_EMPTY(tensor.host if isinstance(tensor, OnDevice) else tensor, *size, **kwargs)
    is_there = isinstance(tensor, OnDevice) if device is None else _is_cuda(device)
    return OnDevice(out) if is_there else out


def _new_tensor(tensor: Tensor, numbers: Any) -> Tensor:
    where = CUDA if isinstance(tensor, OnDevice) else tensor.device
    return torch.tensor(numbers, dtype=tensor.dtype, device=where)


TO, NEW_EMPTY = Tensor.to, Tensor.new_empty


def _is_read(name: str) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, OnDevice):
            return original(tensor, *args, **kwargs)
        if name != "tolist":
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
        DEVICE.wait(name)
        return tensor.host.tolist()

    return read


class Stream:
    """Work is done when it is given, so a stream has nothing left to do."""

    cuda_stream = 0

    def __init__(self, device: object = None) -> None:
        pass

    def synchronize(self) -> None:
        DEVICE.wait("Stream.synchronize")

    def query(self) -> bool:
        return True

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: object) -> None:
        pass

    wait_stream = wait_event


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        """Wait for a part of what the host has asked for, which may be long over."""
        DEVICE.counts["events"] += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: object) -> float:
        return 0.0


def _dropout(
    x: Tensor, vertices: Tensor, seed: int, epoch: int | Tensor, layer: int, first: int,
    threshold: int, scale: float,
) -> Tensor:  # fmt: skip
    keys = hashed_dropout.vertex_keys(vertices, seed, int(epoch), layer)
    steps = torch.arange(first // 4 + 1, (first + x.shape[1] + 3) // 4 + 1) * GOLDEN
    words = mix(keys[:, None] + steps).view(torch.int16)
    return x * (words[:, first % 4 :][:, : x.shape[1]] >= threshold) * scale


# name -> what computes the same on the host, and launches forward and backward
OURS: dict[str, tuple[Callable[..., Tensor], int, int]] = {"spmm": (aggregation.spmm, 1, 0)}
OURS |= {"dropout": (_dropout, 1, 1), "attend": (attention.attend, 1, 5)}
OURS |= {"attend_pairs": (attention.attend_pairs, 1, 7)}


class _Kernel(torch.autograd.Function):
    """One of them. On the device it takes what its Python function allocates (triton_kernels.py)."""

    @staticmethod
    def forward(ctx: Any, name: str, *args: Any) -> Tensor:
        of_host, launches, ctx.launches = OURS[name]
        assert all(isinstance(arg, OnDevice) for arg in args if isinstance(arg, Tensor)), name
        out = OnDevice(_again(lambda: of_host(*map(_on_host, args))), name)
        ctx.name, ctx.numbers = name, [None if isinstance(a, Tensor) else a for a in args]
        ctx.saved = [a if isinstance(a, Tensor) else None for a in args]
        if name == "dropout":
            ctx.saved[0] = None
        ctx.totals = ()
        if name.startswith("attend"):
            ctx.totals = out, _wide(out, len(out) * _heads(name, args))
        if out.numel():
            DEVICE.launch(name, launches)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        DEVICE.launch(f"{ctx.name} backward", ctx.launches)
        function = OURS[ctx.name][0]
        args = [n if s is None else s for s, n in zip(ctx.saved, ctx.numbers, strict=True)]
        needed = ctx.needs_input_grad[1:]
        if ctx.name == "dropout":
            made = _again(lambda: [function(grad.host, *map(_on_host, args[1:]))])
        else:
            ctx.saved = ctx.totals = None  # as autograd lets go of what was saved
            block = next(arg for arg in args if isinstance(arg, Block))

            def of_leaves() -> Sequence[Tensor]:
                given = [
                    arg.detach().requires_grad_(n) if isinstance(arg, Tensor) else arg
                    for arg, n in zip(map(_on_host, args), needed, strict=True)
                ]
                leaves = [leaf for leaf, n in zip(given, needed, strict=True) if n]
                with torch.enable_grad():
                    return torch.autograd.grad(function(*given), leaves, grad.host)

            made = _again(of_leaves)
        gradients = iter([OnDevice(each, f"{ctx.name} backward") for each in made])
        if ctx.name != "dropout":
            beside = (
                OnDevice(torch.empty_like(grad.host), "inner"),
                _wide(grad, block.edges * _heads(ctx.name, args)),
            )
            del beside
        return None, *(next(gradients) if each else None for each in needed)


def _again(compute: Callable[[], T]) -> T:
    """Compute something, and again in each replay of the graph that is being captured."""
    results = compute()
    if DEVICE.graph is not None:
        DEVICE.graph.launched.append((compute, results))
    return results


def _heads(name: str, args: Any) -> int:
    return args[2].shape[1] if name == "attend" else len(args[2])


def _wide(x: Tensor, numbers: int) -> OnDevice:
    """Room for so many numbers of the type in which rows are added up."""
    return OnDevice(torch.empty(numbers, dtype=torch.promote_types(x.dtype, torch.float32)))


def _on_host(arg: Any) -> Any:
    if isinstance(arg, OnDevice):
        return arg.host
    return mapped(arg, _on_host) if isinstance(arg, Block) else arg


@pytest.fixture
def pretend_device(monkeypatch):
    """The pretend device, in place of CUDA."""
    global DEVICE
    DEVICE = Device()
    for name in ("empty", "zeros", "ones", "full", "arange", "tensor"):
        monkeypatch.setattr(torch, name, _made_by(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", _new_empty)
    monkeypatch.setattr(Tensor, "new_tensor", _new_tensor)
    monkeypatch.setattr(Tensor, "to", _to)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: _to(tensor, "cpu"))
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "is_pinned", is_pinned)
    for name in ("numpy", "tolist", "__array__"):
        monkeypatch.setattr(Tensor, name, _is_read(name))
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "CUDAGraph": Graph,
        "graph": lambda graph, **how: graph.capture(**how),
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 40),
        "synchronize": lambda device=None: DEVICE.wait("synchronize"),
        "set_device": lambda device: None,
        "set_stream": lambda stream: None,
        "memory_allocated": lambda device=None: DEVICE.live(),
        "max_memory_allocated": lambda device=None: DEVICE.most,
        "reset_peak_memory_stats": lambda device=None: setattr(DEVICE, "most", DEVICE.live()),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    kernels = {name: functools.partial(_Kernel.apply, name) for name in OURS}
    for module in (aggregation, attention, hashed_dropout):
        monkeypatch.setattr(module, "triton_kernels", lambda: SimpleNamespace(**kernels))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a module's .to
    yield DEVICE
    torch.__future__.set_swap_module_params_on_conversion(before)
