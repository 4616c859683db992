"""nostall stores, byte for byte, what stock DCP stores: files, items and metadata."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem
from torch.utils.serialization import config

import nostall
from nostall._model.checksum import combine_hash
from nostall._model.values import Container
from nostall._plan.formats import with_seal
from nostall._plan.items import container_skeleton
from nostall.core import AsyncCallsQueue
from nostall.errors import NostallError
from nostall.filesystem_async import FileSystemWriterAsync
from support.sealing import seal_patches
from support.states import (
    PLAIN_WAYS,
    blobs,
    read_metadata,
    save_async,
    save_stock_way,
    schedule,
    shard_files,
    small_state,
)

GIB = 1 << 30
ORDINARY_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
}
DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.uq"))
    },
    key=str,
)


# --- making and saving ----------------------------------------------------------------------------


def filled(dtype: torch.dtype, shape: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of arbitrary bits, which for booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for extent in shape:
        count *= extent
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def save_stock(path: Path, state: dict[str, Any], **options: Any) -> None:
    save_stock_way(path, state, planner=RawBytesPlanner(), **options)


def save_ours(path: Path, state: dict[str, Any], **options: Any) -> None:
    writer = FileSystemWriterAsync(path, sync_files=False, **options)
    dcp.save(state, storage_writer=writer, planner=RawBytesPlanner(), no_dist=True)


class RawBytesPlanner(DefaultSavePlanner):
    """Stores ``bytes`` objects as they are; everything else as the default planner does."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # stock calls it so
        if isinstance(object, bytes):
            return io.BytesIO(object)
        return super().transform_object(write_item, object)


def differing_files(directory: Path, state: dict[str, Any], **options: Any) -> set[str]:
    """Names of shard files that the two writers do not both fill, or fill with other bytes."""
    save_stock(directory / "stock", state, **options)
    save_ours(directory / "ours", state, **options)
    expected, got = shard_files(directory / "stock"), shard_files(directory / "ours")
    assert expected
    filled = {
        name: content for name, content in expected.items() if content
    }  # stock's may be empty
    return {name for name in {*filled, *got} if filled.get(name) != got.get(name)}


def assert_same_files(directory: Path, state: dict[str, Any], **options: Any) -> None:
    """Both writers make the same shard files out of a state dict."""
    assert not differing_files(directory, state, **options)


def saved_alone(value: Any) -> bytes:
    """The archive that ``torch.save`` writes for one item, called as stock DCP calls it."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.layout == torch.strided and value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# --- one kind of item at a time -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_is_stored_as_stock_stores_it(tmp_path: Path) -> None:
    """Tensors of any dtype that stock can save give the same file; what stock refuses fails."""
    different = []
    for dtype in DTYPES:
        state = {
            "t": filled(dtype, (7, 6)),
            "transposed": filled(dtype, (4, 6)).t(),
            "view": filled(dtype, (40,))[10:20],
            "scalar": filled(dtype, ()),
            "empty": filled(dtype, (0, 3)),
        }
        directory = tmp_path / str(dtype)
        try:
            save_stock(directory / "try", state)
        except dcp.api.CheckpointException:
            assert dtype not in ORDINARY_DTYPES
            with pytest.raises(dcp.api.CheckpointException):
                save_ours(directory, state)
            assert not (directory / ".metadata").exists()
        else:
            if differing_files(directory, state):
                different.append(dtype)
    assert not different


def _channels_last(*shape: int) -> torch.Tensor:
    return filled(torch.float32, shape).to(memory_format=torch.channels_last)


F32 = torch.float32
KINDS: dict[str, Callable[[], Any]] = {
    "scalar": lambda: torch.tensor(3.5),
    "one element": lambda: torch.ones(1),
    "empty": lambda: torch.empty(0),
    "empty in the middle, transposed": lambda: torch.empty(3, 0, 2).transpose(0, 2),
    "empty view with odd strides": lambda: torch.empty(10).as_strided((0, 3), (7, 2)),
    "empty view beyond an empty storage": lambda: torch.empty(4, 0)[2:],
    "transposed": lambda: filled(F32, (8, 5)).t(),
    "expanded": lambda: filled(F32, (3, 1)).expand(3, 4),
    "view of a larger storage": lambda: filled(F32, (100,))[10:20],
    "overlapping over a storage of its own size": lambda: filled(F32, (6,)).as_strided(
        (2, 3), (2, 1)
    ),
    "gaps over a storage of its own size": lambda: filled(F32, (6,)).as_strided((2, 3), (3, 0)),
    "column-major over a storage of its own size": lambda: filled(F32, (6,)).as_strided(
        (2, 3), (1, 2)
    ),
    "size-1 dimension with an odd stride": lambda: torch.empty(3).as_strided((1, 3), (17, 1)),
    "size-1 dimension with stride zero": lambda: filled(F32, (3,)).as_strided((3, 1), (1, 0)),
    "another dtype's storage": lambda: filled(F32, (6,)).view(torch.uint8),
    "another dtype's storage, misaligned": lambda: filled(torch.uint8, (40,))[4:20].view(F32),
    "channels last": lambda: _channels_last(2, 3, 4, 5),
    "channels last, every other image": lambda: _channels_last(4, 3, 4, 5)[::2],
    "conjugated": lambda: filled(torch.complex64, (4, 3)).conj(),
    "conjugated, transposed view": lambda: filled(torch.complex64, (8, 3))[2:5].conj().t(),
    "negated": lambda: filled(torch.complex64, (4, 3)).conj().imag,
    "negated over a storage of its own size": lambda: torch._neg_view(filled(F32, (4, 3))),
    "requires grad": lambda: filled(F32, (4, 3)).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(filled(F32, (4, 3))),
    "parameter, transposed": lambda: torch.nn.Parameter(filled(F32, (9, 3)).t()),
    "in shared memory": lambda: filled(F32, (4, 3)).share_memory_(),
    "larger than a chunk": lambda: filled(torch.uint8, ((8 << 20) + 4097,)),
    "tensors in a list": lambda: [torch.ones(3), {"deep": torch.zeros(2)}],
    "set": lambda: {1},
    "size": lambda: torch.Size([2, 3]),
    "bytes": lambda: b"\x00\x01PK\x03\x04",
    "more bytes than a chunk": lambda: bytes(range(256)) * ((8 << 12) + 5),
}


def test_all_kinds_of_items_are_stored_as_stock_stores_them(tmp_path: Path) -> None:
    """Whatever lies behind an item, alone and beside all others: views of one storage, too."""
    different = {
        each for each, make in KINDS.items() if differing_files(tmp_path / each, {"item": make()})
    }
    assert not different
    base = filled(F32, (10, 10))
    views = {"a": base, "b": base, "c": base[:3], "d": base.t(), "e": base[2:]}
    assert_same_files(tmp_path, {**{kind: make() for kind, make in KINDS.items()}, **views})


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
def test_sparse_tensor_is_stored_as_torch_save_stores_it(tmp_path: Path, layout: str) -> None:
    """A sparse tensor that DCP can plan is stored as by ``torch.save``, even where stock fails."""
    dense = torch.eye(5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)
        sparse = dense.to_sparse(layout=getattr(torch, layout))
    try:
        TensorProperties.create_from_tensor(sparse)
    except RuntimeError:  # torch 2.15 notes strides, which some layouts do not have
        with pytest.raises(dcp.api.CheckpointException, match="do not have strides"):
            save_ours(tmp_path / "ours", {"s": sparse, "dense": dense})
        return
    save_ours(tmp_path / "ours", {"s": sparse, "dense": dense})
    found = {name: content for (name, _), content in blobs(tmp_path / "ours").items()}
    assert found == {"s": saved_alone(sparse), "dense": saved_alone(dense)}
    back = torch.load(io.BytesIO(found["s"]), weights_only=True)
    assert torch.equal(back.to_dense(), dense)


def test_saves_after_others_are_as_if_alone(tmp_path: Path) -> None:
    """Values, lengths of objects, and structures change: memory used before leaves no byte."""
    many = {f"w{n}": filled(F32, (50 + n,), seed=n) for n in range(30)}
    for number, nbytes in enumerate([3, 100_000, 0, 4096, 3]):
        state = {"t": filled(F32, (100,), seed=number), "raw": b"x" * nbytes, "name": "n" * nbytes}
        assert_same_files(tmp_path / f"{number}", {**state, **many, "step": number})
    assert_same_files(tmp_path / "other", {"x": filled(torch.int16, (33, 3)), "note": "short"})


# --- torch's settings -----------------------------------------------------------------------------


def aligned(nbytes: int) -> Any:
    """A block in which torch aligns payloads so."""
    return config.patch("save.storage_alignment", nbytes)  # type: ignore[attr-defined]  # torch makes it


def test_switching_checksums_between_saves_takes_effect(tmp_path: Path) -> None:
    """No save uses container bytes that were cached under the other ``set_crc32_options``."""
    state = small_state()
    assert_same_files(tmp_path / "before", state)
    torch.serialization.set_crc32_options(False)
    try:
        assert_same_files(tmp_path / "without", state)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same_files(tmp_path / "after", state)
    name = "__0_0.distcp"
    before, without = tmp_path / "before/ours" / name, tmp_path / "without/ours" / name
    assert before.read_bytes() != without.read_bytes()


@pytest.mark.parametrize("alignment", [512, 4096])
def test_storage_alignment_setting_takes_effect(tmp_path: Path, alignment: int) -> None:
    """Payloads are aligned as torch is configured, and as stock then aligns them."""
    with aligned(alignment):
        assert_same_files(tmp_path, small_state())
    with zipfile.ZipFile(io.BytesIO(blobs(tmp_path / "ours")["weight", (0, 0)])) as archive:
        assert archive.read("archive/.storage_alignment") == str(alignment).encode()


# --- any combination ------------------------------------------------------------------------------

STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "reversed": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "every other": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "tail of a storage": lambda t: (
        torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[-t.numel() :].view(t.shape)
        if t.numel()
        else t
    ),
    "expanded": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    "rolled dimensions": lambda t: t.movedim(0, -1) if t.dim() else t,
    "channels last": lambda t: (
        t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    ),
    "odd size-1 stride": lambda t: t.as_strided(
        (*t.shape[:1], 1, *t.shape[1:]), (*t.stride()[:1], 97, *t.stride()[1:])
    ),
    "parameter": lambda t: torch.nn.Parameter(t) if t.is_floating_point() else t,
}
ANY_TENSOR = st.tuples(
    st.sampled_from(sorted(ORDINARY_DTYPES, key=str)),
    st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=4).map(tuple),
    st.sampled_from(sorted(STRIDES)),
)


@settings(max_examples=80, deadline=None)
@given(
    specs=st.lists(ANY_TENSOR, min_size=1, max_size=12),
    objects=st.integers(0, 4),
    files=st.integers(1, 5),
)
def test_any_list_of_tensors_is_stored_as_stock_stores_it(
    specs: list[tuple[torch.dtype, tuple[int, ...], str]], objects: int, files: int
) -> None:
    """Any dtypes, shapes and strides, and objects, are in stock's files, in its order."""
    state: dict[str, Any] = {
        f"t{number}": STRIDES[strides](filled(dtype, shape, seed=number))
        for number, (dtype, shape, strides) in enumerate(specs)
    }
    state |= {f"object {number}": "x" * number for number in range(objects)}
    with tempfile.TemporaryDirectory() as directory:
        assert_same_files(Path(directory), state, thread_count=files)


# --- pieces and threads ---------------------------------------------------------------------------


@pytest.mark.parametrize(("io_threads", "direct_io"), [(1, True), (3, True), (3, False)])
def test_chunk_bounds_do_not_show(tmp_path: Path, io_threads: int, *, direct_io: bool) -> None:
    """Wherever a bound falls behind a payload, both sides are sealed before they are written."""
    nostall.configure(
        nostall.EngineOptions(chunk_nbytes=4096, io_threads=io_threads, direct_io=direct_io)
    )
    state: dict[str, Any] = {"many chunks": filled(torch.uint8, (100_003,))}
    state |= {f"small {n}": filled(torch.int16, (n % 7, 2), seed=n) for n in range(300)}
    state |= {f"near a bound {n}": filled(torch.uint8, (4096 + n,), seed=n) for n in range(-9, 10)}
    state |= {f"object {n}": "x" * (n * 331) for n in range(30)}
    # Each container is a little shorter than a chunk, by an odd number: the bounds wander through
    # all of its bytes.
    length = len(saved_alone(filled(torch.uint8, (2530,))))
    assert 4096 - 64 < length < 4096
    assert length % 2 == 1
    state |= {
        f"t{n}": filled(torch.uint8, (2530,), seed=n) for n in range(1500 if io_threads > 1 else 9)
    }
    assert_same_files(tmp_path, state)


def test_a_container_may_end_several_chunks_behind_its_payload(tmp_path: Path) -> None:
    """With far apart records, all chunks up to the archive's end wait for the payload's sum."""
    nostall.configure(nostall.EngineOptions(chunk_nbytes=4096, io_threads=6))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        # Putting the sums of two thousand pieces together takes longer than writing what lies
        # behind them.
        with aligned(1 << 16):
            assert_same_files(tmp_path, {"t": filled(torch.uint8, (8 << 20,))})
    finally:
        sys.setswitchinterval(interval)


def test_records_further_apart_than_an_archive_can_say_are_refused(tmp_path: Path) -> None:
    """torch itself cannot read what it writes with an alignment beyond 64 KiB."""
    with (
        aligned(1 << 20),
        pytest.raises(dcp.api.CheckpointException, match="storage_alignment"),
    ):
        save_ours(tmp_path, {"t": filled(torch.uint8, (100,))})
    assert not (tmp_path / ".metadata").exists()


def test_one_file_per_item_is_stocks(tmp_path: Path) -> None:
    """With ``single_file_per_rank=False`` files have stock's names and content."""
    assert_same_files(tmp_path, small_state(), single_file_per_rank=False)


@pytest.mark.parametrize(
    ("options", "separated", "others"),
    [({"thread_count": 3}, 0, 3), ({"thread_count": 4, "separation_hint": "optimizer"}, 2, 2)],
    ids=str,
)
def test_items_spread_over_files_are_the_same_items(
    tmp_path: Path, options: dict[str, Any], separated: int, others: int
) -> None:
    """Each is as ``torch.save`` writes it; those that begin with the hint are in files named so."""
    state = {f"model.{n}": filled(F32, (40,), seed=n) for n in range(6)}
    state |= {f"optimizer.{n}": filled(F32, (90,), seed=n) for n in range(6)}
    state["opt"] = filled(F32, (3,))
    save_ours(tmp_path / "sync", state, **options)
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "async", state, **options)
    expected = {(name, (0,)): saved_alone(tensor) for name, tensor in state.items()}
    for path in (tmp_path / "sync", tmp_path / "async"):
        assert blobs(path) == expected
        files = shard_files(path)
        assert len([name for name in files if name.startswith("optimizer__0_")]) == separated
        assert len([name for name in files if name.startswith("__0_")]) == others
        for index, info in read_metadata(path).storage_data.items() if separated else ():
            is_separated = info.relative_path.startswith("optimizer")
            assert is_separated == index.fqn.startswith("optimizer")


# --- each way of saving ---------------------------------------------------------------------------


def _changing(step: int) -> dict[str, Any]:
    state = small_state(step)
    state["object"] = "x" * (10, 10, 5_000_000, 10)[step]
    state["channels last"] = _channels_last(2, 3, 4, 5) + step
    state["conjugated"] = filled(torch.complex64, (4, 3), seed=step).conj()
    state["empty view"] = torch.empty(4, 0)[2:]
    state["overlapping"] = filled(F32, (6,), seed=step).as_strided((2, 3), (2, 1))
    state["parameter"] = torch.nn.Parameter(filled(F32, (9, 3), seed=step).t())
    return state


@pytest.mark.parametrize("way", PLAIN_WAYS)
def test_each_way_of_saving_stores_what_stock_stores(tmp_path: Path, way: str) -> None:
    """Files and metadata are stock's, also of copies staged in place, from the second save on."""
    for step in range(4):
        ours, stock, state = tmp_path / f"ours {step}", tmp_path / f"stock {step}", _changing(step)
        PLAIN_WAYS[way](ours, state)
        save_stock(stock, state)
        assert shard_files(ours) == shard_files(stock)
        assert_same_metadata(ours, stock)
        assert _names_in(ours) == _names_in(stock)


def assert_same_metadata(ours: Path, stock: Path) -> None:
    mine, theirs = read_metadata(ours), read_metadata(stock)
    assert type(mine) is type(theirs)
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.planner_data == theirs.planner_data
    assert mine.version == theirs.version
    assert mine.storage_data == theirs.storage_data
    assert list(mine.storage_data) == list(theirs.storage_data)
    places = ([vars(info) for info in each.storage_data.values()] for each in (mine, theirs))
    assert next(places) == next(places)
    assert mine.storage_meta is not None
    assert mine.storage_meta.checkpoint_id == ours


def _names_in(path: Path) -> set[tuple[str, str]]:
    names = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module, name))
            return super().find_class(module, name)

    with open(path / ".metadata", "rb") as stream:
        Recorder(stream).load()
    return names


def test_a_staged_copy_can_be_computed_with(tmp_path: Path) -> None:
    """Also where its place suits no processor instruction: complex128 is the critical dtype."""
    writer = FileSystemWriterAsync(tmp_path)
    state = {f"z{n}": filled(torch.float64, (n, 2), seed=n) for n in range(1, 6)}
    state = {name: torch.view_as_complex(tensor) for name, tensor in state.items()}
    for _ in range(2):
        save_async(writer, state)
        staged = writer.stage(state)
        for name, tensor in state.items():
            assert torch.equal(staged[name].clone().view(torch.int64), tensor.view(torch.int64))
        del staged
    assert blobs(tmp_path) == {(name, (0,)): saved_alone(z) for name, z in state.items()}


# --- sealing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes",
    [5 * GIB, 4 * GIB, 4 * GIB - 1, 4 * GIB - 300],
    ids=["5 GiB", "4 GiB", "4 GiB less 1", "directory beyond 4 GiB"],
)
def test_a_container_beyond_4_gib_is_a_valid_archive(tmp_path: Path, nbytes: int) -> None:
    """Where 32 bits do not hold sizes or offsets, checksums still land in their fields."""
    crc32, path = 0xDEADBEEF, tmp_path / "container"
    container = with_seal(container_skeleton(torch.uint8, (nbytes,), (1,)), checksums=True)
    assert container.seal is not None
    begin = len(container.prefix) + nbytes
    with open(path, "wb") as stream:
        stream.write(container.prefix)
        stream.seek(begin)
        stream.write(container.suffix)
        assert stream.tell() == container.nbytes
        for at, patch in seal_patches(container.seal, crc32):
            assert begin <= at <= container.nbytes - len(patch)
            stream.seek(at)
            stream.write(patch)
        stream.seek(begin)
    assert os.stat(path).st_blocks * 512 < 1 << 20
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename.split("/", 1)[1]: entry for entry in archive.infolist()}
        payload = entries["data/0"]
        assert (payload.CRC, payload.file_size) == (crc32, nbytes)
        # Reading a record makes zipfile compare its CRC; the payload's is not that of its zeros.
        records = {name: archive.read(entry) for name, entry in entries.items() if name != "data/0"}
        order = sorted(entries.values(), key=lambda entry: entry.header_offset)
    state = 0
    for entry in order[:-1]:
        state = combine_hash(state, entry.CRC) if entry.file_size else state
    assert order[-1].filename.endswith("/.data/serialization_id")
    assert records[".data/serialization_id"][20:] == b"%020d" % state
    with open(path, "rb") as stream:
        stream.seek(begin)
        magic, in_descriptor = struct.unpack("<4sI", stream.read(8))
    assert (magic, in_descriptor) == (b"PK\x07\x08", crc32)
    mapped = torch.load(path, mmap=True, weights_only=True)
    assert (mapped.dtype, mapped.shape) == (torch.uint8, (nbytes,))


def test_a_container_of_another_form_is_refused() -> None:
    """An archive that does not end with the identifier record is an error, not a wrong seal."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", b"3\n")
    content = stream.getvalue()
    begin = content.index(b"archive/data/0") + len(b"archive/data/0")
    container = Container(
        prefix=content[:begin], payload_nbytes=16, suffix=content[begin + 16 :], seal=None
    )
    with pytest.raises(NostallError, match="serialization_id"):
        with_seal(container, checksums=True)
