"""The fuzzer: a short run of it, and that it sees what it looks for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stress.fuzz import SHARES
from stress.fuzz_planted import BUGS, READERS
from support.ranks import run_script


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The kinds that the fuzzer reports for each planted bug, at first and in a replay."""
    out = tmp_path_factory.mktemp("planted")
    ended = run_script("stress/fuzz_planted.py", cwd=out, timeout_s=280)
    assert ended.returncode == 0, ended.stderr
    reported: dict[str, list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return reported


@pytest.mark.parametrize(
    ("bug", "kind"),
    [(bug, kind) for bug, (_, kind) in BUGS.items()] + [(bug, "exception") for bug in READERS],
)
def test_a_planted_bug_is_found_and_can_be_replayed(
    seen: dict[str, list[str]], bug: str, kind: str
) -> None:
    """Each forbidden act, and each broken reader, is reported as that, and again in a replay."""
    assert seen[bug] == [kind, kind]


def test_a_few_thousand_hostile_inputs_do_no_harm(tmp_path: Path) -> None:
    """All targets, some inputs of each accepted and some refused; a session has the long run."""
    arguments = ("--inputs", "4000", "--seed", "7", "--findings", "findings")
    ended = run_script("stress/fuzz.py", *arguments, cwd=tmp_path, timeout_s=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for target in SHARES:
        assert re.search(rf"^{target}: \d+ inputs .* 0 findings", ended.stdout, re.MULTILINE)
    for outcome in (
        *("reader: accepted", "the metadata has", "the metadata is", "verify: whole"),
        *("container: whole", "other CRC-32", "split: accepted", "manifest cannot be read"),
        *("index: accepted", "index: UntrustedMetadataError", ": loaded, other values"),
    ):
        assert outcome in ended.stdout
    for way in ("dcp.load", "nostall.load", "slices"):
        for outcome in ("loaded", "DamagedCheckpointError"):
            assert re.search(rf" {way} (none|crc): {outcome}$", ended.stdout, re.MULTILINE)
