"""The fault matrix, in part: see ``matrix.py``."""

from __future__ import annotations

import json
from pathlib import Path

import nostall
from stress.matrix_cells import DEATHS, FAULTS, PLACES, SHAPES, WAYS, all_cells, covering
from support.ranks import run_script


def test_few_cells_show_every_fault_in_every_place_and_way() -> None:
    """The cells run here cover every place, and each fault in every way and shape of a save."""
    cells = covering(all_cells(), seed=1)
    assert len(cells) < len(all_cells()) / 10
    for fault in FAULTS:
        shown = [cell for cell in cells if cell.fault == fault]
        assert {cell.way for cell in shown} == set(WAYS)
        assert {cell.shape for cell in shown} == set(SHAPES)
        assert {cell.overwrite for cell in shown} == {False, True}
        assert {cell.place for cell in shown} >= {"writer", "commit"}
    assert {cell.fault for cell in cells if cell.place == "trainer"} == {"exception", *DEATHS}
    assert {cell.place for cell in cells} == set(PLACES)


def test_a_failed_save_raises_on_every_rank_harms_nothing_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    """On two ranks, for every pair of fault, place, rank, kind of save and what it replaces."""
    done = run_script("stress/matrix.py", "--covering", cwd=tmp_path, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])  # older Gloo says there that it is connected
    assert counted["cells"] == len(covering(all_cells(), seed=1))
    assert counted["violations"] == []
    assert counted["nostall"] == str(Path(nostall.__file__).parent)
