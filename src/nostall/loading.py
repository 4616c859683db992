"""``nostall.load``: all of a checkpoint, or some of it, into objects and tensors that are there.

It plans on the caller's thread, and with ``blocking=False`` reads on another one; what it finds for
objects is handed over by the caller's thread in both cases.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping
from concurrent.futures import Future
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from nostall._commit.commit import why_no_checkpoint
from nostall._memory.devices import module_with_streams
from nostall._model.threads import gc_paused, is_done, spawn_in_torch
from nostall._ranks.group import coordination_for
from nostall._read.planner import LoadPlanner
from nostall._storage.locations import identity, is_address, place_of, require_possible
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.errors import OptionError, ReadError, SaveTimeoutError
from nostall.filesystem_reader import Verify
from nostall.options import is_possible_wait, require_flags
from nostall.stats import LoadStats

__all__ = ["Loading", "load"]


@overload
def load(
    state: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    keys: Collection[str] | None = ...,
    strict: bool = ...,
    strict_dtype: bool = ...,
    verify: Verify = ...,
    threads: int = ...,
    trust: bool = ...,
    process_group: dist.ProcessGroup | None = ...,
    read_once: bool = ...,
    progress: Callable[[int, int], object] | None = ...,
    use_collectives: bool = ...,
    storage_options: Mapping[str, Any] | None = ...,
    blocking: Literal[True] = True,
) -> LoadStats: ...


@overload
def load(
    state: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    keys: Collection[str] | None = ...,
    strict: bool = ...,
    strict_dtype: bool = ...,
    verify: Verify = ...,
    threads: int = ...,
    trust: bool = ...,
    process_group: dist.ProcessGroup | None = ...,
    read_once: bool = ...,
    progress: Callable[[int, int], object] | None = ...,
    use_collectives: bool = ...,
    storage_options: Mapping[str, Any] | None = ...,
    blocking: Literal[False],
) -> Loading: ...


def load(
    state: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    keys: Collection[str] | None = None,
    strict: bool = True,
    strict_dtype: bool = False,
    verify: Verify = "none",
    threads: int = 4,
    trust: bool = False,
    process_group: dist.ProcessGroup | None = None,
    read_once: bool = False,
    progress: Callable[[int, int], object] | None = None,
    use_collectives: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    blocking: bool = True,
) -> LoadStats | Loading:
    """Load a checkpoint of nostall or stock DCP into a state, as ``dcp.load`` does, but faster.

    Tensors are overwritten in place, whatever their sharding; other values of ``state``, also in
    nested dictionaries and lists, are replaced; objects with ``state_dict`` and
    ``load_state_dict`` get what was loaded. If it raises, parts of ``state`` may have been changed.

    Each rank loads what its own tensors need, without communication. With a process group all of
    its ranks have to call this, and if one cannot plan or read, all raise. Objects get their states
    after that, in the order of ``state``; an error of theirs is of one rank.

    Args:
        state: What to load into.
        path: Checkpoint directory, or an address in an object store. A link is followed once, at
            the beginning.
        keys: Names of what to load, in the form of ``nostall inspect``: of items
            (``"model.0.weight"``), or of what they are in (``"model"``). The rest of ``state``
            stays as it is. ``None`` loads all of ``state``.
        strict: Whether the checkpoint must have everything that is to be loaded; otherwise what it
            does not have stays as it is. Also whether it must have nothing for a dictionary that is
            empty in the state: that of an optimizer is, before its first step.
        strict_dtype: Whether tensors must have the dtypes in the checkpoint. By default values are
            cast to the dtype of the tensor that they are loaded into, and one message says of how
            many tensors: at INFO, or a warning if some are cast to integers.
        verify: As of :class:`nostall.FileSystemReader`.
        threads: The same.
        trust: Unpickle objects of any class, which can run code. Otherwise they must be of the
            types that ``torch.load(weights_only=True)`` allows, or were allowed by
            ``torch.serialization.add_safe_globals``.
        process_group: Ranks that load together, or ``None``.
        read_once: With a process group: what several ranks need is read by one and sent to the
            others, as with the ``process_group`` of :class:`nostall.FileSystemReader`. For storage
            that is slower than the network between ranks.
        progress: As of :class:`nostall.FileSystemReader`.
        use_collectives: ``False`` for a checkpoint that each rank has saved alone, with
            ``use_collectives=False``: each rank loads its own part, without communication: the
            one of its number in ``process_group``, or in the default group.
        storage_options: As of :class:`nostall.FileSystemWriterAsync`.
        blocking: Whether to return when all is loaded. If not, this plans, and returns while other
            threads read into the tensors, which nothing may use before :meth:`Loading.result`.
            Without ``process_group``: each rank loads for itself.

    Returns:
        What was loaded; or the load, if it is not ``blocking``.

    Raises:
        OptionError: The state does not fit the checkpoint, a key selects nothing, or an argument is
            not possible.
        ReadError: No checkpoint was committed at the path.
        DamagedCheckpointError: A file is missing or damaged, the index in ``.metadata`` included.
        UntrustedObjectError: An object needs ``trust``.
        UntrustedMetadataError: The metadata is damaged or not understood.
        OSError: Storage does not answer.
        torch.distributed.checkpoint.api.CheckpointException: With a process group, in place of
            these: a rank failed.
    """
    began_s = time.monotonic()
    planner = LoadPlanner(keys=keys, strict=strict, strict_dtype=strict_dtype, trust=trust)
    require_possible(path)
    if not isinstance(state, MutableMapping):
        raise OptionError(
            f"the state is an object of type {type(state).__name__}",
            hint='pass a dictionary, such as {"model": model}',
        )
    where = planner.path = os.fspath(path)
    require_flags(read_once=read_once, use_collectives=use_collectives, blocking=blocking)
    if read_once and process_group is None:
        raise OptionError(
            "read_once=True needs a process_group", hint="pass the group of all ranks"
        )
    if read_once and not use_collectives:
        raise OptionError("read_once=True needs use_collectives=True")
    if process_group is not None and not blocking:
        raise OptionError(
            "blocking=False excludes a process_group",
            hint="leave it out: each rank loads for itself; let ranks agree after result()",
        )
    loading = None if blocking else Loading(where, progress)
    is_directory = storage_options is None and not is_address(path)
    place = where if is_directory else place_of(path, storage_options)
    reader = _Reader(
        identity(place),
        verify=verify,
        threads=threads,
        process_group=process_group if read_once else None,
        progress=progress if loading is None else loading._report,
    )
    present = {name: each for name, each in state.items() if planner.touches(name)}
    objects = {
        name: each
        for name, each in present.items()
        # A look at a tensor for its methods is slow.
        if not isinstance(each, torch.Tensor) and isinstance(each, Stateful)
    }
    present.update({name: each.state_dict() for name, each in objects.items()})

    def finish() -> LoadStats:
        for name, loaded in present.items():
            if name in objects:
                objects[name].load_state_dict(loaded)
            else:
                state[name] = loaded
        return LoadStats(
            path=where,
            items=len(planner.loaded),
            missing=planner.missing,
            load_s=time.monotonic() - began_s,
        )

    if process_group is None or not use_collectives:
        number = None if use_collectives else coordination_for(process_group).rank
        with gc_paused():
            metadata = reader.read_metadata(rank=number)
            planner.set_up_planner(present, metadata, is_coordinator=True)
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        if loading is not None:
            loading._begin(reader, plan, planner, finish)
            return loading
        with gc_paused():
            reader.read_data(plan, planner).wait()
    else:
        dcp.load(present, storage_reader=reader, planner=planner, process_group=process_group)
    return finish()


class Loading:
    """A load of ``nostall.load(..., blocking=False)``, which threads read.

    Its tensors have values when :meth:`result` has returned, and any values before; objects, and
    what is not a tensor, are loaded by that call.
    """

    def __init__(self, path: str, progress: Callable[[int, int], object] | None) -> None:
        self.path = path
        self.progress = 0, 0
        """Bytes read, and bytes to read; the second is 0 before the first read."""
        self._passed_on = progress
        self._is_cancelled = False
        self._finish: Callable[[], LoadStats] | None = None
        self._over: Future[None] = Future()
        self._ended: Future[LoadStats] = Future()
        """How :meth:`result` ends, once objects were loaded."""
        self._lock = threading.RLock()
        _in_progress.add(self)

    @property
    def done(self) -> bool:
        """Whether :meth:`result` need not wait."""
        return is_done(self._over)

    def cancel(self) -> None:
        """Read no more; :meth:`result` raises an error then, unless all was read already."""
        self._is_cancelled = True

    def result(self, timeout: float | None = None) -> LoadStats:
        """Wait until all is read, and load objects; from then on everything may be used.

        Call it on the thread that uses the state. After an error parts of the state have changed.

        Args:
            timeout: Longest wait in seconds; ``None`` for no limit.

        Raises:
            OptionError: ``timeout`` is not possible.
            SaveTimeoutError: Not all is read after ``timeout`` seconds; the load continues.
            ReadError: It was cancelled.
            OSError: As of :func:`load`, like its other errors of reading.
        """
        if timeout is None:
            timeout = threading.TIMEOUT_MAX
        if not is_possible_wait(timeout):
            raise OptionError(f"invalid timeout={timeout!r}", hint="use seconds, or None")
        if not is_done(self._over, timeout):
            read, total = self.progress
            raise SaveTimeoutError(
                f"{read} of {total} bytes are read after {timeout:g} s",
                phase="read",
                path=self.path,
                hint="wait again, or cancel()",
            )
        self._over.result()
        with self._lock:
            if (finish := self._finish) is not None:
                self._finish = None
                try:
                    self._ended.set_result(finish())
                except BaseException as error:  # raised below, and by each later call
                    self._ended.set_exception(error)
            if not self._ended.done():
                raise OptionError("result() was called by an object that it is loading")
        return self._ended.result()

    def _report(self, read: int, total: int) -> None:
        self.progress = read, total
        if self._is_cancelled:
            raise ReadError(
                "the load was cancelled",
                phase="read",
                path=self.path,
                hint="tensors may hold some of its values: load again before you use them",
            )
        if self._passed_on is not None:
            self._passed_on(read, total)

    def _begin(
        self, reader: _Reader, plan: LoadPlan, planner: LoadPlanner, finish: Callable[[], LoadStats]
    ) -> None:
        """Begin to read; no method of users' objects is called before :meth:`result`."""
        held: list[tuple[ReadItem, io.BytesIO]] = []
        planner.load_bytes = lambda *each: held.append(each)  # type: ignore[method-assign]  # later
        targets = [each for each in planner.state_dict.values() if isinstance(each, torch.Tensor)]
        is_inference = torch.is_inference_mode_enabled()

        def read() -> None:
            try:
                with torch.inference_mode(is_inference):
                    reader.read_data(plan, planner).wait()
                for device in {target.device for target in targets}:
                    if (module := module_with_streams(device)) is not None:
                        module.synchronize(device)  # the caller's stream knows of no copy
            except BaseException as error:  # raised by result()
                self._over.set_exception(error)
            else:
                self._over.set_result(None)

        def hand_over() -> LoadStats:
            for item, value in held:
                LoadPlanner.load_bytes(planner, item, value)
            return finish()

        self._finish = hand_over
        spawn_in_torch("nostall-load", read)


_in_progress: weakref.WeakSet[Loading] = weakref.WeakSet()


def _cancel_at_exit() -> None:
    for loading in list(_in_progress):
        loading.cancel()  # nobody can ask for its result any more


atexit.register(_cancel_at_exit)


class _Reader(CachedMetadataFileSystemReader):
    """The reader, for a planner that only reads metadata, and only the items in it."""

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """The metadata.

        Raises:
            ReadError: There is none.
        """
        try:
            return self.shared_metadata(kwargs.get("rank"))
        except (FileNotFoundError, NotADirectoryError):
            raise ReadError(
                why_no_checkpoint(str(self.path)),
                errno=errno.ENOENT,
                phase="read",
                path=str(self.path),
                hint="`nostall ls ROOT` lists checkpoints",
            ) from None  # the traceback is that of the caller
