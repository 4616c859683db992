"""What a queue has asked the other ranks in a poll, until the next poll reads their answer."""

from __future__ import annotations

from nostall._engine import default_engine
from nostall._queue.callers import Call
from nostall._queue.live import scheduled, unanswered
from nostall._ranks.agreement import Question, View
from nostall._ranks.group import Coordination


class Asking:
    """The question about a queue's first request."""

    def __init__(self) -> None:
        self._asked: tuple[Call, Question] | None = None

    def view_of(
        self, call: Call, mine: View, coordination: Coordination, *, now: bool
    ) -> View | None:
        """The view over all ranks of the first request; ``None`` if the next poll has it.

        Unless it is wanted ``now``, a poll does not depend on ranks that poll later: it asks, and
        the next one has the answer.
        """
        timeout_s = default_engine().options.save_timeout_s
        asked = self._asked
        if asked is not None and asked[0] is call:
            self._asked = None
            answer = asked[1].answer(scheduled, timeout_s=timeout_s)
            if answer.is_done or (answer.hurry and not mine.waits):
                return answer
        self.drop()
        question = Question(mine, coordination)
        if now or coordination.world_size == 1:
            return question.answer(scheduled, timeout_s=timeout_s)
        self._asked = (call, question)
        return None

    def drop(self) -> None:
        """Do not wait for the answer, but remember at the end of the process that it is to come."""
        asked, self._asked = self._asked, None
        if asked is not None:
            unanswered[:] = [each for each in unanswered if not each.is_answered()]
            unanswered.append(asked[1])

    def forget_after_fork(self) -> None:
        """In a forked child: the parent has asked."""
        self._asked = None
