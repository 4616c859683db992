"""Messages from ranks to the coordinator arrive intact."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.planner import SavePlan

from nostall import _torch
from nostall._commit.columns import Results, ResultsReference
from nostall._model.values import RankFiles, SaveId, WrittenFile
from nostall._save.decide import RankMessage, decoded
from nostall.errors import SaveError, WriteError

REFERENCE = ResultsReference(token="0" * 32, files=("__0_0.distcp",))
FILES = (
    WrittenFile(name="__0_0.distcp", nbytes=5, crc32=7),
    WrittenFile(name="__0_1.distcp", nbytes=0, crc32=None),
)


def message(outcome: Any, written: RankFiles, save: SaveId | None = None) -> RankMessage:
    return RankMessage(
        outcome=outcome,
        written=written,
        changed_plan=SavePlan([]) if save else None,
        save_here=save,
        counts_alike=save is not None,
        duration_s=1.5,
    )


@pytest.mark.parametrize("save", [None, SaveId(1 << 63, 3)])
@pytest.mark.parametrize("files", [None, (), FILES])
@pytest.mark.parametrize("outcome", [REFERENCE, Results(items={}, files=(), token=None)])
def test_a_message_arrives_as_it_was_sent(outcome: Any, files: Any, save: SaveId | None) -> None:
    """Whatever it holds."""
    written = RankFiles(directory="/d", files=files, left=("__9_9.distcp",), final_path="s3://b/d")
    sent = message(outcome, written, save)
    (received,) = decoded([sent.encoded()])
    assert received == sent
    assert repr(received) == repr(sent)  # which names the types: all these are tuples
    assert repr(pickle.loads(pickle.dumps(written))) == repr(written)


def test_a_failure_arrives_as_one() -> None:
    """It is a pair, as the plain form of a reference is."""
    failure = _torch.wrap_exception(WriteError("full", path="/d"))
    sent = message(failure, RankFiles(directory="/d", files=()))
    (received,) = (each.outcome for each in decoded([sent.encoded()]))
    assert isinstance(received, tuple)
    assert (str(received[0]), type(received[0])) == (str(failure[0]), WriteError)


def test_a_message_that_cannot_be_read_is_an_error_with_its_rank() -> None:
    """A truncated message is an error of ``collect``, after which finalising gathers anew."""
    whole = message(REFERENCE, RankFiles(directory="/d", files=())).encoded()
    with pytest.raises(SaveError, match="truncated") as raised:
        decoded([whole, whole[:-5]])
    assert (raised.value.rank, raised.value.phase) == (1, "collect")
