"""Commit a save as soon as all ranks have written, whether or not anybody polls.

In the steady state a rank's message to the coordinator is known when its files are written. A
thread leaves it in the store of the process group. The coordinator's thread waits for the messages
of all ranks, and commits. The next poll learns it from the reduction that it makes anyway.

Where this does not work, nothing is lost: finalising collects the messages, as for other saves.
Commit or give up: whoever claims the save first decides. A rank that wants to give it up and is too
late leaves its files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from nostall import _torch
from nostall._model.threads import is_done, spawn_in_torch
from nostall._model.values import MOST_SERIES, SaveId
from nostall._ranks.agreement import PATIENCE_S
from nostall._ranks.failures import CANCEL_TIMEOUT_S
from nostall._ranks.group import Records
from nostall._save.decide import Ending
from nostall._storage.deadlines import call_with_deadline
from nostall.errors import NotDurableError, SaveTimeoutError

_log = logging.getLogger("nostall")

_COMMIT, _GIVE_UP = "commit", "give up"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Between two looks at the store, which cost 0.1 ms each; doubled from the first to the longest."""
_DEADLINES = 3
"""How many times ``save_timeout_s`` a commit may take: it waits for storage so often."""


class EarlyCommit:
    """One rank's part in the early commit of one save.

    ``message`` returns this rank's message, once its files are written; ``None`` if the save is not
    to be committed early. On the coordinator, ``commit`` commits with the messages of all ranks,
    which may take ``timeout_s`` seconds to arrive. When the save is over, its records go to
    ``retired``; a later save removes them.
    """

    def __init__(
        self,
        save: SaveId,
        records: Records,
        rank: int,
        retired: deque[Records],
        *,
        message: Callable[[], bytes | None],
        commit: Callable[[Sequence[bytes]], Ending] | None,
        timeout_s: float,
    ) -> None:
        self.agreed: Ending | None = None
        """How it has ended, once all ranks know that it is committed."""
        self.identity = 1 + (save.series + save.number) % MOST_SERIES
        """A number that all ranks share which commit this save early."""
        self.committed = 0
        """0, or one more than the slowest rank of a save that is committed. On the coordinator."""
        self._records = records
        self._rank = rank
        self._retired = retired
        self._message = message
        self._commit = commit
        self._timeout_s = timeout_s
        self._ending: Ending | None = None
        self.is_allowed = False
        """Whether the save may be committed early; set before :meth:`begin`."""
        self.after: EarlyCommit | None = None
        """Early commit of the save before it in the queue, which is committed first."""
        self.is_decided = False
        """Whether it is known how the save ends, so that the next one may be committed."""
        self._is_offered = self._is_claimed = False
        self._stopped = threading.Event()
        self._over: Future[None] | None = None
        """Done when the thread has ended; ``None`` before it was started."""
        self._lock = threading.Lock()

    # --- what the ranks tell each other in a poll -----------------------------------------------

    @property
    def is_committing(self) -> bool:
        """On the coordinator: it waits for the others, or commits."""
        return self._commit is not None and self._over is not None and not is_done(self._over)

    def note_committed(self, committed: int) -> None:
        """Note that all ranks know that it is committed."""
        self.agreed = Ending(failures={}, published=True, changed=False, slowest_rank=committed - 1)

    # --- the commit -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin, once and if it is allowed, as this rank's files are written; returns at once."""
        if not self.is_allowed or self._over is not None:
            return
        over: Future[None] = Future()
        self._over = over
        try:
            spawn_in_torch("nostall-early", partial(self._run, over))
        except RuntimeError:  # the interpreter is ending, or no thread can be started
            self.is_allowed = False
            over.set_result(None)

    def _run(self, over: Future[None]) -> None:
        """Offer this rank's message; on the coordinator, commit once all ranks have."""
        try:
            with suppress(IndexError):  # none is left; another thread may remove some
                while True:
                    self._retired.popleft().remove()
            message = self._message()
            # Offered before it looks whether the save is given up: see withdraw().
            self._is_offered = message is not None
            if message is None or self._stopped.is_set():
                self.is_allowed = False
                return
            self._records.put(message)
            if self._commit is None:
                return
            pause_s, deadline_s = _FIRST_PAUSE_S, time.monotonic() + self._timeout_s
            while not self._records.are_complete() or not (
                self.after is None or self.after.is_decided
            ):
                if self._stopped.wait(pause_s) or time.monotonic() > deadline_s:
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with self._lock:
                if self._stopped.is_set():
                    return
                self._is_claimed = True
            if self._records.claim(_COMMIT):
                self._ending = ending = self._commit(self._records.all())
                if not ending.failures and ending.slowest_rank is not None:
                    self.committed = ending.slowest_rank + 1
                self.is_decided = self._final() is not None
        except Exception as error:  # finalising does it
            self.is_allowed = False
            _log.debug("the save is not committed early: %s", error, exc_info=True)
        finally:
            self.after = None
            over.set_result(None)

    # --- its end --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin nothing from now on; a commit in progress continues."""
        with self._lock:
            self._stopped.set()

    def finish(self) -> Ending | None:
        """Stop waiting for other ranks, and wait for a commit in progress.

        On the coordinator, returns how that has ended; ``None`` if it has not begun and will not,
        or the messages were refused.
        """
        self.stop()
        if self._is_over_in(_DEADLINES * self._timeout_s + PATIENCE_S):
            return self._final()
        error = NotDurableError(
            "cannot determine whether the metadata was published: storage or the process group's"
            " store hangs",
            rank=self._rank,
            phase="commit",
            hint="check the directory when they answer again",
        )
        failures = {self._rank: _torch.wrap_exception(error)}
        return Ending(failures=failures, published=True, changed=True)

    def _final(self) -> Ending | None:
        """How the commit has ended, unless the poll has to collect the messages again."""
        failures = {} if self._ending is None else self._ending.failures
        phases = [getattr(error, "phase", None) for error, _ in failures.values()]
        # Refused messages do not fit together: they may be about different saves.
        return None if "collect" in phases else self._ending

    def withdraw(self) -> bool:
        """Prevent the commit; whether it is certain that there is and will be none."""
        self.stop()
        if self._commit is not None:
            is_over = self._is_over_in(CANCEL_TIMEOUT_S)
            is_prevented = is_over and (self._ending is None or not self._ending.published)
        elif not self._is_offered:
            return True
        else:
            is_prevented = False
            with suppress(RuntimeError, SaveTimeoutError):
                is_prevented = call_with_deadline(
                    partial(self._records.claim, _GIVE_UP),
                    timeout_s=CANCEL_TIMEOUT_S,
                    doing="giving up a save",
                    phase="write",
                    path="",
                )
        if is_prevented:
            self.retire()
        self.is_decided = True
        return is_prevented

    def _is_over_in(self, timeout_s: float) -> bool:
        """Whether no commit is in progress, now or after a wait of up to ``timeout_s`` seconds."""
        return not self._is_claimed or self._over is None or is_done(self._over, timeout_s)

    def retire(self) -> None:
        """Have the records removed: the save is over on this rank."""
        if self._is_offered:
            self._retired.append(self._records)
