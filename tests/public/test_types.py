"""Type checkers see the signatures that can be called; ``typed_usage.py`` shows how."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall import filesystem_async, torch_ckpt


def typed(module: ModuleType, method: str) -> Callable[..., Any]:
    """A method as type checkers see it."""
    (source,) = (
        ast.unparse(each)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == method
    )
    scope: dict[str, Any] = {**vars(module)}
    exec(f"from __future__ import annotations\n{source}", scope)
    function: Callable[..., Any] = scope[method]
    return function


def parameters(function: Callable[..., Any], kind: Any) -> list[tuple[str, Any]]:
    """Names and defaults, but for ``self``."""
    found = inspect.signature(function).parameters.values()
    return [
        (each.name, each.default) for each in found if each.kind is kind and each.name != "self"
    ]


BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def test_the_typed_constructor_has_stocks_arguments() -> None:
    """In stock's order and with the defaults of the installed torch; then nostall's own."""
    stock, ours = dcp.FileSystemWriter.__init__, nostall.FileSystemWriterAsync.__init__
    seen = typed(filesystem_async, "__init__")
    assert parameters(seen, BY_POSITION) == parameters(stock, BY_POSITION)
    assert dict(parameters(seen, BY_KEYWORD)) == dict(parameters(ours, BY_KEYWORD))


def test_the_typed_save_has_the_arguments_of_torch_save() -> None:
    """Their names, in their order."""
    names = [name for name, _ in parameters(typed(torch_ckpt, "async_save"), BY_POSITION)]
    assert ["obj", *names[1:]] == [name for name, _ in parameters(torch.save, BY_POSITION)]


def test_unknown_names_are_refused_at_run_time(tmp_path: Any) -> None:
    """A misspelt option, as a misspelt name of the package, says what is misspelt."""
    # Each `type: ignore` is a mistake that type checkers see, too.
    with pytest.raises(TypeError, match="thread_cuont"):
        nostall.FileSystemWriterAsync(tmp_path, thread_cuont=2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="verfiy"):
        nostall.verfiy(tmp_path)  # type: ignore[attr-defined]
    with pytest.raises(nostall.errors.OptionError, match="dict"):
        nostall.configure({"io_threads": 4})  # type: ignore[arg-type]
    with pytest.raises(nostall.errors.OptionError, match="overlaped"):
        nostall.FileSystemWriterAsync(tmp_path, staging="overlaped")  # type: ignore[arg-type]
