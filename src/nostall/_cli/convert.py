"""``nostall convert SOURCE TARGET``: a DCP directory to one ``torch.save`` file, and back."""

from __future__ import annotations

import argparse
import os

from nostall._cli.arguments import NotThere, Status, not_empty
from nostall._cli.checkpoints.listing import require_no_broken_link
from nostall._cli.output import counted, printable
from nostall._storage.destination import require_file_system
from nostall.errors import OptionError

HELP = "convert a checkpoint directory to one torch.save file, or back"
DESCRIPTION = (
    "Convert a checkpoint directory to one torch.save file, or such a file to a checkpoint"
    " directory. SOURCE is verified first. Tensors are never all in memory; converting to a file"
    " needs room for them twice on the target's disk. TARGET appears when it is complete. In the"
    " file, keys of dictionaries are texts, as with torch's dcp_to_torch_save: to load an"
    " optimizer's state, make those of its 'state' numbers again."
)


_FILE_ENDINGS = (".pt", ".pth", ".bin", ".pkl")
"""Endings of a file that torch.save writes, none of them a directory's."""
_OTHER_FORMATS = (".safetensors", ".gguf", ".onnx", ".h5", ".npz", ".npy", ".distcp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("source", type=not_empty, metavar="SOURCE", help="checkpoint directory, or file")
    add("target", type=not_empty, metavar="TARGET", help="new file, or new directory")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle objects of any class, which can run code that is in SOURCE",
    )


def run(parsed: argparse.Namespace) -> int:
    """Convert in the direction that SOURCE says."""
    for path in (parsed.source, parsed.target):
        require_file_system(path, "convert")
    require_no_broken_link(parsed.source)
    if not os.path.lexists(parsed.source):
        raise NotThere(f"{parsed.source}: no such file or directory")
    if os.path.lexists(parsed.target):
        raise OptionError(
            "the target exists", path=parsed.target, hint="remove it, or name another one"
        )
    is_directory = os.path.isdir(parsed.source)
    _require_fitting_name(parsed.target, to_directory=not is_directory)
    from nostall._cli.checkpoints.converting import to_checkpoint, to_file

    convert = to_file if is_directory else to_checkpoint
    items = convert(parsed.source, parsed.target, trust=parsed.trust)
    print(printable(f"{parsed.source} -> {parsed.target}: {counted(items, 'item')}"))
    return Status.FINE


def _require_fitting_name(target: str, *, to_directory: bool) -> None:
    """Check that the name does not promise something other than what is written.

    Raises:
        OptionError: It does.
    """
    written = "a checkpoint directory" if to_directory else "one file of torch.save"
    wrong = _OTHER_FORMATS + (_FILE_ENDINGS if to_directory else (os.sep,))
    if target.lower().endswith(wrong):
        raise OptionError(
            f"this command writes {written}, but the target is named like something else",
            path=target,
            hint="name a directory" if to_directory else "use a name such as step-500.pt",
        )
