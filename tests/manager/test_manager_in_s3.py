"""A manager whose root is in an object store."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import nostall
from nostall import CheckpointManager, KeepBest, KeepLatest
from nostall._storage.locations import storage_at
from nostall.errors import ReadError
from programs.prefetched import SIZE
from support.object_store import S3Server
from support.ranks import TESTS, run_python, run_ranks, run_script


@pytest.fixture
def root(s3: S3Server) -> str:
    """A root that does not exist yet."""
    return f"s3://{s3.new_bucket()}/run"


def training() -> dict[str, Any]:
    """A model and its optimizer after a step."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_steps_are_saved_kept_and_restored(s3: S3Server, root: str) -> None:
    """With policies, metrics, extra, generators, and parts of what is restored."""
    state = training()
    keep = [KeepLatest(2), KeepBest(1, "loss", "min")]
    with CheckpointManager(root, keep=keep) as manager:
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0, 5.0)):
            manager.save(step, state, metrics={"loss": loss}, extra={"epoch": step})
        manager.wait()
        drawn = torch.rand(3)
    with CheckpointManager(root, keep=keep) as manager:
        assert manager.all_steps() == [1, 3, 4]
        assert (manager.latest_step(), manager.best_step("loss")) == (4, 1)
        other = training()
        restored = manager.restore(other)
        assert restored is not None
        assert (restored.step, restored.extra) == (4, {"epoch": 4})
        assert torch.equal(torch.rand(3), drawn)
        assert torch.equal(other["model"].weight, state["model"].weight)
        with pytest.raises(ReadError, match="step 9 is not committed") as refused:
            manager.restore(other, step=9)
        assert refused.value.__context__ is None  # nor that a directory does not exist
        first = manager.restore(other, step=1)
        assert first is not None
        assert first.step == 1
    kept = [f"step-{step:09d}" for step in (1, 3, 4)]
    assert s3.names_below(root) == kept
    assert not s3.forgets_prefixes or sorted(storage_at(root).list()) == kept
    assert nostall.latest_complete(root) == f"{root}/step-000000004"


def test_what_an_interrupted_save_left_is_removed(s3: S3Server, root: str, tmp_path: Path) -> None:
    """Objects of a job that was killed, by the next one's first save."""
    done = run_script(
        "programs/save_once.py", f"{root}/step-000000007", "1", "report", cwd=tmp_path, timeout_s=60
    )
    assert done.returncode == -signal.SIGKILL
    bucket = root.split("/")[2]
    assert len(s3.keys(bucket)) == 1
    with CheckpointManager(root, keep=KeepLatest(1)) as manager:
        assert manager.latest_step() is None
        manager.save(1, training()).result(60)
    assert s3.unfinished(bucket) == []
    # Not what the store lists: SeaweedFS may name a directory whose objects are gone.
    assert {key.split("/")[-2] for key in s3.keys(bucket)} == {"step-000000001"}


def test_a_busy_store_does_not_hide_the_newest_step(
    s3: S3Server, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked again; if it stays busy, the step is named, and is not called damaged."""
    busy = {"method": "HEAD", "do": "answer", "status": 429, "code": ""}
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, training())
        manager.wait()
        s3.inject({**busy, "has": "step-000000002/__0_0"})
        restored = manager.restore(training())
        assert restored is not None
        assert restored.step == 2
        assert "skipped" not in caplog.text
        for has in ("step-000000002/__0_0", "step-000000002/.metadata"):
            s3.inject({**busy, "has": has, "times": 1000})
            restored = manager.restore(training())
            assert restored is not None
            assert restored.step == 1
            with pytest.raises(ReadError, match="step-000000002"):
                manager.restore(training(), 2)
        with pytest.raises(ReadError, match="steps cannot be read"):
            manager.latest_step()
    assert caplog.text.count(f"skipped {root}/step-000000002") == 2
    assert "damaged" not in caplog.text


def test_a_bucket_that_does_not_exist_is_no_new_root(s3: S3Server) -> None:
    """Training from scratch would only notice at its first save."""
    del s3
    with (
        CheckpointManager("s3://no-such-bucket-here/run") as manager,
        pytest.raises(ReadError, match="steps cannot be read") as caught,
    ):
        manager.restore(training())
    assert caught.value.errno == errno.ENOENT
    assert "check that it exists" in str(caught.value.hint)


def test_ranks_save_and_restore_together(root: str, tmp_path: Path) -> None:
    """Each its own part."""
    assert run_ranks(2, "managing:below_a_root", tmp_path, root) == [[2, True, True]] * 2


def test_ranks_of_a_host_share_what_they_have_prefetched(
    s3: S3Server, root: str, tmp_path: Path
) -> None:
    """Each brings a half and needs all of it; no byte is asked for twice."""
    with CheckpointManager(root) as manager:
        manager.save(1, {name: torch.arange(float(SIZE)) for name in ("x", "y")})
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_python(
        *torchrun, TESTS / "programs/prefetched.py", root, cwd=tmp_path, timeout_s=100
    )
    assert done.returncode == 0, done.stderr
    ((key, nbytes),) = (
        (key, nbytes) for key, nbytes in s3.sizes(root.split("/")[2]).items() if "distcp" in key
    )
    gets = [each for each in s3.requests() if each.startswith("GET") and key in each]
    pieces_of_a_half = -(-nbytes // 2 // (8 << 20))
    assert len(gets) == 2 * pieces_of_a_half
