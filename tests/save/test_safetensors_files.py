"""Checkpoints of safetensors files, judged by the package and by stock's reader and writer."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import nostall
from nostall import _torch
from nostall.cli import main
from nostall.errors import DamagedCheckpointError, OptionError, ReadError, StagingError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from programs.streams import Zlib
from support.object_store import S3Server
from support.parts import Halving, InHalves
from support.ranks import run_ranks
from support.reads import empty_like, same
from support.states import save_in_background, save_now, save_split, shard_files

State = dict[str, Any]
FROM_BYTES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
"""All dtypes of the format that the package gives to torch, but ``bool``."""
ONLY_WRITTEN = {torch.float4_e2m1fn_x2: ("F4", 2), torch.float8_e8m0fnu: ("F8_E8M0", 1)}
"""Dtypes that the package writes, but does not give to torch, with the values that torch counts as
one."""


OF_FORMAT: State = {"serialization_format": SerializationFormat.SAFETENSORS}
save: Callable[..., None] = partial(save_now, **OF_FORMAT)
in_background: Callable[..., None] = partial(save_in_background, **OF_FORMAT)
split: Callable[..., None] = partial(save_split, **OF_FORMAT)
WAYS: dict[str, Callable[..., None]] = {
    "dcp.save": save,
    "dcp.async_save": in_background,
    "dcp.async_save, overlapped": partial(in_background, staging="overlapped"),
    "split": split,
    "split, overlapped": partial(split, staging="overlapped"),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def state_of(seed: int = 0) -> State:
    """Tensors of several dtypes, large, empty, without dimensions, transposed; odd names."""
    torch.manual_seed(seed)
    return {
        "weight": torch.randn(600, 1000),
        "nested": {"b": torch.arange(7) + seed, "list": [torch.ones(3, dtype=torch.bfloat16)]},
        "transposed": torch.randn(30, 40).t(),
        "every second": torch.arange(40)[::2],
        'odd "name"\n\u00e9\u4e2d\x01\U0001f600': torch.randn(3),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "archive": archive_as_bytes(),
    }


def archive_as_bytes() -> torch.Tensor:
    """A byte tensor that holds an archive, as frameworks store objects: not a saved tensor."""
    buffer = io.BytesIO()
    torch.save(torch.arange(6.0), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def flat(state: State) -> dict[str, torch.Tensor]:
    """Contiguous tensors by DCP's names, in the order of the state dict."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, list):
            value = dict(enumerate(value))  # noqa: PLW2901  # its names are its positions
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[name] = value.contiguous()
    return found


def header_in(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a file, and what follows it."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def as_the_package_writes(content: bytes, tensors: dict[str, torch.Tensor]) -> bytes:
    """The file of the package with the same ``__metadata__``, whose order the package shuffles."""
    metadata, _ = header_in(content)
    for _ in range(500):
        made: bytes = safetensors.torch.save(tensors, metadata["__metadata__"])
        if list(header_in(made)[0]["__metadata__"]) == list(metadata["__metadata__"]):
            return made
    raise AssertionError("not one of 500 orders was ours")


def assert_holds(path: Path, state: State) -> None:
    """Loaded by nostall in each way and by stock's reader of such files; and it is whole."""
    for reader in (
        nostall.FileSystemReader(path),
        nostall.FileSystemReader(path, verify="crc"),
        nostall.CachedMetadataFileSystemReader(path),
        HuggingFaceStorageReader(str(path)),
    ):
        found = empty_like(state)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert same(found, state)
    found = empty_like(state)
    nostall.load(found, path)
    assert same(found, state)
    assert nostall.is_complete(path)
    verified = nostall.verify(path)
    assert verified.ok
    assert verified.has_manifest
    assert not verified.unchecked


def only_file(path: Path) -> bytes:
    (content,) = shard_files(path).values()
    return content


@every_way
def test_a_file_is_the_one_of_the_package(tmp_path: Path, way: Callable[..., None]) -> None:
    """Byte for byte, with the offsets of the parts where DCP has them; a second save is staged."""
    for step in range(3):
        path, state = tmp_path / str(step), state_of(step)
        way(path, state)
        ((name, content),) = shard_files(path).items()
        assert name == "__0_0.safetensors"
        assert content == as_the_package_writes(content, flat(state))
        assert same(safetensors.torch.load(content), flat(state))
        header, _ = header_in(content)
        parts = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        assert parts == {
            fqn: {"saved_offsets": [0] * each.ndim} for fqn, each in flat(state).items()
        }
        assert_holds(path, state)


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    """Any bits of it, among them NaN, in the package's order of dtypes and names."""
    torch.manual_seed(1)
    values = torch.randint(0, 256, (64,), dtype=torch.uint8)
    names = {f"{a} {each}": each for a in "ba" for each in FROM_BYTES}
    read = {name: values.clone().view(each).reshape(2, -1) for name, each in names.items()}
    read |= {f"one {each}": values.view(each)[0].clone() for each in FROM_BYTES}
    read |= {"bool": values > 128, "one bool": values[0] > 128}
    written = {**read, **{str(each): values.clone().view(each) for each in ONLY_WRITTEN}}
    for name, state in (("read", read), ("written", written)):
        save(tmp_path / name, state)
        content = only_file(tmp_path / name)
        assert content == as_the_package_writes(content, state)
    assert_holds(tmp_path / "read", read)


@pytest.mark.parametrize("dtype", ONLY_WRITTEN, ids=str)
def test_dtypes_that_the_package_only_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    """It reads them as bytes; nostall's readers give them to torch."""
    name, count = ONLY_WRITTEN[dtype]
    values = torch.arange(24, dtype=torch.uint8).view(dtype).reshape(3, 8)
    save(tmp_path, {"x": values})
    content = only_file(tmp_path)
    assert content == as_the_package_writes(content, {"x": values})
    said = header_in(content)[0]["x"]
    assert said == {"dtype": name, "shape": [3, 8 * count], "data_offsets": [0, 24]}
    ((_, parsed),) = safetensors.deserialize(content)
    assert parsed["data"] == bytes(range(24))
    found = {"x": torch.zeros(24, dtype=torch.uint8).view(values.dtype).reshape(3, 8)}
    if not _torch.can_be_viewed(dtype):  # before torch 2.10
        with pytest.raises(ReadError, match="cannot copy x"):
            nostall.load(found, tmp_path)
        return
    nostall.load(found, tmp_path)
    assert torch.equal(found["x"].view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (5, "an object"),
        (["a"], "an object"),
        (torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
        (torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
    ],
    ids=["int", "list", "complex128", "half a byte", "sparse"],
)
@every_way
def test_what_the_format_does_not_have_is_named(
    tmp_path: Path, way: Callable[..., None], value: Any, kind: str
) -> None:
    """Before a file is written: stock writes broken ones, or fails in the middle."""
    with pytest.raises((CheckpointException, StagingError)) as caught:
        way(tmp_path / "new", {"model": torch.ones(3), "strange": value})
    error = caught.value
    if isinstance(error, CheckpointException):
        (failure,) = error.failures.values()
        error = failure[0]
    assert isinstance(error, StagingError)
    assert "'strange'" in str(error)
    assert kind in str(error)
    assert "TORCH_SAVE" in str(error.hint)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"], ids=["reserved", "surrogate"])
def test_a_name_that_the_format_does_not_have_is_an_error(tmp_path: Path, name: str) -> None:
    """The package writes a file with the first one that it cannot read."""
    with pytest.raises(CheckpointException, match="cannot hold"):
        save(tmp_path, {name: torch.ones(2)})
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_as_planned_are_an_error(tmp_path: Path) -> None:
    """A reader relies on dtype and shape in the metadata, as there is no archive to ask."""
    with pytest.raises(CheckpointException, match=r"bfloat16 \[2\], not what the planner"):
        save(tmp_path, {"x": torch.ones(2)}, planner=Halving())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["open_file", "_extensions"])
def test_options_that_change_the_bytes_are_refused(tmp_path: Path, option: str) -> None:
    """Where the writer is made."""
    value: Any = {"open_file": io.open_code, "_extensions": [Zlib()]}[option]
    with pytest.raises(OptionError, match="TORCH_SAVE"):
        FileSystemWriterAsync(tmp_path, **OF_FORMAT, **{option: value})


def test_lazy_values_are_written_as_they_are(tmp_path: Path) -> None:
    """Not as they are in memory, as a known structure would copy them; odd strides, too."""
    complex_ones, one = torch.randn(4, dtype=torch.complex64).conj(), torch.randn(7)[::7]
    negated = torch.randn(1 << 20)
    states: tuple[dict[str, torch.Tensor], ...] = (
        {"conj": complex_ones, "neg": complex_ones.imag, "expanded": torch.ones(1).expand(5)},
        {"negated": torch._neg_view(negated)},
        {"one": one.unsqueeze(0), "tied": one.unsqueeze(0)},
    )
    for number, state in enumerate(states):
        cache = CheckpointMetadataCache()
        for step in range(4):
            path = tmp_path / f"{number} {step}"
            split(path, state, cache=cache)
            found = {
                name: torch.zeros(each.shape, dtype=each.dtype) for name, each in state.items()
            }
            nostall.load(found, path)
            assert all(torch.equal(found[name], each) for name, each in state.items())
            for each in (complex_ones, negated, one):
                each.add_(1)


def _long_header() -> State:
    named = {
        f"{number} {'x' * 300}": torch.full((n,), float(n)) for number, n in enumerate(LENGTHS)
    }
    return {**named, "last": torch.randn(40_000)}


def _layers() -> State:
    return {f"layer {number}": torch.randn(100, 1000) for number in range(8)}


def _matrices() -> State:
    return {"a": torch.randn(6, 4), "c": torch.arange(8).view(4, 2)}


PAGES: State = {"chunk_nbytes": 4096, "io_threads": 2}
LENGTHS = [0, 1, 1000, 0, 0, 1025, 3, 2, 1024, *([5] * 40)]


SPREAD: dict[str, tuple[Callable[[], State], Callable[..., None], State, State, int]] = {
    "files": (state_of, save, {"thread_count": 3}, {}, 3),
    "one per item": (state_of, split, {"single_file_per_rank": False}, {}, 10),
    "separation": (state_of, split, {"thread_count": 2, "separation_hint": "nested"}, {}, 2),
    "waves": (_layers, split, {}, {"max_staging_bytes": 1 << 20}, 8),
    "waves, async": (_layers, in_background, {}, {"max_staging_bytes": 1 << 20}, 8),
    "a header longer than a chunk": (_long_header, save, {}, PAGES, 1),
    "parts of one name": (_matrices, save, {"planner": InHalves()}, {}, 2),
}
"""States, how and with which options they are saved, and the number of files."""


@pytest.mark.parametrize("kind", SPREAD)
def test_items_in_any_number_of_files(tmp_path: Path, kind: str) -> None:
    """Each is a file of the package, with a name once; all together hold everything."""
    make, way, options, of_engine, count = SPREAD[kind]
    nostall.configure(EngineOptions(**of_engine))
    state = make()
    way(tmp_path, state, **options)
    files, whole = shard_files(tmp_path), flat(state)
    assert len(files) == count
    names = [safetensors.torch.load(content).keys() for content in files.values()]
    assert set().union(*names) == set(whole)
    if kind != "parts of one name":
        for content, of_file in zip(files.values(), names, strict=True):
            ordered = {name: each for name, each in whole.items() if name in of_file}
            assert content == as_the_package_writes(content, ordered)
    assert_holds(tmp_path, state)


def test_overwriting(tmp_path: Path) -> None:
    """By other files, and by the other format and back: what is left is the last checkpoint."""
    for step in range(2):
        state = {**state_of(step), f"only in {step}": torch.ones(step)}
        save(tmp_path, state)
        (name,) = shard_files(tmp_path)
        assert (name == "__0_0.safetensors") == (step == 0)
        assert_holds(tmp_path, state)
    dcp.save(state_of(), storage_writer=FileSystemWriterAsync(tmp_path), no_dist=True)
    (name,) = shard_files(tmp_path)
    assert name.endswith(".distcp")
    save(tmp_path, state_of(3))
    assert_holds(tmp_path, state_of(3))
    with pytest.raises(CheckpointException, match="CheckpointExistsError"):
        save(tmp_path, state_of(), overwrite=False)


def test_damage_is_found(tmp_path: Path) -> None:
    """A flipped bit of the header or of a value, and a file that is cut off or missing."""
    state = state_of()
    save(tmp_path, state)
    (path,) = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    for at in (3, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        (damage,) = nostall.verify(tmp_path).damages
        assert damage.file == path.name
        assert "CRC-32" in damage.what
    path.write_bytes(content[:-1])
    assert not nostall.is_complete(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="its items end at"):
        nostall.load(empty_like(state), tmp_path)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match="missing"):
        nostall.load(empty_like(state), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.qint8, torch.complex128], ids=str)
def test_metadata_of_another_dtype_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without manifest and index, as another program may write them."""
    save(tmp_path, {"x": torch.ones(4)})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = {"x": torch.zeros(4)}
    nostall.load(found, tmp_path)
    assert torch.equal(found["x"], torch.ones(4))
    assert nostall.verify(tmp_path).unchecked == ("x",)
    metadata.state_dict_metadata["x"].properties.dtype = dtype
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match="not those of its dtype and shape"):
        nostall.load(found, tmp_path)


def test_stocks_plain_reader_says_that_it_does_not_know_the_format(tmp_path: Path) -> None:
    """It would take the values for an archive: the metadata says that they are none."""
    save(tmp_path, {"x": torch.ones(4)})
    with pytest.raises(CheckpointException, match="Unknown extension name='safetensors'"):
        dcp.load({"x": torch.zeros(4)}, checkpoint_id=tmp_path, no_dist=True)


def test_commands_and_functions_for_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Find the last, look, compare, convert and remove."""
    state = state_of()
    root = tmp_path / "run"
    save(root / "step-1", state)
    save(root / "step-2", {**state, "scalar": torch.tensor(9.0)})
    assert nostall.latest_complete(root) == str(root / "step-2")
    assert main(["verify", str(root / "step-1")]) == 0
    assert main(["inspect", str(root / "step-1")]) == 0
    assert "weight" in capsys.readouterr().out
    assert main(["diff", "--values", str(root / "step-1"), str(root / "step-2")]) == 1
    assert "scalar" in capsys.readouterr().out
    assert main(["convert", str(root / "step-1"), str(tmp_path / "one.safetensors")]) == 0
    assert same(safetensors.torch.load_file(tmp_path / "one.safetensors"), flat(state))
    assert main(["convert", str(root / "step-1"), str(tmp_path / "one.pt")]) == 0
    assert same(torch.load(tmp_path / "one.pt"), state)
    for step in (1, 2):
        nostall.remove_checkpoint(root / f"step-{step}")
    assert not list(root.iterdir())


def test_files_of_others_are_not_removed(tmp_path: Path) -> None:
    """A model beside a checkpoint, and a directory of a model."""
    save(tmp_path / "both", {"x": torch.ones(2)})
    for place in ("both", "model"):
        (tmp_path / place).mkdir(exist_ok=True)
        safetensors.torch.save_file(
            {"y": torch.ones(2)}, tmp_path / place / "model-00001-of-00001.safetensors"
        )
    nostall.remove_checkpoint(tmp_path / "both")
    with pytest.raises(OptionError, match="not a checkpoint"):
        nostall.remove_checkpoint(tmp_path / "model")
    for place in ("both", "model"):
        (left,) = (tmp_path / place).iterdir()
        assert left.name == "model-00001-of-00001.safetensors"


def test_in_an_object_store(s3: S3Server) -> None:
    """Written, replaced, read and removed as other checkpoints."""
    bucket = s3.new_bucket()
    for step in range(2):
        save(f"s3://{bucket}/step", state_of(step))
        found = empty_like(state_of())
        nostall.load(found, f"s3://{bucket}/step")
        assert same(found, state_of(step))
        assert nostall.verify(f"s3://{bucket}/step").ok
    nostall.remove_checkpoint(f"s3://{bucket}/step")
    assert s3.keys(bucket) == []


def test_ranks_write_what_stocks_writer_does(tmp_path: Path) -> None:
    """Two ranks with parts of tensors, in each way; read by stock's reader with other parts."""
    for wrong in run_ranks(2, "safetensors_files:everything", tmp_path):
        assert wrong == []
