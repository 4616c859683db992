"""The only file that uses private names of torch; differences between torch versions end here.

Everything else of nostall reaches torch through its public API or through this file. Private names are looked up at one place,
below. Without one of the first group nostall cannot work, and importing it raises :class:`UnsupportedTorchError`. Each of the
second group has a slower substitute.
"""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor
from torch.storage import TypedStorage, UntypedStorage
from torch.utils.serialization import config

from nostall.errors import UnsupportedTorchError
from nostall.options import is_dequantized_on_save

# --- private names that nostall cannot work without -------------------------------------------------------------------


def _unsupported(why: object) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"nostall does not work with torch {torch.__version__}: {why}",
        hint="this nostall supports torch 2.9 to 2.15, a newer one may support a newer torch",
    )


try:
    from torch import _is_functional_tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
    from torch.distributed.checkpoint.api import _is_wrapped_exception
    from torch.distributed.checkpoint.filesystem import (
        CURRENT_DCP_VERSION,
        _metadata_fn,
        _StorageInfo,
        _StoragePrefix,
    )
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
    from torch.distributed.checkpoint.utils import _DistWrapper
    from torch.serialization import _get_layout

    for _name in ("_version", "_is_zerotensor"):
        if not hasattr(torch.Tensor, _name):
            raise ImportError(f"torch.Tensor has no attribute {_name!r}")
except ImportError as error:
    raise _unsupported(error) from error

# --- private names that are replaced by slower, public ways where they are missing ------------------------------------


def _optional(name: str, module: str) -> Any:
    """What a private name stands for, or ``None`` if this torch does not have it."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


# Without it tensors are copied one by one.
_foreach_copy: Callable[..., Any] | None = _optional("_foreach_copy_", "torch")
# Without it ranks do not learn how far others are, and an error message says less.
_get_default_store: Callable[[], dist.Store] | None = _optional(
    "_get_default_store", "torch.distributed.distributed_c10d"
)
# Without it a default device, which is a mode of torch, makes every look at a tensor ten times as slow.
without_modes: Callable[[], AbstractContextManager[object]] = (
    _optional("DisableTorchFunction", "torch._C") or nullcontext
)
# Older torch has none: a plain tensor that says of which part of a larger one it is.
_CheckpointableTensor: Any = _optional(
    "CheckpointableTensor", "torch.distributed.checkpoint.protocol"
)
# Without it stock's checkpoint process lives until the interpreter ends.
_process_executor: Any = _optional("_async_process_executor", "torch.distributed.checkpoint")
KNOWS_DTENSORS: bool = hasattr(DTensor, "_spec") and hasattr(DTensor, "_local_tensor")
"""Whether DTensors can be recognised from save to save; without it, what holds some is planned each time."""
spec_of: Callable[[DTensor], Any] = attrgetter("_spec")
"""Mesh, placements, sizes and strides of a DTensor; only if :data:`KNOWS_DTENSORS`."""
local_tensor_of: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""This rank's part of a DTensor, unknown to autograd; only if :data:`KNOWS_DTENSORS`."""


def _device_types_of(group: dist.ProcessGroup | None) -> set[str]:
    """The kinds of devices that a process group has backends for."""
    kinds = getattr(group or dist.group.WORLD, "_device_types", None)
    if kinds is None:
        # As in "cpu:gloo,cuda:nccl", which torch knows of the groups that it has made itself only.
        kinds = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    return {torch.device(kind).type for kind in kinds}


# --- what they are called here ----------------------------------------------------------------------------------------

METADATA_NAME: str = _metadata_fn
DCP_VERSION: str = CURRENT_DCP_VERSION
StorageInfo = _StorageInfo
StoragePrefix = _StoragePrefix
MemoryFormat = _MEM_FORMAT_ENCODING
layout_called = _get_layout
DistWrapper = _DistWrapper
WrappedException = tuple[BaseException, Any]
Place = tuple[int, torch.dtype, Sequence[int], Sequence[int]]
"""Offset in memory in bytes, dtype, size, stride in elements."""


def wrap_exception(error: BaseException) -> WrappedException:
    """The form in which DCP sends an exception to other ranks."""
    # Not torch's own function: what Python 3.14 extracts holds code objects, which older torch cannot send.
    frames = traceback.extract_tb(error.__traceback__)
    plain = [(each.filename, each.lineno or 0, each.name, each.line) for each in frames]
    return error, traceback.StackSummary.from_list(plain)


def is_wrapped_exception(candidate: object) -> bool:
    """Whether something is an exception in DCP's form."""
    return bool(_is_wrapped_exception(candidate))


class _Skeleton(io.RawIOBase):
    """Receives a container without its payload: keeps what is written and the one gap that is sought over."""

    def __init__(self) -> None:
        self.parts: list[bytearray] = [bytearray()]
        self.gap_nbytes = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.parts[-1] += piece
        return len(piece)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or len(self.parts) > 1:
            raise io.UnsupportedOperation("only one relative seek, over the payload, is expected")
        self.gap_nbytes = offset
        self.parts.append(bytearray())
        return self.tell()

    def tell(self) -> int:
        return sum(map(len, self.parts)) + self.gap_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSkeleton:
    """What ``torch.save`` writes for a tensor, less the payload."""

    prefix: bytes
    payload_nbytes: int
    suffix: bytes
    checksums: bool
    """Whether torch is set to store CRCs."""


def container_skeleton(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> ContainerSkeleton:
    """The container of a plain CPU tensor that owns exactly its own storage, from ``torch.save`` itself."""
    # Not touched (unless torch is told to be deterministic), so no page of it is backed by memory, however large.
    stand_in = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    skeleton = _Skeleton()
    with torch.serialization.skip_data():
        torch.save(stand_in, cast("IO[bytes]", skeleton))
    before, after = skeleton.parts if skeleton.gap_nbytes else (b"", b"".join(skeleton.parts))
    return ContainerSkeleton(
        prefix=bytes(before),
        payload_nbytes=skeleton.gap_nbytes,
        suffix=bytes(after),
        checksums=bool(torch.serialization.get_crc32_options()),
    )


def runs_avx() -> bool:
    """Whether torch runs AVX instructions here: the processor and the system have them, and nobody has told it not to."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def default_store() -> dist.Store | None:
    """The store through which the ranks of this job found each other; ``None`` if there is none."""
    try:
        return None if _get_default_store is None else _get_default_store()
    except (RuntimeError, ValueError):
        return None


def container_settings() -> tuple[bool, int]:
    """The process-wide settings of torch that change a container: checksums, payload alignment."""
    return bool(torch.serialization.get_crc32_options()), int(config.save.storage_alignment)


@lru_cache(maxsize=256)
def can_be_viewed(dtype: torch.dtype) -> bool:
    """Whether raw memory can be viewed with this dtype and copied into; sub-byte and quantised types cannot."""
    try:
        memory = bytearray(16)
        view = torch.frombuffer(memory, dtype=dtype, count=1, offset=0)
        view.copy_(torch.empty_strided((1,), (1,), dtype=dtype, device="cpu"))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return view.nbytes == dtype.itemsize


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What to save of a tensor: detached, arrived, and dequantised if its class is one of those that are saved so."""
    tensor = tensor.detach()
    if isinstance(
        tensor, AsyncCollectiveTensor
    ):  # functional collectives: it may still be on its way
        tensor = tensor.wait()
    if (
        type(tensor).dequantize is not torch.Tensor.dequantize  # a wrapper, and one that can be
        and is_dequantized_on_save(type(tensor))
    ):
        tensor = tensor.dequantize()
    return tensor


def missing_data(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no data, and what to do, if so; torch would read past the end of the memory that is there."""
    if tensor.is_meta:
        return "the tensor is on the meta device and has no data; load or initialise it first"
    there, needed = _memory(tensor)
    if there < needed:
        return (
            f"the tensor takes {needed} bytes of its storage, which was resized to {there}; "
            "resize it back before saving, or leave the tensor out of the state dict"
        )
    return None


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of a tensor's storage, and how many of them it reaches for, as far as that can be told."""
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    has_memory = (tensor.is_cpu or tensor.is_cuda) and tensor.layout == torch.strided
    if is_wrapper or not has_memory or tensor.is_nested or not tensor.numel():
        return 0, 0
    there = tensor.untyped_storage().nbytes()
    if not can_be_viewed(tensor.dtype):
        return there, 1  # several elements may share a byte
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return there, (int(tensor.storage_offset()) + reach + 1) * tensor.itemsize


def as_stock_writes(tensor: torch.Tensor) -> torch.Tensor:
    """What stock hands to ``torch.save``: on the CPU, over a storage of its own size."""
    tensor = tensor.cpu()
    if tensor.layout == torch.strided and (
        tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
        or tensor._is_zerotensor()  # zeros without memory, which torch.save refuses
    ):
        tensor = tensor.clone()
    return tensor


def payload_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides under which stock writes the tensor, or ``None`` if its file form is not one payload."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
        or _is_functional_tensor(tensor)
        or not can_be_viewed(tensor.dtype)
    ):
        return None
    if tensor.is_contiguous():
        if tensor.is_cpu and tensor.storage_offset() and not tensor.untyped_storage().nbytes():
            return None  # an empty view beyond an empty storage: stock writes the offset, too
        return tuple(tensor.stride())
    dense = tuple(torch.empty_like(tensor, device="meta").stride())
    owns_exactly = tensor.is_cpu and tensor.untyped_storage().nbytes() == tensor.nbytes
    if owns_exactly and dense != tuple(tensor.stride()):
        return None  # overlapping or gapped over a storage of its own size: stock writes the storage as it is
    return dense


def any_says_its_place(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of these says that it is part of a larger tensor."""
    return _CheckpointableTensor is not None and any(map(_says_its_place, tensors))


def _says_its_place(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "global_shape") and isinstance(tensor, _CheckpointableTensor)


@torch.inference_mode(mode=False)  # a view made in inference mode could not be written to outside
def views_of(memory: Any, places: Iterable[Place]) -> list[torch.Tensor]:
    """Tensors over raw memory, one per place; addresses need not be aligned to element sizes."""
    return [_view_of(memory, *place) for place in places]


def _view_of(
    memory: Any, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    count = math.prod(size)
    if count == 0:
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    is_flat = len(size) == 1 and stride[0] == 1
    return flat if is_flat else flat.as_strided(tuple(size), tuple(stride))


def private_copy(value: Any) -> Any:
    """A copy in host memory, of a tensor of any kind or of an object, that ``torch.save`` writes as it writes the original.

    It is made by pickling, which is what ``torch.save`` does; what cannot be pickled is copied as well as it can be.

    Raises:
        ValueError: A tensor has no memory.
    """
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value  # planning says so
        if missing := missing_data(value):
            raise ValueError(missing)
        value = as_stock_writes(value)
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    try:
        pickler.dump(value)
        pickled.seek(0)
        return _Unpickler(pickled, pickler.held).load()
    except (
        Exception
    ):  # anything: it is code of the value's class. A planner may know what to do with the value
        return copy.deepcopy(value)


class _Pickler(pickle.Pickler):
    """Pickles what holds storages, strings and bytes: copies of storages, and the others as they are.

    ``torch.save`` writes a string once, however often one and the same is there, but equal ones each; unpickling might make
    equal ones the same.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.held: dict[int, Any] = {}
        self._originals: list[UntypedStorage] = []  # alive, so that no other one gets the same key

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype | None] | None:
        if type(value) in (str, bytes):
            self.held[id(value)] = value
            return id(value), None
        is_typed = isinstance(value, TypedStorage)
        if not is_typed and not isinstance(value, UntypedStorage):
            return None
        storage = value._untyped_storage if is_typed else value
        if storage._cdata not in self.held:
            self._originals.append(storage)
            is_elsewhere = storage.device.type != "cpu"
            self.held[storage._cdata] = storage.cpu() if is_elsewhere else storage.clone()
        # As torch.load does: what rebuilds tensors wants typed ones.
        return storage._cdata, value.dtype if is_typed else torch.uint8


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, held: dict[int, Any]) -> None:
        super().__init__(stream)
        self._held = held

    def persistent_load(self, key_and_dtype: tuple[int, torch.dtype | None]) -> Any:
        key, dtype = key_and_dtype
        held = self._held[key]
        return (
            held if dtype is None else TypedStorage(wrap_storage=held, dtype=dtype, _internal=True)
        )


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors, each into the one of the same position."""
    if _foreach_copy is not None:
        _foreach_copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def with_other_shards(
    tensor: ShardedTensor, replace: Callable[[int, torch.Tensor], torch.Tensor]
) -> ShardedTensor:
    """A twin of a sharded tensor, with what ``replace`` returns for the number and the tensor of each local shard."""
    twin = copy.copy(tensor)
    shards = [copy.copy(shard) for shard in tensor.local_shards()]
    for number, shard in enumerate(shards):
        shard.tensor = replace(number, shard.tensor)
    twin._local_shards = shards
    if twin.local_shards() is not shards:
        raise _unsupported("ShardedTensor does not keep its shards in '_local_shards'")
    return twin


def caches_plans(planner: object) -> bool:
    """Whether DCP's planner is set to keep its plans, so that they depend on earlier saves; older ones never do."""
    return bool(getattr(planner, "_enable_plan_caching", False))


def changes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was changed in place, as far as torch knows; those made in inference mode do not tell."""
    return [tensor._version for tensor in tensors]


def empty_all(tensors: Sequence[torch.Tensor]) -> None:
    """Let tensors go of their memory; those that are detached from others go on counting what is done to them."""
    nothing = torch.empty(0)
    with torch.inference_mode(mode=False), torch.no_grad():
        for tensor in tensors:
            tensor.data = nothing


def stream_marks(tensors: Sequence[torch.Tensor]) -> dict[torch.device, Any]:
    """For each accelerator that tensors are on, an event: how far its current stream has been told to go."""
    marks = {}
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        module = torch.get_device_module(device)
        if hasattr(module, "Stream"):
            marks[device] = module.current_stream(device).record_event()
    return marks


def current_devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """The accelerators that the calling thread works on, of the kinds that tensors are on; other threads begin at 0."""
    kinds = {tensor.device.type for tensor in tensors if not tensor.is_cpu}
    modules = {kind: torch.get_device_module(kind) for kind in kinds}
    return [
        torch.device(kind, module.current_device())
        for kind, module in modules.items()
        if hasattr(module, "current_device")
    ]


def current_accelerators() -> list[torch.device]:
    """The accelerator that the calling thread works on, if it works on one; other threads begin at 0."""
    accelerator = torch.accelerator.current_accelerator()
    # A build for one may run where there is none.
    if accelerator is None or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: True)():
        return []  # and asking would do it
    return [torch.device(accelerator.type, module.current_device())]


@contextmanager
def on_devices(devices: Sequence[torch.device]) -> Iterator[None]:
    """Let the calling thread work on these accelerators."""
    with ExitStack() as entered:
        for device in devices:
            entered.enter_context(torch.get_device_module(device).device(device))
        yield


class DeviceCopy:
    """Copies off one accelerator that its side stream was told to make.

    Args:
        device: The accelerator.
        targets: Places in host memory.
        sources: Tensors on ``device``; they must live until :meth:`wait` has returned.
        after: The event that the copies are ordered after; what the current stream was told so far, if ``None``.
    """

    def __init__(
        self,
        device: torch.device,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: Any,
    ) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._made: Any = None
        # A backend without streams copies in order and returns when it is done.
        if not hasattr(self._module, "Stream"):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        stream = _side_stream(device)
        if after is None:
            stream.wait_stream(self._module.current_stream(device))
        else:
            stream.wait_event(after)
        try:
            with self._module.stream(stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
        except BaseException:
            stream.synchronize()  # who asked gives the memory back
            raise
        self._made = stream.record_event()

    def precede_what_follows(self) -> None:
        """Order everything that the current stream is told from now on after the copies; the host does not wait."""
        if self._made is not None:
            self._module.current_stream(self._device).wait_event(self._made)

    def wait(self) -> None:
        """Return when all bytes are there."""
        if self._made is not None:
            self._made.synchronize()


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device=device)


_CUDA_ALREADY_REGISTERED = 712
"""``cudaErrorHostMemoryAlreadyRegistered``."""


def pin(address: int, nbytes: int) -> bool:
    """Lock host memory for the CUDA copy engines; false where CUDA is absent or not in use (yet).

    Raises:
        RuntimeError: CUDA refuses.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        # torch asks for this thread's last error after every launch: the next kernel would be blamed for it.
        with suppress(RuntimeError):
            torch.ones((), device="cuda")
    if code not in (0, _CUDA_ALREADY_REGISTERED):
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with code {code}")
    return True


def unpin(address: int) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


def device_for_collectives(group: dist.ProcessGroup | None) -> torch.device:
    """A device on which ``group`` can run a collective: the CPU if it has a backend for it, else its own."""
    types = _device_types_of(group)
    if "cpu" in types:
        return torch.device("cpu")
    kind = min(types)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def forget_checkpoint_process() -> None:
    """Let go of the process that stock's ``async_save`` has started, which ends it."""
    if _process_executor is not None:
        _process_executor._CHECKPOINT_PROCESS = None


_OWN_PROPERTIES = len(TensorProperties().__getstate__())
"""How many values this torch pickles of a ``TensorProperties``: dtype, layout, requires_grad, memory format, pin_memory,
and since 2.15 the strides that the tensor had."""
_SPARE_PROPERTIES = 6
"""So many are known here. Strides can be left out, as a reader makes tensors by size and dtype alone."""


def own_properties(state: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The pickled state of a ``TensorProperties`` of any torch as this torch takes it; ``None`` if it has more than is known."""
    if len(state) > max(_OWN_PROPERTIES, _SPARE_PROPERTIES):
        return None
    return state[:_OWN_PROPERTIES]
