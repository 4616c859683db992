"""Addresses of the multi-storage client, with the real package."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall.cli import main
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.filesystem_reader import FileSystemReader
from programs.save_once import save, save_in_background, state_of
from support.object_store import S3Server, is_loaded

pytest.importorskip("multistorageclient", reason="`nox -s stores` installs it")


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a profile named ``files``."""
    options = {"base_path": str(tmp_path / "files")}
    provider = {"type": "file", "options": options}
    configuration = {"profiles": {"files": {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(configuration))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    (tmp_path / "files").mkdir()
    clients = importlib.import_module("multistorageclient.shortcuts")
    clients._STORAGE_CLIENT_CACHE.clear()  # by the names of profiles, of other tests
    yield tmp_path / "files"
    clients._STORAGE_CLIENT_CACHE.clear()


def test_a_profile_of_files_is_a_directory(profile: Path) -> None:
    """Written as any other, in the background, too; and found again by the same address."""
    from multistorageclient.contrib.torch import MultiStorageFileSystemReader

    save("msc://files/run/step-1", 1)
    save_in_background("msc://files/run/step-1", 2).result()
    assert ".metadata" in os.listdir(profile / "run" / "step-1")
    assert nostall.verify("msc://files/run/step-1").ok
    assert nostall.latest_complete("msc://files/run") == str(profile / "run" / "step-1")
    for reader in (FileSystemReader, MultiStorageFileSystemReader):
        found = state_of(3)
        dcp.load(found, storage_reader=reader("msc://files/run/step-1"), no_dist=True)
        assert found["step"] == 2
        assert torch.equal(found["model"]["w0"], state_of(2)["model"]["w0"])
    nostall.remove_checkpoint("msc://files/run/step-1")
    assert os.listdir(profile / "run") == []


def test_a_profile_of_a_store_is_loaded_by_the_clients_reader(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved through the client, and to the same bucket without it."""
    from multistorageclient.contrib.torch import MultiStorageFileSystemReader

    bucket = s3.new_bucket()
    options = {"base_path": bucket, "endpoint_url": s3.endpoint, "region_name": "us-east-1"}
    keys = {"access_key": os.environ["AWS_ACCESS_KEY_ID"]}
    keys["secret_key"] = os.environ["AWS_SECRET_ACCESS_KEY"]
    profile = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"store": profile}}))
    for name in ("msc://store", f"s3://{bucket}"):
        for seed in (1, 2):
            save(f"{name}/run/step-1", seed)
            for reader in (FileSystemReader, MultiStorageFileSystemReader):
                assert is_loaded("msc://store/run/step-1", seed, reader)
        assert nostall.verify(f"{name}/run/step-1").ok
    save_in_background("msc://store/run/step-1", 3).result()
    assert is_loaded(f"s3://{bucket}/run/step-1", 3)
    assert nostall.latest_complete("msc://store/run") == "msc://store/run/step-1"
    nostall.remove_checkpoint("msc://store/run/step-1")
    assert s3.keys(bucket) == []
    nostall.configure(nostall.EngineOptions(io_threads=2))  # buffers are smaller than the state
    large = {f"w{number}": torch.randn(3_000_000) for number in range(4)}
    dcp.save(large, storage_writer=FileSystemWriterAsync("msc://store/large"))
    assert nostall.verify("msc://store/large").ok


def test_prune_keeps_what_a_link_leads_to(profile: Path) -> None:
    """An address of a directory is that directory, with its links."""
    for step in (1, 2):
        save(f"msc://files/run/step-{step}", step)
    (profile / "run" / "best").symlink_to("step-1")
    assert main(["prune", "msc://files/run", "--keep", "latest=1", "--delete"]) == 0
    assert sorted(os.listdir(profile / "run")) == ["best", "step-1", "step-2"]


def test_a_plain_path_is_saved_with_use_msc(tmp_path: Path) -> None:
    """Megatron passes it wherever the client is installed."""
    save(str(tmp_path / "saved"), 1, use_msc=True)
    assert nostall.verify(tmp_path / "saved").ok


def test_a_profile_that_does_not_exist_is_named() -> None:
    """With the next step."""
    with pytest.raises(OptionError, match="missing"):
        FileSystemWriterAsync("msc://missing/run")
