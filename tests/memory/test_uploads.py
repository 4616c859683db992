"""Uploads: threads fill pinned memory, and the device has the values when they are used.

The device is a fake that does its work as late as it may: a missing wait gives other values.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nostall._memory.uploads import Uploads
from support.fake_accelerator import FakeAccelerator

DEADLINE_S = 60.0
PART = 64


def small(threads: int = 1) -> Uploads:
    return Uploads(threads, pinned_nbytes=2 * threads * PART)


def on_device(fake: FakeAccelerator, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=fake.device)


def values(count: int) -> bytes:
    return bytes(n % 251 for n in range(count))


def fill(uploads: Uploads, target: torch.Tensor, content: bytes, begin: int = 0) -> None:
    end = min(begin + PART, len(content))
    with uploads.part(target, begin, end) as part:
        part[:] = content[begin:end]


def fill_all(uploads: Uploads, target: torch.Tensor, content: bytes, threads: int = 1) -> None:
    """Fill memory from threads of a pool, as a load does."""
    uploads.prepare([target])
    uploads.begin(target)
    with ThreadPoolExecutor(threads) as pool:
        parts = range(0, len(content), PART)
        for done in [pool.submit(fill, uploads, target, content, begin) for begin in parts]:
            done.result(DEADLINE_S)


def content_of(tensor: torch.Tensor) -> bytes:
    """The bytes that the current stream sees."""
    return bytes(tensor.cpu().tolist())


@pytest.mark.parametrize("threads", [1, 8])
def test_memory_is_used_again_only_when_its_copy_is_made(
    fake: FakeAccelerator, threads: int
) -> None:
    """All bits arrive through two buffers per thread, after what precedes them on the stream."""
    target, content = on_device(fake, 50 * PART - 7), values(50 * PART - 7)
    target.fill_(7)
    with small(threads) as uploads:
        fill_all(uploads, target, content, threads)
        uploads.finish(target)
        assert content_of(target) == content
    assert fake.most_pinned_nbytes <= 2 * threads * PART
    assert fake.pinned_nbytes == 0


def test_what_follows_on_the_current_stream_sees_the_values(fake: FakeAccelerator) -> None:
    """Without a wait of the host: nothing has been copied when the order is made."""
    target = on_device(fake, PART)
    with small() as uploads:
        fill_all(uploads, target, values(PART))
        uploads.finish(target)
        assert len(fake.copies) == 1
        assert fake.module.current_stream().done == 0
        assert content_of(target) == values(PART)


def test_a_copy_without_an_event_is_waited_for_at_once(fake: FakeAccelerator) -> None:
    """The thread fills its memory again."""
    target = on_device(fake, PART)
    with small() as uploads:
        uploads.prepare([target])
        fake.records_no_event = True
        with pytest.raises(RuntimeError, match="no events left"):
            fill(uploads, target, values(PART))
        side = fake.streams[-1]
        assert side.done == len(side.queue) > 0


def test_memory_that_cannot_be_pinned_is_read_into_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The values are right, and the log says once that this is slower."""
    with FakeAccelerator(can_pin=False) as fake, small(3) as uploads:
        target = on_device(fake, 9 * PART)
        fill_all(uploads, target, values(9 * PART), threads=3)
        uploads.finish(target)
        assert content_of(target) == values(9 * PART)
    assert 1 <= len(caplog.records) <= 3  # threads that begin at the same time each try
    assert "not pinned" in caplog.records[0].message


def test_one_stream_per_device_which_the_loads_thread_makes(fake: FakeAccelerator) -> None:
    """Whatever fills: two threads cannot make two."""
    target, content = on_device(fake, 8 * PART), values(8 * PART)
    with small(4) as uploads:
        for _ in range(3):
            fill_all(uploads, target, content, threads=4)
            uploads.finish(target)
        assert content_of(target) == content
    assert fake.module.made_on == [threading.current_thread().name]


def test_few_values_are_beside_a_target_on_its_device(fake: FakeAccelerator) -> None:
    """At most 256 MiB: training needs the device's memory."""
    target = on_device(fake, 4)
    uploads = Uploads(1)
    uploads.prepare([target])
    assert uploads.scratch_for(target, (2, 8), torch.float32).device == fake.device
    assert uploads.scratch_for(target, (0, 8), torch.float32).device.type == "cpu"
    assert uploads.scratch_for(target, (257, 1 << 20), torch.uint8).device.type == "cpu"


def test_memory_beside_a_target_belongs_to_the_stream_of_the_load(fake: FakeAccelerator) -> None:
    """Where it is used last, so that it may be used again; whatever thread allocates it."""
    own = fake.module.Stream(fake.device)
    with fake.module.stream(own), Uploads(1) as uploads, ThreadPoolExecutor(1) as pool:
        target = on_device(fake, PART)
        uploads.prepare([target])
        pool.submit(uploads.scratch_for, target, (3,), torch.float32).result(DEADLINE_S)
    assert fake.allocated_on == [own, own]
