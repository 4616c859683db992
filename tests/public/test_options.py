"""Options are checked where they are given, and their errors name value and fix."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from nostall._engine import Engine
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions

ENGINE_MISTAKES: list[tuple[str, Any, str]] = [
    ("io_threads", 0, "at least 1"),
    ("chunk_nbytes", 0, "multiple of 4096"),
    ("chunk_nbytes", 6000, "multiple of 4096"),
    ("chunk_nbytes", -4096, "multiple of 4096"),
    ("max_in_flight", 0, "at least 1"),
    ("cpu_priority", -1, "0 to 19"),
    ("cpu_priority", 20, "0 to 19"),
    ("io_priority", 4, "0, 1, 2 or 3"),
    ("io_priority", -1, "0, 1, 2 or 3"),
    ("save_timeout_s", 0.0, "positive"),
    ("save_timeout_s", math.nan, "positive"),
    ("save_timeout_s", math.inf, "positive"),
]
WRITER_MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"thread_count": 0}, "thread_count=0", "at least 1"),
    (
        {"separation_hint": "opt", "thread_count": 1},
        "separation_hint='opt' with thread_count=1",
        "thread_count >= 2",
    ),
    ({"separation_hint": ""}, "separation_hint=''", "prefix"),
    ({"separation_hint": "../up"}, "separation_hint='../up'", "prefix"),
    ({"separation_hint": ".metadata"}, "separation_hint='.metadata'", "prefix"),
]


def test_a_wrong_engine_option_is_named_with_its_value_and_the_fix() -> None:
    """The error stands where the option was passed and says what to pass instead."""
    for name, value, fix in ENGINE_MISTAKES:
        with pytest.raises(OptionError) as caught:
            EngineOptions(**{name: value})
        assert f"{name}={value}" in caught.value.message
        assert fix in str(caught.value.hint)


def test_a_wrong_writer_option_is_named_with_its_value_and_the_fix() -> None:
    """Combinations that exclude each other are an error when the writer is made."""
    FileSystemWriterAsync("path", thread_count=2, separation_hint="optimizer")
    for given, named, fix in WRITER_MISTAKES:
        with pytest.raises(OptionError) as caught:
            FileSystemWriterAsync("path", **{"thread_count": 2, **given})
        assert named in caught.value.message
        assert fix in str(caught.value.hint)


@pytest.mark.parametrize("path", [None, 5, b"bytes", "", "nul\0"])
def test_what_cannot_be_a_path_is_named(path: Any) -> None:
    """A launcher that lost its argument passes ``None``."""
    with pytest.raises(OptionError, match="checkpoint path"):
        FileSystemWriterAsync(path)


@pytest.mark.parametrize("form", ["safetensors", "torch_save", ["safetensors"]])
def test_a_format_that_is_none_of_dcps_is_refused(form: Any) -> None:
    """Stock takes any other value for its default, without a word."""
    named = re.escape(f"invalid serialization_format={form!r}")
    with pytest.raises(OptionError, match=named):
        FileSystemWriterAsync("path", serialization_format=form)


def test_the_limits_of_options_are_possible() -> None:
    """The largest and smallest values that the hints speak of are accepted."""
    EngineOptions(io_threads=1, chunk_nbytes=4096, max_in_flight=1, cpu_priority=0, io_priority=0)
    EngineOptions(cpu_priority=19, io_priority=3, save_timeout_s=1e-3)
    EngineOptions(cpu_priority=None, io_priority=None, save_timeout_s=1e9)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 12), (2, 12), (4, 8), (8, 4), (64, 1)])
def test_ranks_on_one_host_share_the_writing_threads(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int
) -> None:
    """A rank gets up to 12 threads, a host's ranks up to 32 in total; a user's number stands."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert Engine(EngineOptions()).io_threads == threads
    assert Engine(EngineOptions(io_threads=5)).io_threads == 5
