"""Checkpoints in S3: the contract, saves and loads, and a store that fails."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._save import publish as publishing
from nostall._storage.locations import storage_at
from nostall._storage.port import Conflict, Storage
from nostall.cli import main
from nostall.core import AsyncCallsQueue
from nostall.errors import NotDurableError, OptionError, ReadError, WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.filesystem_reader import Verify
from nostall.integrity import State
from nostall.prefetching import running
from programs.save_once import save, save_in_background, state_of
from support import storage_contract
from support.faults import Fault, Hold, inject
from support.object_store import ATTEMPTS, S3Server, is_loaded
from support.pages import code_blocks
from support.ranks import run_python, run_script
from support.states import schedule
from support.waiting import wait_until

PART = {"method": "PUT", "has": "partNumber"}
COMMIT = {"method": "PUT", "has": "/.metadata"}
COMPLETION = {"method": "POST", "has": "uploadId"}
SLOW_DOWN = {"do": "answer", "status": 503, "code": "SlowDown"}
ABORTS_LAST_PARTS = tuple(map(int, obstore.__version__.split(".")[:2])) >= (0, 12)
"""Whether an upload is aborted that fails when the last parts are already handed over."""


def save_and_wait(url: str, seed: int) -> None:
    """Save in the background, and wait for it."""
    save_in_background(url, seed).result()


def shard_of(url: str) -> str:
    """The name of a checkpoint's only shard file."""
    (name,) = (each for each in storage_at(url).list() if each.endswith(".distcp"))
    return name


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A new bucket."""
    return s3.new_bucket()


@pytest.fixture
def url(bucket: str) -> str:
    """The address of a checkpoint that does not exist yet."""
    return f"s3://{bucket}/run/step-1"


@pytest.mark.parametrize("check", storage_contract.CHECKS, ids=lambda check: check.__name__)
def test_s3_keeps_the_contract(s3: S3Server, bucket: str, check: Callable[[Storage], None]) -> None:
    """S3 passes the contract's checks, and no upload stays unfinished."""
    check(storage_at(f"s3://{bucket}/checkpoints/10"))
    assert s3.unfinished(bucket) == []


# --- saves and loads --------------------------------------------------------------------------


@pytest.mark.parametrize("thread_count", [1, 2])
def test_a_synchronous_save_can_be_loaded_by_everybody(url: str, thread_count: int) -> None:
    """By our readers; overwriting leaves only the new files."""
    for seed in (1, 2):
        save(url, seed, thread_count=thread_count)
        assert nostall.verify(url).ok
        assert nostall.is_complete(url)
        for reader in (nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader):
            assert is_loaded(url, seed, reader)
        names = storage_at(url).list()
        assert len(names) == 1 + thread_count
    target = state_of(5)
    assert nostall.load(target, f"{url}/").items == 4
    assert target["step"] == 2


def test_a_synchronous_save_larger_than_its_buffers_is_whole(url: str) -> None:
    """Chunks may still be on their way when the next ones are made."""
    nostall.configure(nostall.EngineOptions(io_threads=2))
    saved = {f"w{number}": torch.randn(3_000_000) for number in range(8)}
    dcp.save(saved, storage_writer=FileSystemWriterAsync(url))
    assert nostall.verify(url).ok
    nostall.load(loaded := {name: torch.zeros(3_000_000) for name in saved}, url)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("way", ["load", "restore", "killed"])
def test_what_was_prefetched_is_not_asked_for_again(s3: S3Server, url: str, way: str) -> None:
    """That is the newest checkpoint below an address; a load reads what is missing itself."""
    saved = {f"w{number}": torch.randn(3_000_000) for number in range(3)}
    root = url.rpartition("/")[0]
    with nostall.CheckpointManager(root) as manager:
        manager.save(1, saved)
    nostall.prefetch(root)
    ((process, (memory,)),) = running.values()
    if way == "killed":
        wait_until(lambda: os.fstat(memory).st_size > 0)
        process.kill()
    else:
        assert process.wait(60) == 0
    before = len(s3.requests())
    loaded = {name: torch.zeros(3_000_000) for name in saved}
    if way == "restore":
        manager.restore(loaded)
    else:
        nostall.load(loaded, manager.path(1))
    asked = [each for each in s3.requests()[before:] if "distcp" in each and "GET" in each]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert way == "killed" or not asked
    assert not running
    descriptors = Path("/proc/self/fd")
    wait_until(  # a thread closes the memory
        lambda: not any("nostall:pref" in os.path.realpath(each) for each in descriptors.iterdir())
    )


def test_a_restore_gives_back_what_it_did_not_use(url: str) -> None:
    """Memory with another step than was restored."""
    with nostall.CheckpointManager(url) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3_000_000)})
        manager.wait()
        nostall.prefetch(manager.path(1))
        assert running
        assert manager.restore({"w": torch.zeros(3_000_000)})
    assert not running


def test_a_forked_child_keeps_no_prefetched_memory(url: str) -> None:
    """A worker of a data loader lives as long as the training."""
    code = """
import os, sys, nostall
from nostall.prefetching import running
nostall.prefetch(sys.argv[1])
((_, (memory,)),) = running.values()
if (child := os.fork()) == 0:
    os._exit(os.path.lexists(f"/proc/self/fd/{memory}"))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert os.path.lexists(f"/proc/self/fd/{memory}")
"""
    done = run_python("-c", code, url, timeout_s=60)
    assert done.returncode == 0, done.stderr


def test_what_was_prefetched_of_an_older_file_is_not_loaded(s3: S3Server, url: str) -> None:
    """Other programs may use a name again; nostall does not."""
    dcp.save({"w": torch.ones(3_000_000)}, storage_writer=FileSystemWriterAsync(url))
    nostall.prefetch(url)
    ((process, _),) = running.values()
    assert process.wait(60) == 0
    bucket, _, key = f"{url}/{shard_of(url)}".removeprefix("s3://").partition("/")
    content = bytearray(s3.client().get_object(Bucket=bucket, Key=key)["Body"].read())
    content[4_000_000:4_000_400] = bytes(400)
    s3.client().put_object(Bucket=bucket, Key=key, Body=bytes(content))
    nostall.load(loaded := {"w": torch.zeros(3_000_000)}, url)
    assert 0 < (loaded["w"] != 1).sum() < 110


def test_a_save_is_loaded_by_stocks_reader_for_fsspec(url: str) -> None:
    """Which needs s3fs."""
    pytest.importorskip("s3fs", reason="`nox -s stores` installs it")
    package, name = "torch.distributed.checkpoint", "fsspec_filesystem"
    is_public = find_spec(f"{package}.{name}") is not None  # since torch 2.15
    module = import_module(f"{package}.{name if is_public else f'_{name}'}")
    save(url, 1)
    assert is_loaded(url, 1, module.FsspecReader)


def test_an_asynchronous_save_goes_through_the_writer_process(s3: S3Server, url: str) -> None:
    """The trainer uploads no part; a second one replaces the first."""
    for seed in (1, 2):
        save_and_wait(url, seed)
    assert is_loaded(url, 2)
    bucket = url.split("/")[2]
    parts = [each for each in s3.requests() if bucket in each and "partNumber" in each]
    assert len(parts) == 2 * 2  # some more than 10 MiB, in parts of 8, each once
    assert s3.unfinished(bucket) == []
    assert len(s3.keys(bucket)) == 2


@pytest.mark.parametrize("nbytes", [3, 24])
def test_the_store_gets_the_checksum_of_each_part(s3: S3Server, bucket: str, nbytes: int) -> None:
    """So that it can compare all that it has received."""
    url, mebi = f"s3://{bucket}/x", 1 << 20
    state = {"x": torch.arange(nbytes * mebi, dtype=torch.uint8)}
    dcp.save(state, storage_writer=FileSystemWriterAsync(url), no_dist=True)
    puts = [each for each in s3.requests() if each.startswith("PUT") and bucket in each]
    source = storage_at(url).open(shard_of(url))
    content = bytearray(source.stat.nbytes)
    source.read_into(0, memoryview(content))
    parts = [content[begin : begin + 8 * mebi] for begin in range(0, len(content), 8 * mebi)]
    sums = {each.rpartition(" ")[2] for each in puts if ".distcp" in each}
    assert sums == {sha256(part).hexdigest() for part in parts}


def test_no_file_has_the_name_of_another(s3: S3Server, bucket: str) -> None:
    """A late request meets no file of a later save; a short file takes one request."""
    names = []
    for number, step in enumerate((1, 1, 2)):
        url = f"s3://{bucket}/run/step-{step}"
        s3.requests()
        writer = FileSystemWriterAsync(url)
        dcp.save({"x": torch.tensor(number)}, storage_writer=writer, no_dist=True)
        puts = [each for each in s3.requests() if each.startswith("PUT") and ".distcp" in each]
        assert len(puts) == 1
        names.append(shard_of(url))
    assert len(set(names)) == 3


@pytest.mark.parametrize("what", [PART, {"method": "PUT", "has": ".distcp"}])
def test_what_is_sent_anew_was_not_removed_before(
    s3: S3Server, url: str, what: dict[str, str]
) -> None:
    """A removal that is done late, after its answer was lost, would hit the new file."""
    s3.inject({**what, **SLOW_DOWN, "times": ATTEMPTS})
    s3.requests()
    save(url, 1)
    assert not [each for each in s3.requests() if url.split("/")[2] in each and "delete" in each]
    assert is_loaded(url, 1)
    assert s3.unfinished(url.split("/")[2]) == []


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_does_not_exist_is_no_empty_directory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job that finds no checkpoint starts from scratch."""
    with pytest.raises(ReadError, match="bucket"):
        nostall.latest_complete("s3://there-is-none/run")
    for command in (["ls"], ["latest"], ["prune", "--keep", "latest=1"]):
        assert main([*command, "s3://there-is-none/run"]) == 1
        assert "bucket does not exist" in capsys.readouterr().err


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("nbytes", [4 << 10, 32 << 20])
def test_a_save_to_a_bucket_that_does_not_exist_says_so(nbytes: int) -> None:
    """In one request, or in an upload, for a long file; the next step is to look at the address."""
    state = {"weight": torch.zeros(nbytes, dtype=torch.uint8)}
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state, storage_writer=FileSystemWriterAsync("s3://there-is-none/run"))
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, WriteError)
    assert error.phase == "write"
    assert "bucket does not exist" in str(error)  # some servers say "access denied" only
    assert "check the address" in str(error)


def test_a_split_save_is_committed_by_finalising(queue: AsyncCallsQueue, url: str) -> None:
    """A split save, the way frameworks save, exists only once it is finalised."""
    schedule(queue, url, state_of(3))
    assert nostall.verify(url).state is State.NOT_THERE
    queue.maybe_finalize_async_calls(blocking=True)
    assert is_loaded(url, 3)


def test_the_last_complete_checkpoint_is_found_and_removed(s3: S3Server, bucket: str) -> None:
    """Others in the bucket, and what is no checkpoint, are left alone."""
    root = f"s3://{bucket}/run"
    assert nostall.latest_complete(root) is None
    for step in (1, 2, 10):
        save(f"{root}/step-{step}", step)
    storage_at(f"{root}/notes").publish("text", [b"hello"])
    storage_at(f"{root}/step-10").remove([shard_of(f"{root}/step-10")])
    assert nostall.latest_complete(root) == f"{root}/step-2"
    for step in (2, 10):
        nostall.remove_checkpoint(f"{root}/step-{step}")
    assert nostall.latest_complete(root) == f"{root}/step-1"
    assert s3.names_below(root) == ["notes", "step-1"]
    assert not s3.forgets_prefixes or sorted(storage_at(root).list()) == ["notes", "step-1"]
    with pytest.raises(OptionError, match="not a checkpoint"):
        nostall.remove_checkpoint(f"{root}/notes")


def test_damage_is_found(url: str) -> None:
    """A changed byte, and a missing file."""
    save(url, 1)
    storage, name = storage_at(url), shard_of(url)
    content = bytearray(storage.stat(name).nbytes)
    storage.open(name).read_into(0, memoryview(content))
    content[1 << 20] ^= 1
    storage.publish(name, [bytes(content)])
    found = nostall.verify(url)
    assert (found.state, found.damages[0].file) == (State.DAMAGED, name)
    storage.remove([name])
    assert not nostall.is_complete(url)


@pytest.mark.parametrize("verify", ["none", "crc"])
@pytest.mark.parametrize("way", ["whole", "shift"])
@pytest.mark.parametrize("count", [10, 1 << 18])
def test_bytes_of_another_range_are_refused(
    s3: S3Server, url: str, way: str, verify: Verify, count: int
) -> None:
    """An answer with another range is an error, even if it is another tensor's intact archive."""
    names = "abcd"
    saved = {name: torch.full((count,), float(ord(name))) for name in names}
    dcp.save(saved, storage_writer=FileSystemWriterAsync(url), no_dist=True)
    shard = shard_of(url)
    by = storage_at(url).stat(shard).nbytes // len(names)
    state = {name: torch.zeros(count) for name in names[1:]}
    s3.inject({"method": "GET", "has": shard, "do": way, "by": by, "times": 1000})
    try:
        with pytest.raises(OSError, match=rf"(?s){shard}") as caught:
            nostall.load(state, url, verify=verify)
        said = "non-partial response" if way == "whole" else "Requested .* got "
        assert re.search(said, str(caught.value))
    finally:
        s3.inject()
    nostall.load(state, url, verify=verify)
    assert all(torch.equal(state[name], saved[name]) for name in state)


def test_a_store_that_always_sends_all_can_be_asked_for_all(s3: S3Server, url: str) -> None:
    """The range is then the one that was asked for."""
    dcp.save({"a": torch.ones(9)}, storage_writer=FileSystemWriterAsync(url), no_dist=True)
    name = shard_of(url)
    s3.inject({"method": "GET", "has": name, "do": "whole", "times": 1000})
    try:
        assert nostall.verify(url).state is State.WHOLE
    finally:
        s3.inject()


def test_existing_checkpoints_are_kept_on_request(url: str) -> None:
    """``overwrite=False`` is judged by the store."""
    save(url, 1)
    with pytest.raises(CheckpointException, match="overwrite=False"):
        save(url, 2, overwrite=False)
    assert is_loaded(url, 1)


def test_the_program_of_the_page_runs(s3: S3Server, bucket: str) -> None:
    """The program on the page about object stores runs, and leaves nothing in its bucket."""
    (code,) = code_blocks("howto/object-stores.md")
    exec(code.replace("my-bucket", bucket), {})
    assert (s3.keys(bucket), s3.unfinished(bucket)) == ([], [])


# --- options ----------------------------------------------------------------------------------


def test_options_reach_the_client_in_every_process(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``storage_options`` suffice for a writer, a reader and a manager, without ``AWS_*``."""
    options = {
        "endpoint": s3.endpoint,
        "region": "us-east-1",
        "access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    url = f"s3://{bucket}/run/step-000000001"
    writer = FileSystemWriterAsync(url, storage_options=options)
    saving: Any = dcp.async_save(state_of(1), storage_writer=writer, no_dist=True)
    saving.result()
    target = state_of(5)
    nostall.load(target, url, storage_options=options)
    assert target["step"] == 1
    reader = nostall.FileSystemReader(url, storage_options=options)
    dcp.load(state_of(5), storage_reader=reader, no_dist=True)
    with nostall.CheckpointManager(f"s3://{bucket}/run", storage_options=options) as manager:
        assert manager.latest_step() == 1


@pytest.mark.parametrize(
    ("path", "options", "why"),
    [
        ("s3://bucket/key", {"regoin": "us-east-1"}, "regoin"),
        ("s3://bucket/key", {"client_options": {"timeout": 5}}, "instance of 'str'"),
        ("s3://bucket/key", {"credential_provider": print}, "not JSON serializable"),
        ("az://container/key", {"region": "us-east-1"}, "region"),
        ("some/where", {"region": "us-east-1"}, "are for s3://"),
    ],
)
def test_wrong_options_of_a_store_are_refused(path: str, options: dict[str, Any], why: str) -> None:
    """Where the writer is made."""
    with pytest.raises(OptionError, match=why):
        FileSystemWriterAsync(path, storage_options=options)


def test_a_fork_of_a_process_that_has_used_a_store_is_told_so(bucket: str) -> None:
    """It has none of the client's threads, and would wait for ever."""
    code = """
import os, sys, nostall
from nostall.errors import OptionError
assert nostall.latest_complete(sys.argv[1]) is None
child = os.fork()
if not child:
    try:
        nostall.latest_complete(sys.argv[1])
    except OptionError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    done = run_python("-c", code, f"s3://{bucket}/run", timeout_s=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({"status": 403, "code": "RequestTimeTooSkewed"}, "clock"),
        ({"status": 400, "code": "AuthorizationHeaderMalformed"}, "region"),
        ({"status": 301, "code": "PermanentRedirect"}, "region"),
    ],
)
def test_a_wrong_clock_or_region_is_named(
    s3: S3Server, url: str, answer: dict[str, Any], hint: str
) -> None:
    """With the next step."""
    s3.inject({"method": "PUT", "do": "answer", **answer, "times": 1000})
    with pytest.raises(CheckpointException, match=hint):
        save(url, 1)


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {**PART, **SLOW_DOWN, "times": 2},
        {**PART, "do": "answer", "status": 500, "code": "InternalError", "times": 2},
        {**PART, "do": "cut", "after": 1},
        {**PART, "do": "lose"},
        {**COMPLETION, "do": "lose"},
        {**COMPLETION, "do": "cut"},
        {**COMMIT, "do": "lose"},
        {**COMMIT, "do": "lose", "times": ATTEMPTS},
        {**COMMIT, "do": "cut"},
        {**COMMIT, **SLOW_DOWN, "times": 2},
        {"method": "GET", "has": ".distcp", "do": "cut", "times": 2},
        {"method": "GET", "has": ".distcp", "do": "truncate", "times": 2},
        {"method": "HEAD", "has": "", **SLOW_DOWN, "times": 2},
    ],
    ids=str,
)
def test_a_store_that_fails_for_a_moment_is_asked_again(
    s3: S3Server, url: str, fault: dict[str, Any]
) -> None:
    """Also if the answer was lost: what is done is done once, and nothing else stays."""
    save(url, 1)
    (s3.inject_into_replacing if fault["has"] == COMMIT["has"] else s3.inject)(fault)
    save(url, 2)
    assert is_loaded(url, 2)
    assert nostall.verify(url).ok
    bucket = url.split("/")[2]
    assert s3.unfinished(bucket) == []
    assert len(s3.keys(bucket)) == 2


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({**PART, "do": "answer", "status": 400, "code": "ExpiredToken"}, errno.EACCES),
        ({**PART, "do": "answer", "status": 403, "code": "AccessDenied"}, errno.EACCES),
        ({**PART, **SLOW_DOWN}, errno.EAGAIN),
        ({**COMPLETION, "do": "answer", "status": 400, "code": "BadDigest"}, errno.EIO),
        ({**COMMIT, "do": "answer", "status": 403, "code": "AccessDenied"}, errno.EACCES),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_store_that_refuses_fails_the_save_and_nothing_else(
    s3: S3Server, url: str, fault: dict[str, Any], code: int, *, is_async: bool
) -> None:
    """One typed error with the reason; the previous checkpoint stays, nothing of the new one."""
    nostall.configure(nostall.EngineOptions(write_retries=0))
    save(url, 1)
    s3.inject({**fault, "times": 1000})
    with pytest.raises((CheckpointException, WriteError)) as caught:
        (save_and_wait if is_async else save)(url, 2)
    error = caught.value
    cause = error.failures[0][0] if isinstance(error, CheckpointException) else error
    assert isinstance(cause, WriteError)
    assert cause.errno == code
    assert str(cause.path).startswith(url)
    s3.inject()
    assert is_loaded(url, 1)
    bucket = url.split("/")[2]
    assert not s3.unfinished(bucket) or not ABORTS_LAST_PARTS
    assert len(s3.keys(bucket)) == 2


@pytest.mark.parametrize(
    "fault",
    [
        {"do": "cut", "times": ATTEMPTS},
        # The other request may be an earlier attempt of the same put.
        {"do": "answer", "status": 409, "code": "ConditionalRequestConflict", "times": 1000},
    ],
    ids=["cut", "conflict"],
)
def test_a_commit_that_may_still_arrive_is_not_taken_for_undone(
    s3: S3Server, url: str, fault: dict[str, Any]
) -> None:
    """The files of the save stay: metadata that refers to them may appear."""
    save(url, 1)
    s3.inject({**COMMIT, **fault})
    with pytest.raises((CheckpointException, NotDurableError), match="cannot determine whether"):
        save(url, 2)
    assert is_loaded(url, 1)
    assert len(s3.keys(url.split("/")[2])) == 3


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (400, "ExpiredToken"), (409, "OperationAborted")]
)
def test_a_commit_that_was_done_is_not_denied_by_a_later_attempt(
    s3: S3Server, url: str, status: int, code: str
) -> None:
    """Its first answer is lost, and the second one is a refusal."""
    save(url, 1)
    refusal = {"do": "answer", "status": status, "code": code, "times": ATTEMPTS}
    s3.inject_into_replacing({**COMMIT, "do": "lose"}, {**COMMIT, **refusal})
    save(url, 2)
    assert is_loaded(url, 2)


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_put_that_meets_another_request_is_repeated(s3: S3Server, url: str, code: str) -> None:
    """A put that is answered with 409 is repeated, for a file and for the commit."""
    save(url, 1)
    conflict = {"method": "PUT", "do": "answer", "status": 409, "code": code, "times": 2}
    for has in ("__0_0", "/.metadata"):
        s3.inject({**conflict, "has": has})
        save(url, 2)
        assert is_loaded(url, 2)
        assert len(s3.keys(url.split("/")[2])) == 2


@pytest.mark.parametrize("is_readable", [False, True])
def test_files_stay_that_metadata_may_name(s3: S3Server, url: str, *, is_readable: bool) -> None:
    """A failed save removes its own files only when it has read what is published."""
    save(url, 1)
    refused = {**COMMIT, "do": "answer", "status": 403, "code": "AccessDenied", "times": 1000}
    denied = {**refused, "method": "GET"}
    s3.inject(refused, *(() if is_readable else (denied,)))
    with pytest.raises(CheckpointException, match="AccessDenied"):
        save(url, 2)
    s3.inject()
    assert len(s3.keys(url.split("/")[2])) == (2 if is_readable else 3)
    assert is_loaded(url, 1)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_store_does_not_hide_the_newest(
    s3: S3Server,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    """It is asked again; if it stays busy, the newest is named, and is not called damaged."""
    root = f"s3://{bucket}/run"
    for step in (1, 2):
        save(f"{root}/step-{step}", step)
    busy = {"method": "HEAD", "has": "step-2/__0_0", "do": "answer", "status": status, "code": ""}
    s3.inject({**busy, "times": ATTEMPTS - 1})
    assert nostall.latest_complete(root) == f"{root}/step-2"
    assert caplog.text.count("skipped") == 0
    s3.inject({**busy, "times": 1000})
    assert nostall.latest_complete(root) == f"{root}/step-1"
    assert f"skipped {root}/step-2: the checkpoint cannot be read" in caplog.text
    nostall.remove_checkpoint(f"{root}/step-1")
    with pytest.raises(ReadError, match="cannot be read") as caught:
        nostall.latest_complete(root)
    assert caught.value.hint == "try again when storage answers"


def test_a_name_that_leads_further_is_not_a_checkpoint(
    bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects below ``.metadata/`` make neither the root nor a step one."""
    root = f"s3://{bucket}/run"
    save(f"{root}/step-1", 1)
    for place in (f"{root}/.metadata", f"{root}/step-2/.metadata"):
        storage_at(place).publish("x", [b"no checkpoint"])
    assert main(["ls", "--json", root]) == 0
    states = {each["name"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert states["step-1"] == "complete"
    assert states.get("step-2") != "complete"
    assert nostall.latest_complete(root) == f"{root}/step-1"
    assert nostall.verify(f"{root}/step-2").state is State.NOT_THERE


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_store_that_ignores_conditions_keeps_the_committed_checkpoint(
    s3: S3Server, url: str, *, is_refused: bool
) -> None:
    """A save to an address with a checkpoint takes other names, whatever the store does."""
    save(url, 1)
    ignored = {"method": "PUT", "has": "", "do": "ignore", "times": 1000}
    if is_refused:
        refusal = {"do": "answer", "status": 403, "code": "AccessDenied", "times": 1000}
        s3.inject({**COMMIT, **refusal}, ignored)
        with pytest.raises(CheckpointException, match="AccessDenied"):
            save(url, 2)
    else:
        s3.inject(ignored)
        save(url, 2)
    s3.inject()
    assert is_loaded(url, 1 if is_refused else 2)
    assert nostall.verify(url).ok
    assert len(s3.keys(url.split("/")[2])) == 2


def test_a_store_that_replaces_without_conditions_is_asked_before(
    s3: S3Server, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A store like OpenStack Swift keeps what another job published, and the gap is named once."""
    refusal = {"do": "answer", "status": 501, "code": "NotImplemented"}
    save(url, 1)
    for seed in (2, 3):
        s3.inject({**COMMIT, **refusal, "times": ATTEMPTS})
        save(url, seed)
        assert is_loaded(url, seed)
    assert caplog.text.count("cannot replace an object on a condition") == 1
    version = storage_at(url).stat(".metadata").version
    save(url, 4)
    s3.inject({**COMMIT, **refusal, "times": ATTEMPTS})
    with pytest.raises(Conflict):
        storage_at(url).publish(".metadata", [b"other"], expected=version)
    assert is_loaded(url, 4)


def test_a_proxys_page_is_not_an_empty_store(s3: S3Server, url: str) -> None:
    """A job that finds no checkpoint starts from scratch."""
    save(url, 1)
    s3.inject({"method": "", "do": "page", "times": 1000})
    with pytest.raises(ReadError):
        nostall.latest_complete(url.rpartition("/")[0])
    assert nostall.verify(url).state is State.UNREADABLE


def test_commands_take_any_form_of_an_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a slash at the end, and with capitals."""
    save(url, 1)
    for address in (url, f"{url}/", url.replace("s3", "S3")):
        assert main(["inspect", address]) == 0
        assert "model.w0" in capsys.readouterr().out
        assert main(["verify", address]) == 0


def test_of_two_saves_at_once_one_fails(url: str, tmp_path: Path) -> None:
    """The one whose metadata would replace what it has not seen; the other one is whole."""
    save(url, 1)
    with Hold("publish") as hold, inject(hold.fault):
        future = save_in_background(url, 2)
        hold.wait_reached()
        done = run_script("programs/save_once.py", url, "3", cwd=tmp_path, timeout_s=60)
        assert done.returncode == 0, done.stderr
        hold.release()
        with pytest.raises(CheckpointException, match="another process has published") as caught:
            future.result()
    cause = caught.value.failures[0][0]
    assert isinstance(cause, WriteError)
    assert cause.hint == "the other save's checkpoint stays; let one job save to a directory"
    assert is_loaded(url, 3)
    assert nostall.verify(url).ok


def test_of_two_first_saves_to_a_store_that_ignores_conditions_the_later_stays_whole(
    s3: S3Server, url: str, tmp_path: Path
) -> None:
    """Neither writes to an object of the other."""
    s3.inject({"method": "PUT", "has": "", "do": "ignore", "times": 1000})
    with Hold("publish") as hold, inject(hold.fault):
        future = save_in_background(url, 1)
        hold.wait_reached()
        done = run_script("programs/save_once.py", url, "2", cwd=tmp_path, timeout_s=60)
        assert done.returncode == 0, done.stderr
        assert is_loaded(url, 2)
        hold.release()
        future.result()
    assert is_loaded(url, 1)
    assert nostall.verify(url).ok


@pytest.mark.usefixtures("s3")
def test_a_store_that_is_gone_is_an_error_that_may_pass() -> None:
    """Nobody listens at its address; each file is tried again as often as asked."""
    code = """
import errno, nostall
from nostall.errors import ReadError
from nostall._storage.locations import storage_at
from nostall._storage.port import is_transient
try:
    storage_at("s3://bucket/run").stat("x")
except OSError as error:
    assert is_transient(error), error
    assert "127.0.0.1:9" in str(error), error
else:
    raise AssertionError
"""
    done = run_python("-c", code, timeout_s=60, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("s3")
def test_a_store_that_never_answers_is_given_up() -> None:
    """By the deadline of saves; and the process can end."""
    code = """
import sys, torch, nostall, torch.distributed.checkpoint as dcp
from nostall.errors import SaveTimeoutError
nostall.configure(nostall.EngineOptions(save_timeout_s=1))
try:
    writer = nostall.FileSystemWriterAsync("s3://bucket/run")
    dcp.save({"x": torch.ones(3)}, storage_writer=writer, no_dist=True)
except dcp.api.CheckpointException as error:
    assert isinstance(error.failures[0][0], SaveTimeoutError), error
else:
    raise AssertionError
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = run_python("-c", code, timeout_s=60, AWS_ENDPOINT_URL=endpoint)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("point", ["open", "chunk", "fsync", "report"])
def test_a_writer_process_that_is_killed_leaves_nothing(s3: S3Server, url: str, point: str) -> None:
    """The trainer removes its files. Its uploads stay, for a lifecycle rule: nobody lists them."""
    with inject(Fault.kill(point, signal.SIGKILL, after=1 if point == "chunk" else 0)):
        future = save_in_background(url, 1)
        with pytest.raises(CheckpointException, match="writer process"):
            future.result()
    assert s3.keys(url.split("/")[2]) == []


def test_uploads_of_a_job_that_was_killed_stay_and_hinder_nothing(
    s3: S3Server, url: str, tmp_path: Path
) -> None:
    """They are in no list of objects; a rule of the bucket has to remove them."""
    done = run_script("programs/save_once.py", url, "1", "chunk", cwd=tmp_path, timeout_s=60)
    assert done.returncode == -signal.SIGKILL
    bucket = url.split("/")[2]
    assert nostall.latest_complete(f"s3://{bucket}/run") is None
    left = s3.unfinished(bucket)
    save(url, 2)
    assert is_loaded(url, 2)
    assert len(s3.keys(bucket)) == 2
    nostall.remove_checkpoint(url)
    assert (s3.keys(bucket), s3.unfinished(bucket)) == ([], left)


def test_whole_files_of_a_job_that_was_killed_are_removed_when_they_are_old(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that they may belong to a save of another job, which is about to commit."""
    storage, left = storage_at(url), "__3_0-89abcdef-01234567.distcp"
    storage.put(left, 3, on_created=lambda _: None).finish()
    save(url, 1)
    assert left in storage.list()
    written_s = storage.stat(left).modified_s
    wait_until(lambda: time.time() > written_s + 2)
    monkeypatch.setattr(publishing, "_SAVES_PER_AGE", 0)  # otherwise an hour
    save(url, 2)
    assert len(storage.list()) == 2
    assert is_loaded(url, 2)


# --- wrong arguments --------------------------------------------------------------------------


OTHER_STORES = [
    f"{protocol}://bucket/key" for protocol in ("nowhere", "memory", "hf", "gcs", "abfs")
]
STREAMS = {"open_file": gzip.open}
"""``open_file`` opens paths."""


@pytest.mark.parametrize(
    ("path", "options", "why"),
    [
        *((path, {}, "address") for path in ("file://host/key", "s3://", "s3:///key")),
        *((path, {}, "address") for path in ("s3://bucket//key", "s3://bucket/../key")),
        (Path("s3://bucket/key"), {}, "slash"),  # a directory named ``s3:`` here
        *((path, {}, r"not supported.* s3://, gs://, az:// or msc://") for path in OTHER_STORES),
        ("s3://bucket/key", STREAMS, "open_file"),
    ],
)
def test_what_is_no_address_of_a_known_store_is_refused(
    path: str | Path, options: dict[str, Any], why: str
) -> None:
    """Before anything is saved somewhere else."""
    with pytest.raises(OptionError, match=why):
        FileSystemWriterAsync(path, **options)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    for protocol in ("s3", "gs", "az"):
        with pytest.raises(OptionError, match=r"obstore>=0.11"):
            FileSystemWriterAsync(f"{protocol}://bucket/key")


def test_addresses_of_files_are_paths(tmp_path: Path) -> None:
    """``file://`` is a way to write them."""
    save(f"file://{tmp_path}/saved", 4)
    assert is_loaded(str(tmp_path / "saved"), 4)
    assert os.listdir(tmp_path) == ["saved"]
