"""``nostall convert SOURCE TARGET``: a DCP directory to one file, and back."""

from __future__ import annotations

import argparse
import os

from nostall._cli.arguments import NotThere, Status, place
from nostall._cli.checkpoints.listing import require_no_broken_link
from nostall._cli.output import printable
from nostall._model.names import SAFETENSORS_SUFFIX
from nostall._model.wording import counted
from nostall._storage.places import is_address, storage_at
from nostall.errors import OptionError

HELP = "convert a checkpoint directory to a torch.save or safetensors file, or back"
DESCRIPTION = (
    "Convert a checkpoint directory to one torch.save or safetensors file, or such a file, or a"
    " directory of safetensors files, to a checkpoint directory. The names say which. A checkpoint"
    " is verified first. Tensors are never all in memory; converting to a file needs room for them"
    " twice on the target's disk. TARGET appears when it is complete. In a file of torch.save, keys"
    " of dictionaries are texts, as with torch's dcp_to_torch_save: to load an optimizer's state,"
    " make those of its 'state' numbers again."
)


_FILE_ENDINGS = (".pt", ".pth", ".bin", ".pkl")
"""Endings of a file that torch.save writes, none of them a directory's."""
_OTHER_FORMATS = (".gguf", ".onnx", ".h5", ".npz", ".npy", ".distcp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("source", type=place, metavar="SOURCE", help="checkpoint directory, or file")
    add("target", type=place, metavar="TARGET", help="new file, or new directory")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle objects of any class, which can run code that is in SOURCE",
    )

    add(
        "--prefix",
        default="",
        metavar="NAME",
        help="for safetensors: only tensors whose names begin so, without this beginning",
    )


def run(parsed: argparse.Namespace) -> int:
    """Convert in the direction that SOURCE says."""
    if not is_address(parsed.source):
        require_no_broken_link(parsed.source)
        if not os.path.lexists(parsed.source):
            raise NotThere(f"{parsed.source}: no such file or directory")
        if not os.path.isdir(parsed.source):  # a pipe would block, a device may have no end
            directory, name = os.path.split(parsed.source)
            storage_at(directory).stat(name)
    elif parsed.source.lower().endswith((*_FILE_ENDINGS, SAFETENSORS_SUFFIX)):
        raise OptionError(
            "only a checkpoint can be read from an object store",
            path=parsed.source,
            hint="copy the file to a disk first",
        )
    if _is_there(parsed.target):
        raise OptionError(
            "the target exists", path=parsed.target, hint="remove it, or name another one"
        )
    items = _convert(parsed)
    print(printable(f"{parsed.source} -> {parsed.target}: {counted(items, 'item')}"))
    return Status.FINE


def _is_there(target: str) -> bool:
    return bool(storage_at(target).list()) if is_address(target) else os.path.lexists(target)


def _convert(parsed: argparse.Namespace) -> int:
    """Convert; returns the number of items."""
    source, target, trust = parsed.source, parsed.target, parsed.trust
    is_source, is_target = (is_of_safetensors(path) for path in (source, target))
    if parsed.prefix and not is_target:
        raise OptionError("--prefix is for a target that ends with .safetensors", path=target)
    is_checkpoint = is_address(source) or (os.path.isdir(source) and not is_source)
    if not is_checkpoint:
        _require_fitting_name(target, to_directory=True)
    elif is_address(target):
        raise OptionError(
            "a file can be written to a file system only",
            path=target,
            hint="name a path there, and copy the file to the store",
        )
    if is_source:
        from nostall._cli.checkpoints.safetensors import from_safetensors

        return from_safetensors(source, target)
    if is_target:
        from nostall._cli.checkpoints.safetensors import to_safetensors

        return to_safetensors(source, target, prefix=parsed.prefix)
    from nostall._cli.checkpoints.converting import to_checkpoint, to_file

    if is_checkpoint:
        _require_fitting_name(target, to_directory=False)
        return to_file(source, target, trust=trust)
    return to_checkpoint(source, target, trust=trust)


def is_of_safetensors(path: str) -> bool:
    """Whether it is named like a file of safetensors, or is a directory of such files."""
    if not os.path.isdir(path):
        return path.lower().endswith(SAFETENSORS_SUFFIX)
    names = os.listdir(path)
    return ".metadata" not in names and any(name.endswith(SAFETENSORS_SUFFIX) for name in names)


def _require_fitting_name(target: str, *, to_directory: bool) -> None:
    """Check that the name does not promise something other than what is written.

    Raises:
        OptionError: It does.
    """
    written = "a checkpoint directory" if to_directory else "one file of torch.save"
    wrong = _OTHER_FORMATS + ((*_FILE_ENDINGS, SAFETENSORS_SUFFIX) if to_directory else (os.sep,))
    if target.lower().endswith(wrong):
        raise OptionError(
            f"this command writes {written}, but the name of the target says otherwise",
            path=target,
            hint="name a directory" if to_directory else "use a name such as step-500.pt",
        )
