"""Tensors and objects of unusual kinds have stock's bytes; what has no data is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_map_only

import nostall
from nostall import options
from nostall.core import AsyncCallsQueue
from nostall.errors import StagingError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from support.states import WAYS, blobs, read_metadata, save_stock_way, schedule

LARGE = 40_000
"""Elements of a tensor that is copied in pieces."""

# torch deprecates making quantised tensors, and says so of the storages that it rebuilds them from
# itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*quantiz.*:UserWarning",
    "ignore:.*quantiz.*:DeprecationWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
)


class Named(torch.Tensor):
    """A plain subclass: it adds nothing."""


class Scaled(torch.Tensor):
    """A wrapper: integers and a scale behind a floating-point face."""

    integers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Scaled:
        face: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=scale.dtype, device=integers.device
        )
        face.integers, face.scale = integers, scale
        return face

    def dequantize(self) -> torch.Tensor:
        return self.integers * self.scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a plain function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def on(name: str) -> Any:
            inner = tree_map_only(Scaled, lambda wrapper: getattr(wrapper, name), args)
            return func(*inner, **(kwargs or {}))

        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten.copy_.default:
            on("integers"), on("scale")
            return args[0]
        return cls(on("integers"), on("scale"))


class ElsewhereScaled(Scaled):
    """A wrapper with the name of a framework's class, by which that is recognised."""


ElsewhereScaled.__module__ = "transformer_engine.pytorch.tensor.float8_tensor"


class Registered(Scaled):
    """A wrapper whose values a user wants to be stored."""


Pair = namedtuple("Pair", ["first", "second"])


def scaled(kind: type[Scaled] = Scaled) -> Scaled:
    return kind(torch.arange(-6, 6, dtype=torch.int8), torch.tensor(0.5))


def with_attribute(name: str, value: object) -> torch.Tensor:
    tensor = torch.arange(6.0).as_subclass(Named)
    setattr(tensor, name, value)
    return tensor


def views_and_whole() -> tuple[Any, ...]:
    whole = torch.arange(100.0)
    return whole[10:13], whole, whole, torch.nn.Parameter(whole[:2])


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(12.0).view(3, 4), 0.5, 3, torch.qint8)


KINDS: dict[str, Callable[[], Any]] = {
    "subclass": lambda: torch.arange(6.0).as_subclass(Named),
    "subclass, large": lambda: torch.arange(float(LARGE)).as_subclass(Named),
    "subclass, view": lambda: torch.arange(99.0).as_subclass(Named)[3:7],
    "subclass, transposed": lambda: torch.arange(6.0).view(2, 3).as_subclass(Named).t(),
    "subclass, requires grad": lambda: torch.arange(6.0).as_subclass(Named).requires_grad_(),
    "subclass, result": lambda: torch.arange(6.0).as_subclass(Named).requires_grad_() * 2,
    "subclass, parameter": lambda: torch.nn.Parameter(torch.arange(6.0).as_subclass(Named)),
    "subclass, with an attribute": lambda: with_attribute("note", "text"),
    "subclass, waiting": lambda: with_attribute("wait", 3),
    "wrapper": scaled,
    "wrapper, parameter": lambda: torch.nn.Parameter(scaled(), requires_grad=False),
    "quantised": quantised,
    "quantised, view": lambda: quantised()[1:],
    "quantised by channel": lambda: torch.quantize_per_channel(
        torch.arange(12.0).view(3, 4), torch.ones(3), torch.zeros(3), 0, torch.quint8
    ),
    "mappings in a tuple": lambda: (
        OrderedDict(a=1, t=torch.ones(2)),
        Counter("aab"),
        defaultdict(list, a=[1]),
    ),
    "named tuple": lambda: Pair({"a": torch.ones(3)}, OrderedDict(b=2)),
    "mapping in a list of tuples": lambda: [(OrderedDict(a=1), Counter("aab"))],
    "views of one storage in a tuple": views_and_whole,
    "subclasses in a tuple": lambda: (torch.ones(3).as_subclass(Named), scaled(), quantised()),
    "one list twice": lambda: [[1, "text"]] * 2,
    "one list twice in a tuple": lambda: ([1, "text"],) * 2,
}


def emptied(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    """The tensor, after its memory was taken away."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A checkpoint of all kinds by stock's writer."""
    save_stock_way(tmp_path / "stock", {kind: make() for kind, make in KINDS.items()})
    return tmp_path / "stock"


def test_every_kind_is_stored_as_stock_stores_it_whichever_way(tmp_path: Path, stock: Path) -> None:
    """Subclasses, wrappers, quantised tensors and others: bytes and metadata are stock's."""
    expected, entries = blobs(stock), read_metadata(stock).state_dict_metadata
    different = []
    for way, save in WAYS.items():
        save(tmp_path / way, {kind: make() for kind, make in KINDS.items()})
        got = blobs(tmp_path / way)
        assert read_metadata(tmp_path / way).state_dict_metadata == entries
        assert got.keys() == expected.keys()
        different += [(way, index[0]) for index in expected if got[index] != expected[index]]
    assert not different


def test_what_a_stager_has_copied_is_not_shared(tmp_path: Path) -> None:
    """Tensors in subclasses, wrappers and objects may change as soon as they are staged."""
    wrapper, plain, held = scaled(), torch.arange(6.0), torch.arange(5.0)
    state = {"wrapper": wrapper, "subclass": plain.as_subclass(Named), "object": (held, [1])}
    save_stock_way(tmp_path / "stock", state)
    writer = FileSystemWriterAsync(tmp_path / "ours")
    staged = writer.stage(state)
    for tensor in (wrapper.integers, wrapper.scale, plain, held):
        tensor.zero_()
    state["object"][1].append(2)  # type: ignore[index]  # an object of the dict
    dcp.save(staged, storage_writer=writer, no_dist=True)
    assert blobs(tmp_path / "ours") == blobs(tmp_path / "stock")


STORED_AS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "of a registered class": (lambda: scaled(Registered), lambda: scaled().dequantize()),
    "of a framework's class": (lambda: scaled(ElsewhereScaled), lambda: scaled().dequantize()),
    "on its way": (lambda: AsyncCollectiveTensor(torch.arange(6.0)), lambda: torch.arange(6.0)),
    "zeros": (lambda: torch._efficientzerotensor((4,)), lambda: torch.zeros(4)),
    "many zeros": (lambda: torch._efficientzerotensor((LARGE,)), lambda: torch.zeros(LARGE)),
    "no zeros": (lambda: torch._efficientzerotensor((0,)), lambda: torch.zeros(0)),
}
"""Tensors, and the plain ones whose bytes are stored for them."""


@pytest.mark.parametrize("kind", STORED_AS)
def test_a_tensor_is_stored_as_what_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Dequantised as users register or frameworks expect, waited for, or zero without memory."""
    registered = {f"{Registered.__module__}.{Registered.__name__}"}
    monkeypatch.setattr(options, "dequantized_on_save", options.dequantized_on_save | registered)
    make, plain = STORED_AS[kind]
    save_stock_way(tmp_path / "stock", {"item": plain()})
    for way, save in WAYS.items():
        save(tmp_path / way, {"item": make()})
        assert blobs(tmp_path / way) == blobs(tmp_path / "stock"), way


# --- no data --------------------------------------------------------------------------------------

RESIZED = r"resized to \d+; resize it back"
NO_DATA: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "large": (lambda: emptied(torch.ones(LARGE)), RESIZED),
    "transposed": (lambda: emptied(torch.ones(4, 6).t()), RESIZED),
    "view": (lambda: emptied(torch.ones(99)[20:30]), RESIZED),
    "subclass": (lambda: emptied(torch.ones(8)).as_subclass(Named), RESIZED),
    "shortened": (lambda: emptied(torch.ones(10), nbytes=8), RESIZED),
    "shortened, large": (lambda: emptied(torch.ones(LARGE), nbytes=4000), RESIZED),
    "meta": (lambda: torch.ones(5, device="meta"), "meta device"),
    "meta, subclass": (lambda: torch.ones(5, device="meta").as_subclass(Named), "meta device"),
    "functional": (
        lambda: torch._to_functional_tensor(torch.ones(LARGE)),
        "invalid python storage",
    ),
}


@pytest.mark.parametrize("kind", NO_DATA)
def test_a_tensor_without_data_is_refused(tmp_path: Path, kind: str) -> None:
    """By name; FSDP frees the memory of parameters. No byte past a resized storage is read."""
    nostall.configure(EngineOptions(chunk_nbytes=4096, io_threads=2))
    make, reason = NO_DATA[kind]
    for way, save in WAYS.items():
        with pytest.raises((CheckpointException, StagingError), match=f"'item'.*{reason}"):
            save(tmp_path / way, {"other": torch.ones(3), "item": make()})
        assert not (tmp_path / way / ".metadata").exists()


@pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
def test_a_structure_saved_before_is_looked_at_for_memory(tmp_path: Path, size: int) -> None:
    """A tensor that loses its memory between two saves is refused by name, until it is back."""
    state = {f"w{n}": torch.full((size,), float(n)) for n in range(4)}
    view = state["w2"][3:]
    state["view"] = view
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()

    def save(name: str) -> None:
        (tmp_path / name).mkdir()
        schedule(queue, tmp_path / name, state, cache=cache)
        queue.maybe_finalize_async_calls(blocking=True)

    for number in range(3):
        save(f"{number}")
    emptied(view)
    with pytest.raises(CheckpointException, match=r"'w2'.*resized to 0"):
        save("refused")
    assert not (tmp_path / "refused" / ".metadata").exists()
    emptied(view, nbytes=size * 4)
    state["w2"].fill_(7)
    save("again")
    queue.close()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "again"), no_dist=True)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())


def test_a_jagged_tensor_is_refused(tmp_path: Path) -> None:
    """Its lengths are not numbers: no reader would understand the metadata."""
    ragged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(CheckpointException, match=r"'ragged' cannot be staged.*jagged"):
        WAYS["split"](tmp_path / "saved", {"good": torch.ones(3), "ragged": ragged})
    assert not (tmp_path / "saved" / ".metadata").exists()


class Unpicklable:
    """Its pickling fails."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return 1 // 0, ()


def test_the_error_of_a_process_that_saves_alone_has_its_cause(tmp_path: Path) -> None:
    """With the traceback of the code that failed, which a message between ranks cannot carry."""
    queue = AsyncCallsQueue()
    schedule(queue, tmp_path, {"w": torch.ones(3), "object": Unpicklable()})
    with pytest.raises(CheckpointException) as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    cause: BaseException | None = raised.value.failures[0][0]
    while cause is not None and not isinstance(cause, ZeroDivisionError):
        cause = getattr(cause, "cause", None) or cause.__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
