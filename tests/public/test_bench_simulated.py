"""``bench --simulate-ranks``: what it counts is what real ranks exchange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nostall.cli import main
from support.ranks import run_ranks

ITEMS = 50


def _simulated(tmp_path: Path, ranks: int, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    file = tmp_path / "simulated.json"
    arguments = ["bench", "--simulate-ranks", f"{ranks}", "--simulate-items", f"{ITEMS}"]
    assert main([*arguments, "--json", str(file), "--directory", str(tmp_path), *options]) == 0
    return {(each["way"], each["save"]): each for each in json.loads(file.read_text())["saves"]}


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_real_ranks_exchange_as_much(tmp_path: Path, ranks: int) -> None:
    """By ``dcp.save`` with both planners: collectives alike, and bytes within 15 %."""
    simulated = _simulated(tmp_path, ranks, "--rounds", "1")
    real = run_ranks(ranks, "simulated:exchanged", tmp_path / "real", f"{ITEMS}")
    for way, by_save in real[0].items():
        for save, found in by_save.items():
            of_all = [each[way][save] for each in real]
            counted = simulated[way, save]
            assert found["collectives"] == counted["collectives"]
            assert counted["up_nbytes"] == pytest.approx(
                sum(each["up"] for each in of_all), rel=0.15
            )
            assert counted["down_nbytes"] == pytest.approx(ranks * found["down"], rel=0.15)


def test_the_steady_state_does_not_depend_on_items(tmp_path: Path) -> None:
    """Of messages; stock's and NVRx's grow with them."""
    names = "nostall*,stock"
    few = _simulated(tmp_path, 16, "--rounds", "1", "--contenders", names)
    many = _simulated(
        tmp_path, 16, "--rounds", "1", "--contenders", names, "--simulate-items", f"{8 * ITEMS}"
    )
    for way, save in few:
        growth = many[way, save]["up_nbytes"] / few[way, save]["up_nbytes"]
        is_short = way.startswith("nostall") and save == "later"
        assert (growth < 1.1) if is_short else (growth > 6), (way, save)


def test_what_has_no_meaning_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option."""
    with pytest.raises(SystemExit):
        main(["bench", "--simulate-ranks", "4", "--ranks", "2"])
    assert "--ranks has no meaning with --simulate-ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--simulate-items", "4"])
    assert "--simulate-items has no meaning without --simulate-ranks" in capsys.readouterr().err
