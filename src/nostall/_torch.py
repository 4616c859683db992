"""The only file that uses private names of torch or handles differences between torch versions.

All other files reach torch through its public API or through this file. Private names are looked up
below, in two groups. If a name of the first is missing, importing nostall raises
:class:`UnsupportedTorchError`. Each name of the second has a slower substitute.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.storage import TypedStorage, UntypedStorage

from nostall.errors import UnsupportedTorchError
from nostall.options import is_dequantized_on_save

if TYPE_CHECKING:
    from torch.distributed.checkpoint._extension import (
        StreamTransformExtension as StreamTransformExtension,
    )

# --- required private names -----------------------------------------------------------------------


def _unsupported(why: object) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"nostall does not work with torch {torch.__version__}: {why}",
        hint="this nostall supports torch 2.9 to 2.15; a newer nostall may support a newer torch",
    )


try:
    from torch import _is_functional_tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_state_dict
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

# --- private names with slower, public substitutes -----------------------------------------------


def _optional(name: str, module: str) -> Any:
    """The object with a private name, or ``None`` if this torch does not have it."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


# Without it tensors are copied one by one.
_foreach_copy: Callable[..., Any] | None = _optional("_foreach_copy_", "torch")
# Without it ranks do not know the progress of others, and error messages say less.
_get_default_store: Callable[[], dist.Store] | None = _optional(
    "_get_default_store", "torch.distributed.distributed_c10d"
)
# Without it a default device, a mode of torch, slows tensor attribute access tenfold.
without_modes: Callable[[], AbstractContextManager[object]] = (
    _optional("DisableTorchFunction", "torch._C") or nullcontext
)
# Without it stock's planner makes every global plan.
_validate_global_plan: Callable[[list[SavePlan], Metadata], bool | list[str]] | None = _optional(
    "_validate_global_plan", "torch.distributed.checkpoint.default_planner"
)
# A plain tensor that describes its part of a larger one; missing before torch 2.14.
_CheckpointableTensor: Any = _optional(
    "CheckpointableTensor", "torch.distributed.checkpoint.protocol"
)
KNOWS_DTENSORS: bool = hasattr(DTensor, "_spec") and hasattr(DTensor, "_local_tensor")
"""Whether DTensors can be recognised from save to save; if not, each save with some is planned."""
spec_of: Callable[[DTensor], Any] = attrgetter("_spec")
"""Mesh, placements, sizes and strides of a DTensor; only if :data:`KNOWS_DTENSORS`."""
local_tensor_of: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""This rank's part of a DTensor, unknown to autograd; only if :data:`KNOWS_DTENSORS`."""


# --- names used in nostall ------------------------------------------------------------------------

METADATA_NAME: str = _metadata_fn
DCP_VERSION: str = CURRENT_DCP_VERSION
_ASYNC_SAVE = inspect.unwrap(dcp.async_save).__code__
REBUILD_TENSORS = frozenset(
    {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}
)
"""Functions that pickles of ``torch.save`` call for tensors with typed and untyped storages."""
StorageInfo: TypeAlias = _StorageInfo
StoragePrefix: TypeAlias = _StoragePrefix
MemoryFormat = _MEM_FORMAT_ENCODING
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"
OLD_METADATA_NAMES: dict[tuple[str, str], type] = {
    (_SHARDED_TENSOR, "TensorProperties"): TensorProperties,
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): MemoryFormat,
    (_FSSPEC, "_StorageInfo"): StorageInfo,
    (_FSSPEC, "_StoragePrefix"): StoragePrefix,
}
"""Classes that torch 2.0 to 2.2 names in metadata, and the present ones with the same values."""
layout_called = _get_layout
DistWrapper: TypeAlias = _DistWrapper
WrappedException: TypeAlias = tuple[BaseException, Any]


def wrap_exception(error: BaseException) -> WrappedException:
    """The form in which DCP sends an exception to other ranks."""
    # Not torch's own function: in Python 3.14 its result has code objects, which older torch
    # cannot send.
    frames = traceback.extract_tb(error.__traceback__)
    plain = [(each.filename, each.lineno or 0, each.name, each.line) for each in frames]
    return error, traceback.StackSummary.from_list(plain)


def runs_avx() -> bool:
    """Whether torch uses AVX: the processor and system support it, and it is not disabled."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def default_store() -> dist.Store | None:
    """The store used by the ranks' rendezvous; ``None`` if there is none."""
    try:
        return None if _get_default_store is None else _get_default_store()
    except (RuntimeError, ValueError):
        return None


def has_numpy() -> bool:
    """Whether torch can use NumPy; its collectives of objects, and so stock DCP, require it."""
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=256)
def can_be_viewed(dtype: torch.dtype) -> bool:
    """Whether raw memory can be viewed with this dtype; false for sub-byte and quantised types."""
    try:
        memory = bytearray(16)
        view = torch.frombuffer(memory, dtype=dtype, count=1, offset=0)
        view.copy_(torch.empty_strided((1,), (1,), dtype=dtype, device="cpu"))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # Quantised types raise RuntimeError, those below a byte NotImplementedError; frombuffer()
        # can raise the other two.
        return False
    return view.nbytes == dtype.itemsize


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor to save: detached, complete, and dequantised if its class is saved that way."""
    tensor = tensor.detach()
    if isinstance(tensor, AsyncCollectiveTensor):  # its functional collective may still run
        tensor = tensor.wait()
    if (
        type(tensor).dequantize is not torch.Tensor.dequantize  # a wrapper that supports it
        and is_dequantized_on_save(type(tensor))
    ):
        tensor = tensor.dequantize()
    return tensor


def compression() -> StreamTransformExtension:
    """Stock's stream extension for ZStandard; the package ``zstandard`` is needed."""
    from torch.distributed.checkpoint._extension import ZStandard

    return ZStandard()


def missing_data(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no data, and what to do; ``None`` if it has.

    torch itself would read past the end of the storage.
    """
    if (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        <= tensor.untyped_storage().nbytes()
    ):
        return None  # most tensors need no more than this, which is a third of the work
    if tensor.is_meta:
        return "the tensor is on the meta device and has no data; load or initialise it first"
    of_class = type(tensor)
    is_wrapper = (
        of_class is not torch.Tensor
        and of_class.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )
    has_memory = (tensor.is_cpu or tensor.is_cuda) and tensor.layout == torch.strided
    if is_wrapper or not has_memory or tensor.is_nested or not tensor.numel():
        return None
    there = tensor.untyped_storage().nbytes()
    if not can_be_viewed(tensor.dtype):
        needed = 1  # several elements may share a byte
    elif tensor.is_contiguous():
        needed = (int(tensor.storage_offset()) + tensor.numel()) * tensor.itemsize
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((n - 1) * step for n, step in steps)
        needed = (int(tensor.storage_offset()) + reach + 1) * tensor.itemsize
    if there >= needed:
        return None
    return (
        f"the tensor takes {needed} bytes of its storage, which was resized to {there}; "
        "resize it back first"
    )


def as_stock_writes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that stock passes to ``torch.save``: on the CPU, with its own exact storage."""
    tensor = tensor.cpu()
    if tensor.layout == torch.strided and (
        tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
        or tensor._is_zerotensor()  # zeros without memory, which torch.save refuses
    ):
        tensor = tensor.clone()
    return tensor


def plain_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """A strided tensor whose memory has its values; ``None`` for other layouts and subclasses."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or tensor.is_nested
        or _is_functional_tensor(tensor)
    ):
        return None
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_conj().resolve_neg()


def payload_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides with which stock writes the tensor; ``None`` if its file form is not one payload."""
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
        return None  # overlapping or gapped: stock writes the whole storage
    return dense


_PLANNERS_CALL = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
_PLANNERS_READ = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_PLANNERS_ASK = frozenset(_PLANNERS_CALL + _PLANNERS_READ)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FIXED = (type(None), bool, int, float, complex, str, bytes)


def says_its_place(tensor: torch.Tensor) -> bool:
    """Whether planners ask the tensor itself which part of a larger one it is, as a DTensor."""
    if type(tensor) in _PLAIN:
        return not _PLANNERS_ASK.isdisjoint(vars(tensor))
    return any(hasattr(tensor, name) for name in _PLANNERS_ASK)


def global_size(tensor: torch.Tensor) -> torch.Size:
    """The size of the whole tensor, which this torch's planner compares with the saved size."""
    described: Any = tensor
    if (
        _CheckpointableTensor is not None
        and hasattr(tensor, "global_shape")
        and isinstance(tensor, _CheckpointableTensor)
    ):
        return torch.Size(described.global_shape)
    return tensor.size()


def described_as(original: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """The copy, with what planners ask the original: methods of its class, and attributes.

    Unless the class answers planners, attributes that can change are left out: they may be as large
    as gradients. ``ValueError`` if a method belongs to the original alone; any error if an
    attribute cannot be copied, or an instance of the class cannot be made.
    """
    kind, torchs = type(original), DTensor if isinstance(original, DTensor) else torch.Tensor
    answers = [name for name in _PLANNERS_ASK if getattr(kind, name, 0) != getattr(torchs, name, 0)]
    if answers and type(copied) is not kind:
        copied = copied.as_subclass(kind)
    own = vars(original)
    read = {name: getattr(original, name) for name in _PLANNERS_READ if hasattr(original, name)}
    for name, value in (own | read).items():
        if name in _PLANNERS_CALL:
            raise ValueError(f"its {name} is not a method of its class, and cannot be copied")
        if name in vars(copied) or (name not in own and getattr(copied, name, None) == value):
            continue
        if answers or name in read or _is_fixed(value):
            setattr(copied, name, private_copy(value))
    return copied


def _is_fixed(value: object) -> bool:
    return type(value) in _FIXED or (isinstance(value, tuple) and all(map(_is_fixed, value)))


def private_copy(value: Any) -> Any:
    """A copy of an object or any tensor in host memory; ``torch.save`` writes it like the original.

    Made by pickling, as by ``torch.save``; objects that cannot be pickled are deep-copied.
    ``ValueError`` for a tensor without memory, except on the meta device: planning refuses those.
    """
    if type(value) in _FIXED:
        return value
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value  # planning raises the error
        if missing := missing_data(value):
            raise ValueError(missing)
        value = as_stock_writes(value)
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    try:
        pickler.dump(value)
        pickled.seek(0)
        return _Unpickler(pickled, pickler.held).load()
    except Exception:  # code of the value's class may raise anything; a planner may know the value
        return copy.deepcopy(value)


class _Pickler(pickle.Pickler):
    """Pickles an object except its storages, which are copied, and its strings and bytes.

    ``torch.save`` writes one string object once and equal ones separately; unpickling might merge
    equal ones.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.held: dict[int, Any] = {}
        self._originals: list[UntypedStorage] = []  # kept alive: keys stay unique

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
        # As torch.load does: rebuilding tensors requires typed ones.
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


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype that a pickle of a tensor names, or whose storage it names, if it is one."""
    found = getattr(torch, name, None)
    dtype = getattr(found, "_dtype", found)  # a storage's ``dtype`` warns that it is deprecated
    # Torch crashes when it copies quantized values without their scale.
    is_plain = isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    return dtype if is_plain else None


def storage_without_values(dtype: torch.dtype | None) -> Any:
    """A storage on the meta device, for the functions in :data:`REBUILD_TENSORS`."""
    held = UntypedStorage(0, device="meta")
    return TypedStorage(wrap_storage=held, dtype=dtype or torch.uint8, _internal=True)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target of the same position."""
    if _foreach_copy is not None and not any(
        target.is_conj() or target.is_neg() for target in targets
    ):
        _foreach_copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def with_other_shards(
    tensor: ShardedTensor, replace: Callable[[int, torch.Tensor], torch.Tensor]
) -> ShardedTensor:
    """A copy of a sharded tensor whose local shards are ``replace(number, tensor)``."""
    twin = copy.copy(tensor)
    shards = [copy.copy(shard) for shard in tensor.local_shards()]
    for number, shard in enumerate(shards):
        shard.tensor = replace(number, shard.tensor)
    twin._local_shards = shards
    if twin.local_shards() is not shards:
        raise _unsupported("ShardedTensor does not keep its shards in '_local_shards'")
    return twin


def with_other_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like another one whose local tensor is ``local`` itself."""
    return DTensor(local, tensor._spec, requires_grad=local.requires_grad)


def caches_plans(planner: object) -> bool:
    """Whether DCP's planner caches plans, which depend on earlier saves then."""
    return bool(getattr(planner, "_enable_plan_caching", False))


def is_valid_plan(ranks: int, metadata: Metadata) -> bool:
    """Whether stock's planner accepts the chunks of these entries; false if it cannot be asked."""
    if _validate_global_plan is None:
        return False
    plans = [SavePlan([]) for _ in range(ranks)]
    return _validate_global_plan(plans, metadata) in (True, [])


STATE_DICTS = {
    "an optimizer": {"state", "param_groups"},
    "a learning rate scheduler": {"last_epoch", "_last_lr"},
    "a gradient scaler": {"growth_factor", "_growth_tracker"},
}
"""Keys of state dicts whose objects would keep their old values when the dictionary is filled."""


def changes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """In-place changes of each tensor, as counted by torch; not for inference-mode tensors."""
    return [tensor._version for tensor in tensors]


def empty_all(tensors: Sequence[torch.Tensor]) -> None:
    """Release the memory of tensors; detached ones continue to count changes."""
    nothing = torch.empty(0)
    with torch.inference_mode(mode=False), torch.no_grad():
        for tensor in tensors:
            tensor.data = nothing


def device_for_collectives(group: dist.ProcessGroup | None) -> torch.device:
    """A device for collectives of ``group``: the CPU if it has a backend for it, else its own."""
    kinds = getattr(group or dist.group.WORLD, "_device_types", None)
    if kinds is None:
        # As in "cpu:gloo,cuda:nccl"; torch knows it only for groups that it made itself.
        kinds = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    types = {torch.device(kind).type for kind in kinds}
    if "cpu" in types:
        return torch.device("cpu")
    kind = min(types)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def arguments_of_async_save() -> Mapping[str, Any]:
    """Arguments of the ``dcp.async_save`` call that is running this; empty outside of one."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _ASYNC_SAVE:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


_OWN_PROPERTIES = len(TensorProperties().__getstate__())
"""Values in this torch's pickle of a ``TensorProperties``: dtype, layout, requires_grad, memory
format, pin_memory, and since 2.15 the tensor's strides."""
_SPARE_PROPERTIES = 6
"""Values known here. Strides can be omitted: readers make tensors from size and dtype alone."""


def own_properties(state: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A ``TensorProperties`` state of any torch, for this one; ``None`` with unknown values."""
    if len(state) > max(_OWN_PROPERTIES, _SPARE_PROPERTIES):
        return None
    return state[:_OWN_PROPERTIES]


def safe_globals() -> dict[str, object]:
    """Functions and classes given to ``add_safe_globals``, also by torch's modules, by path."""
    safe: dict[str, object] = {}
    for each in torch.serialization.get_safe_globals():
        if isinstance(each, tuple):
            safe[each[1]] = each[0]
        else:
            safe[f"{each.__module__}.{each.__qualname__}"] = each
    return safe
