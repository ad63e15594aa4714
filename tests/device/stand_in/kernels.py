"""Every operator on `gpu` tensors: CUDA's rules are checked, then the CPU computes on the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tests.device.stand_in import streams
from tests.device.stand_in.synchronisation import synchronised, under_way

aten = torch.ops.aten

WAITING = {
    *(
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "bincount",
        "histc",
        "repeat_interleave",
    ),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
"""Operators whose result or its size the host must know."""

GARBAGE = 171
"""In place of values that a copy to the host brought before the host has waited for it."""

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_host = torch.device("cpu")


class Memory:
    """What holds the values of one `gpu` storage, and its share of the device's allocated bytes."""

    allocated = peak = 0
    total = 8 * 2**30

    def __init__(self, storage: torch.UntypedStorage):
        """
        Raises:
            torch.OutOfMemoryError: the device has no room for it, as CUDA says it.
        """
        self.storage, self.size, self.uses = storage, 0, streams.Uses()
        with streams.lock:
            if Memory.allocated + storage.nbytes() > Memory.total:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes.")
            self.size = storage.nbytes()
            Memory.allocated += self.size
            Memory.peak = max(Memory.peak, Memory.allocated)

    def __del__(self):
        streams.freed(self.uses)
        with streams.lock:
            Memory.allocated -= self.size


class Random:
    """The device's own random numbers, apart from the CPU's."""

    state = torch.Generator().get_state()

    def __enter__(self) -> None:
        self._host, _ = torch.get_rng_state(), torch.set_rng_state(Random.state)

    def __exit__(self, *_: object) -> None:
        Random.state = torch.get_rng_state()
        torch.set_rng_state(self._host)


_OnHost = torch.Generator


class _Generators(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _OnHost)


class Generator(metaclass=_Generators):
    """What `torch.Generator` becomes: one for the `gpu` is one of the CPU, which draws its numbers."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return _OnHost("cpu" if torch.device(device).type == "gpu" else device)


class _Call:
    """One operator's call, with its tensors as the CPU sees them."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        """`gpu` storages by the CPU storage that has the same memory."""
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.of_host: list[torch.Tensor] = []

    def down(self, value: Any) -> Any:
        """`gpu` tensors as CPU tensors of the same memory."""
        if isinstance(value, torch.Tensor):
            if value.device.type != "gpu":
                self.of_host.append(value)
                return value
            for tensor, twin in self.pairs:
                if tensor is value:
                    return twin
            storage = value.untyped_storage()
            memory = memory_of(storage)
            self.storages[memory._cdata] = storage
            twin = torch.empty(0, dtype=value.dtype).set_(memory, value.storage_offset(), value.shape, value.stride())
            self.pairs.append((value, twin))
            return twin
        if isinstance(value, torch.device):
            return _host if value.type == "gpu" else value
        if isinstance(value, (list, tuple)):
            return [self.down(item) for item in value]
        return value

    def up(self, value: Any) -> Any:
        """What the CPU gave, on the device: an argument that came back, a view of one, or new memory."""
        if isinstance(value, torch.Tensor):
            for tensor, twin in self.pairs:
                if twin is value:
                    return tensor
            return self._new(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.up(item) for item in value)
        return value

    def resized(self) -> None:
        """Arguments that the operator gave another size get it."""
        for tensor, twin in self.pairs:
            if tensor.shape != twin.shape or tensor.stride() != twin.stride():
                _set(tensor, self._storage(twin), twin)

    def _new(self, twin: torch.Tensor) -> torch.Tensor:
        return _set(torch._C._acc.create_empty_tensor(tuple(twin.shape), twin.dtype), self._storage(twin), twin)

    def _storage(self, twin: torch.Tensor) -> torch.UntypedStorage:
        memory = twin.untyped_storage()
        storage = self.storages.get(memory._cdata)
        if storage is None or storage.data_ptr() != memory.data_ptr():
            storage = self.storages[memory._cdata] = new_storage(memory)
        return storage


def new_storage(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """A `gpu` storage over a CPU storage, which it keeps."""
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device("gpu", 0), memory.nbytes())
    storage.memory = Memory(memory)
    return storage


def memory_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The CPU storage with a `gpu` storage's memory; one that came by DLPack has none yet."""
    if not hasattr(storage, "memory"):
        host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _host, storage.nbytes())
        storage.memory = Memory(host)
    return storage.memory.storage


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A `gpu` tensor's values as a CPU tensor of the same memory, past all rules: for what the driver does by itself."""
    return _Call().down(tensor)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's memory as a `gpu` tensor, likewise."""
    return _Call().up(tensor)


def register() -> None:
    """Have PyTorch call these for `gpu` tensors."""
    # a library's kernels go with it
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run, "PrivateUse1")
    some = torch.library.Library("aten", "IMPL")
    for op in _with_kernels_of_their_own():
        some.impl(op._name, functools.partial(run, op), "PrivateUse1")
    some.impl("convolution_overrideable", lambda *args: run(aten.convolution.default, *args), "PrivateUse1")
    some.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    some.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "PrivateUse1")  # the composite of products and a softmax
    _libraries.extend([everything, some])
    torch.Generator = Generator
    streams.register(uses_of)
    # PyTorch has no allocator for the device
    torch.UntypedStorage.clone = _clone(torch.UntypedStorage.clone)
    torch.UntypedStorage.to = _moved(torch.UntypedStorage.to)


_libraries: list[torch.library.Library] = []


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator of which at least one tensor, or the device asked for, is `gpu`.

    Raises:
        RuntimeError: the tensors are on several devices, as CUDA says it.
        HiddenSynchronisation: it waits for the device where nothing may.
    """
    if op in (aten._copy_from.default, aten._copy_from_and_resize.default):
        return _copy(*args, **kwargs)
    if op.overloadpacket is aten.set_:
        return op.redispatch(_CPU, *args, **kwargs)
    call = _Call()
    plain = [call.down(_as_tensor(value, argument)) for value, argument in zip(args, op._schema.arguments)]
    named = {name: call.down(value) for name, value in kwargs.items()}
    if call.of_host and call.pairs:
        _require_one_device(op, args, call.of_host)
    if _waits(op, args):
        synchronised(str(op))
        streams.host_waits(streams.current().now())
    if torch.Tag.nondeterministic_seeded in op.tags:
        with Random():
            result = op(*plain, **named)
    else:
        result = op(*plain, **named)
    if op._schema.is_mutable:
        call.resized()
    found = call.up(result)
    if not op.is_view:
        _submitted(op, args, kwargs, found)
    return found


def _submitted(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Tell the order of streams what a kernel read and wrote."""
    given = [*zip(op._schema.arguments, args)]
    given += [(argument, kwargs[argument.name]) for argument in op._schema.arguments if argument.name in kwargs]
    read, written = [], [*uses_in(result)]
    for argument, value in given:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(uses_in(value))
    streams.submitted(str(op), read, written)


def uses_in(value: Any) -> Iterator[streams.Uses]:
    """Of the `gpu` tensors among a value."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "gpu":
            yield uses_of(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from uses_in(item)


def uses_of(tensor: torch.Tensor) -> streams.Uses:
    """How streams use a `gpu` tensor's memory."""
    storage = tensor.untyped_storage()
    memory_of(storage)
    uses: streams.Uses = storage.memory.uses
    return uses


def _as_tensor(value: Any, argument: torch.Argument) -> Any:
    """A whole number that stands for a tensor comes as a number, which PyTorch takes back in arithmetic alone."""
    return torch.tensor(value) if type(value) is int and type(argument.type) is torch.TensorType else value


def _with_kernels_of_their_own() -> Iterator[Any]:
    """Operators that PyTorch would make from others on a device that it does not know, though CPU and CUDA have kernels."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if name.startswith("aten::") and has(name, "CompositeExplicitAutograd") and not has(name, "PrivateUse1"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(aten, packet), overload or "default")


def _waits(op: Any, args: Sequence[Any]) -> bool:
    name = op.overloadpacket.__name__
    if name in WAITING:
        return True
    if not _is_index(op):
        return False
    indices = [item for item in args[1] if item is not None]
    masked = any(item.dtype in (torch.bool, torch.uint8) for item in indices)
    filled = name != "index" and args[2].numel() == 1  # by masked_fill
    return (masked and not filled) or any(item.device.type == "cpu" for item in indices)


def _is_index(op: Any) -> bool:
    return op.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def _require_one_device(op: Any, args: Sequence[Any], of_host: list[torch.Tensor]) -> None:
    """CUDA takes numbers from the host, but neither to join nor for its fused optimizers; and indices."""
    takes_numbers = not op.overloadpacket.__name__.startswith(("cat", "stack", "_stack", "_fused_"))
    indices = {id(item) for item in args[1]} if _is_index(op) else ()
    if any(id(tensor) not in indices and (tensor.ndim or not takes_numbers) for tensor in of_host):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, gpu:0 and cpu! ({op})"
        )


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between the devices; the host goes on only where its side is pinned and the caller does not wait."""
    hosts = [tensor for tensor in (source, target) if tensor.device.type == "cpu"]
    values, place = on_host(source), on_host(target)
    streams.submitted("a copy", uses_in(source), uses_in(target))
    if hosts and source.numel():
        direction = "a copy from the device" if hosts[0] is target else "a copy to the device"
        if not hosts[0].is_pinned():
            synchronised(f"{direction} that is not pinned here")
            streams.host_waits(streams.current().now())
        elif not non_blocking:
            synchronised(f"{direction} without non_blocking")
            streams.host_waits(streams.current().now())
        elif hosts[0] is target:
            under_way.append(functools.partial(place.copy_, values.clone()))
            place.fill_(GARBAGE)
            return target
    place.copy_(values)
    return target


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    op = aten.set_.source_Storage_storage_offset
    return op.redispatch(_CPU, tensor, storage, like.storage_offset(), tuple(like.shape), like.stride())


def _convolution_backward(gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    *how, mask = rest
    bias = [weight.shape[0]] if mask[2] else None
    return run(aten.convolution_backward.default, gradient, images, weight, bias, *how, mask)


def _clone(of_host: Callable[..., torch.UntypedStorage]) -> Callable[..., torch.UntypedStorage]:
    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return new_storage(memory_of(self).clone()) if self.device.type == "gpu" else of_host(self)

    return clone


def _moved(of_host: Callable[..., torch.UntypedStorage]) -> Callable[..., torch.UntypedStorage]:
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if self.device.type == "cpu" and torch.device(device).type == "gpu":
            synchronised("a storage's copy to the device")
            return new_storage(self.clone())
        return of_host(self, device=device, non_blocking=non_blocking)

    return to
