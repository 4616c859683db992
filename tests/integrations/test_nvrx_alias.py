"""nostall under the module names of nvidia-resiliency-ext: what is aliased, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from nostall import nvrx_alias
from support.ranks import run_python

Facts = dict[str, Any]
PACKAGE = "nvidia_resiliency_ext"

NAMES = {
    "checkpointing.async_ckpt.core": [
        *("AsyncCaller", "AsyncCallsQueue", "AsyncRequest", "PersistentAsyncCaller"),
        *("TemporalAsyncCaller", "abort_nvrx_checkpoint"),
    ],
    "checkpointing.async_ckpt.filesystem_async": [
        *("FileSystemWriterAsync", "_results_queue", "get_write_results_queue"),
    ],
    "checkpointing.async_ckpt.state_dict_saver": [
        *("CheckpointMetadataCache", "get_metadata_caching_status", "verify_global_md_reuse"),
        *("init_checkpoint_metadata_cache", "save_state_dict_async_finalize"),
        "save_state_dict_async_plan",
    ],
    "checkpointing.async_ckpt.torch_ckpt": ["TorchAsyncCheckpoint"],
    "checkpointing.async_ckpt.cached_metadata_filesystem_reader": [
        "CachedMetadataFileSystemReader"
    ],
    "checkpointing.utils": ["diff", "preload_tensors"],
}
"""Names that frameworks import, by module."""

INSTALLED = {
    "__init__.py": '__version__ = "0.4.1"\n',
    "inprocess.py": f"from {PACKAGE}.checkpointing.async_ckpt.core import abort_nvrx_checkpoint\n",
    "checkpointing/__init__.py": "",
    "checkpointing/utils.py": """\
        def diff(): 'the original'
        def only_theirs(): return 'theirs'
        def debug_time(name): return lambda function: function
        """,
    "checkpointing/async_ckpt/core.py": "class AsyncRequest: pass\nclass AsyncCallsQueue: pass\n",
    "checkpointing/local/__init__.py": "",
    "checkpointing/local/manager.py": """\
        from ..async_ckpt.core import AsyncRequest
        from ..utils import debug_time, only_theirs

        class Manager:
            @debug_time("save")
            def write(self, path):
                open(path, "w").write(only_theirs())

            def save(self, path):
                return AsyncRequest(self.write, (path,), [], async_fn_kwargs={})
        """,
}
"""An installation of NVRx, as small as it can be; its modules have the original's places."""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder to import an installed NVRx from."""
    folder = tmp_path / "site"
    for name, text in INSTALLED.items():
        file = folder / PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    return folder


def test_preloaded_tensors_are_copies() -> None:
    """Tensors in host memory are copied, too, so later changes by training are not saved."""
    state: dict[str, Any] = {"weight": torch.ones(3), "list": [torch.ones(2)[:1], "text"]}
    copied = nvrx_alias.preload_tensors(state)
    state["weight"].zero_()
    state["list"][0].zero_()
    assert copied["weight"].tolist() == [1.0] * 3
    assert copied["list"][0].tolist() == [1.0]
    assert copied["list"][1] == "text"


def run(folder: Path, text: str, *command: str, path: Path | None = None) -> Facts:
    """The JSON that a script prints; ``command`` comes before its name."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text("import json, sys\nfrom importlib import import_module\n" + dedent(text))
    before = [str(path)] if path is not None else []
    paths = [*before, *sys.path]
    options: Facts = {"cwd": folder.parent, "PYTHONPATH": os.pathsep.join(paths)}
    ended = run_python(*command, script, "one", "--two", timeout_s=100, **options)
    assert ended.returncode == 0, ended.stderr
    facts: Facts = json.loads(ended.stdout)
    return facts


def test_a_script_finds_nostall_where_nvrx_is_not_installed(tmp_path: Path) -> None:
    """``python -m nostall.nvrx_alias SCRIPT``: all names, as in the script run by itself.

    The script imports modules beside it, gets its arguments, and is ``__main__``. What nostall has
    no name for is not installed.
    """
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text(
        f"from {PACKAGE}.checkpointing.async_ckpt.core import AsyncRequest\n"
        "def put(path): open(path, 'w').write('from the worker')\n"
    )
    facts = run(
        folder,
        f"""
        import beside
        import {PACKAGE}.checkpointing.async_ckpt.core as core
        from {PACKAGE} import __version__
        from nostall import nvrx_alias
        nvrx_alias.install()
        names = {NAMES!r}
        found = {{name: import_module("{PACKAGE}." + name) for name in names}}
        lacking = [n for name, listed in names.items() for n in listed
                   if not hasattr(found[name], n)]
        try:
            import {PACKAGE}.inprocess
            others = "found"
        except ModuleNotFoundError as error:
            others = str(error)
        with core.AsyncCallsQueue() as queue:
            queue.schedule_async_request(beside.AsyncRequest(beside.put, ["put"], []))
        print(json.dumps({{
            "lacking": lacking,
            "core": core.__name__,
            "version": __version__,
            "argv": sys.argv[1:],
            "name": __name__,
            "others": others,
            "put": open("put").read(),
        }}))
        """,
        *("-m", "nostall.nvrx_alias"),
    )
    assert facts == {
        "lacking": [],
        "core": "nostall.core",
        "version": "0.7.0",
        "argv": ["one", "--two"],
        "name": "__main__",
        "others": f"No module named '{PACKAGE}.inprocess'",
        "put": "from the worker",
    }


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "Run a Python script"),
        ([], 2, "SCRIPT"),
        (["--he"], 2, "SCRIPT"),
        (["nowhere.py", "--help"], 2, "nostall.nvrx_alias: nowhere.py: no such file\n"),
    ],
)
def test_the_command_without_a_script(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    """Help is no error; what is missing is named without a traceback, and nothing is installed."""
    with pytest.raises(SystemExit) as ended:
        nvrx_alias.main(arguments)
    shown, error = capsys.readouterr()
    assert ended.value.code == status
    assert said in (error if status else shown)
    assert error.count("\n") <= status
    assert f"{PACKAGE}.checkpointing.async_ckpt" not in sys.modules


def test_other_parts_of_an_installed_nvrx_stay_its_own(installed: Path, tmp_path: Path) -> None:
    """They find nostall as ``async_ckpt``; without ``force`` that is an error that says so."""
    facts = run(
        tmp_path / "scripts",
        f"""
        from nostall import core, nvrx_alias
        from nostall.errors import OptionError
        try:
            nvrx_alias.install()
            refused = "no"
        except OptionError as error:
            refused = str(error)
        before = "{PACKAGE}.checkpointing.async_ckpt.core" in sys.modules
        nvrx_alias.install(force=True)
        nvrx_alias.install()
        import {PACKAGE}
        from {PACKAGE} import inprocess
        from {PACKAGE}.checkpointing import utils
        from {PACKAGE}.checkpointing.async_ckpt.core import AsyncCallsQueue
        from {PACKAGE}.checkpointing.local.manager import Manager
        with AsyncCallsQueue() as queue:
            queue.schedule_async_request(Manager().save("written"))
        print(json.dumps({{
            "refused": refused,
            "before": before,
            "version": {PACKAGE}.__version__,
            "abort": inprocess.abort_nvrx_checkpoint is core.abort_nvrx_checkpoint,
            "diff": utils.diff.__module__,
            "theirs": utils.only_theirs(),
            "written": open("written").read(),
        }}))
        """,
        path=installed,
    )
    assert "nvidia-resiliency-ext is installed at " in facts["refused"]
    assert "install(force=True)" in facts["refused"]
    assert facts == {
        "refused": facts["refused"],
        "before": False,
        "version": "0.7.0",
        "abort": True,
        "diff": f"{PACKAGE}.checkpointing.utils",
        "theirs": "theirs",
        "written": "theirs",
    }


def test_what_was_imported_before_is_named(installed: Path, tmp_path: Path) -> None:
    """One error, with and without ``force``: importers of the original would keep it."""
    facts = run(
        tmp_path / "scripts",
        f"""
        import {PACKAGE}.checkpointing.async_ckpt.core as original
        from nostall import nvrx_alias
        from nostall.errors import OptionError
        errors = []
        for force in (False, True):
            try:
                nvrx_alias.install(force=force)
            except OptionError as error:
                errors.append(str(error))
        import {PACKAGE}.checkpointing.async_ckpt.core as now
        print(json.dumps({{"errors": errors, "unchanged": now is original}}))
        """,
        path=installed,
    )
    assert len(facts["errors"]) == 2
    for error in facts["errors"]:
        assert f"{PACKAGE}.checkpointing.async_ckpt.core was imported before" in error
        assert "python -m nostall.nvrx_alias" in error
    assert facts["unchanged"]
