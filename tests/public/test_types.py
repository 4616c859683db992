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


def typed(module: ModuleType, method: str) -> ast.arguments:
    """The arguments of a method as type checkers see them: the first of its definitions."""
    (guarded,) = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.If)
        and any(isinstance(each, ast.FunctionDef) and each.name == method for each in node.body)
    )
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    (definition,) = (each for each in guarded.body if isinstance(each, ast.FunctionDef))
    return definition.args


def positional(arguments: ast.arguments) -> dict[str, str | None]:
    """Names and default expressions of the arguments but ``self``."""
    names = [each.arg for each in arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults)) + [
        ast.unparse(each) for each in arguments.defaults
    ]
    return dict(list(zip(names, defaults, strict=True))[1:])


def parameters(function: Callable[..., Any], kinds: tuple[Any, ...]) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in found if each.kind in kinds and each.name != "self"}


BY_POSITION = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY,)


def test_the_typed_constructor_has_stocks_arguments() -> None:
    """In stock's order and with the defaults of the installed torch; then nostall's own."""
    arguments = typed(filesystem_async, "__init__")
    scope = vars(filesystem_async)
    seen = {
        name: inspect.Parameter.empty if default is None else eval(default, scope)
        for name, default in positional(arguments).items()
    }
    assert seen == parameters(dcp.FileSystemWriter.__init__, BY_POSITION)
    own = {
        argument.arg: eval(ast.unparse(default), scope)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    assert own == parameters(nostall.FileSystemWriterAsync.__init__, BY_KEYWORD)


def test_the_typed_save_has_the_arguments_of_torch_save() -> None:
    """Their names, in their order."""
    arguments = positional(typed(torch_ckpt, "async_save"))
    assert ["obj", *list(arguments)[1:]] == [*parameters(torch.save, BY_POSITION)]


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
