"""Read a pickle as a program before anything runs it, and refuse what the pickle of DCP metadata never does.

The unpickler in C believes what it is told: it makes room for whatever memo index or length is announced, and hashes
tuples that share their parts as often as it reaches them, as deep as they are nested. Here the program is followed with
numbers in place of objects: how many parts a tuple has, shared ones counted as often as they are reached, and 1 for
everything else, whose hash is bounded by what :mod:`nostall._metadata` lets it be made of. Refused are

* instructions that no pickle of metadata has, among them those for numbers of any length, sets and external objects;
* texts that are longer than the content, and memo indices that leave a gap;
* state for what is no instance, so that no class, function or enum member changes;
* a tuple of more than :data:`_MOST_TUPLE_PARTS`, and tuples that are fetched from the memo so often that all their parts
  are more than a few per byte of the content.

What is refused here has not run. Nothing here imports torch.
"""

from __future__ import annotations

import pickle
from typing import Final

_MOST_TUPLE_PARTS = 10_000
"""Bounds how deep tuples are nested, too; hashing one that is ten times deeper overflows the stack of the process."""
_SHARED_PARTS_PER_BYTE = 16
_MOST_NAME_NBYTES = 255
_PROTOCOLS = range(2, 6)
_PROTO_NBYTES = 2
_FRAME_NBYTES = 9


class ScanError(ValueError):
    """A program does what the pickle of DCP metadata never does."""


class BrokenProgramError(ScanError):
    """It is not the whole of a program."""


def scan(content: bytes) -> bytes:
    """The program that ``content`` begins with, without the frames that it may be cut into.

    Raises:
        ScanError: It does what the pickle of DCP metadata never does.
    """
    if content[:1] != pickle.PROTO or int.from_bytes(content[1:2], "little") not in _PROTOCOLS:
        raise BrokenProgramError("it is of a protocol that DCP does not use")
    try:
        end, frames = _follow(content)
    except IndexError:
        raise BrokenProgramError("it is cut off, or takes more than there is") from None
    begins = [0, *(at + _FRAME_NBYTES for at in frames)]
    return b"".join(content[i:j] for i, j in zip(begins, [*frames, end], strict=True))


def _follow(content: bytes) -> tuple[int, list[int]]:
    """Where the program ends, and where frames begin in it.

    One long loop, the most frequent instructions first: with a function for each it takes four times as long.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: list[int] = []
    frames: list[int] = []
    push, memoize, pop = stack.append, memo.append, stack.pop
    constants, taking, tuples, sized = _CONSTANTS, _TAKING, _TUPLES, _SIZED
    shared = 0
    at = _PROTO_NBYTES
    while True:
        op = content[at]
        at += 1
        if op == _MEMOIZE:
            memoize(stack[-1])
        elif op == _BINGET:
            push(memo[content[at]])
            shared += stack[-1]
            at += 1
        elif op == _LONG_BINGET:
            push(memo[int.from_bytes(content[at : at + 4], "little")])
            shared += stack[-1]
            at += 4
        elif op in constants:
            push(1)
            at += constants[op]
        elif op == _TUPLE1:
            stack[-1] += 1
            if stack[-1] > _MOST_TUPLE_PARTS:
                raise ScanError(_TOO_MANY_PARTS)
        elif op in taking:
            pop()
            stack[-1] = 1
        elif op == _NEWOBJ:
            pop()
            stack[-1] = _INSTANCE
        elif op == _BUILD:
            pop()
            if stack[-1] is not _INSTANCE:
                raise ScanError("it changes what is no instance, which is no part of it")
        elif op in _PUTS:
            width = _PUTS[op]
            index = int.from_bytes(content[at : at + width], "little")
            if index > len(memo):
                raise ScanError(f"it puts {index} into its memo, of which {len(memo)} is next")
            memo[index : index + 1] = (stack[-1],)
            at += width
        elif op == _MARK:
            marks.append(len(stack))
        elif op in _TO_MARK:
            del stack[marks.pop() :]
        elif op in sized:
            nbytes = int.from_bytes(content[at : at + sized[op]], "little")
            at += sized[op] + nbytes
            push(1)
        elif op in tuples:
            begin = len(stack) - tuples[op] if op != _TUPLE else marks.pop()
            parts = 1 + sum(stack[begin:])
            if begin < 0 or parts > _MOST_TUPLE_PARTS:
                raise ScanError(_TOO_MANY_PARTS)
            del stack[begin:]
            push(parts)
        elif op == _SETITEM:
            del stack[-2:]
        elif op == _GLOBAL:
            for _ in range(2):
                at = content.find(b"\n", at, at + _MOST_NAME_NBYTES) + 1
                if not at:
                    raise ScanError("a name in it has no end")
            push(1)
        elif op == _FRAME:
            frames.append(at - 1)
            at += _FRAME_NBYTES - 1
        elif op == _STOP:
            break
        else:
            raise ScanError(f"it has the instruction {bytes([op])!r}, which is no part of it")
    if shared > _SHARED_PARTS_PER_BYTE * len(content):
        raise ScanError("tuples in it are shared more often than any of DCP's")
    return at, frames


_INSTANCE: Final = True
"""A 1 that can be told from others: state is given to nothing else, such as a class or an enum member."""
_TOO_MANY_PARTS = "a tuple in it has more parts than any of DCP's"
_MEMOIZE: Final = pickle.MEMOIZE[0]
_BINGET: Final = pickle.BINGET[0]
_LONG_BINGET: Final = pickle.LONG_BINGET[0]
_PUTS: Final = {pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}
_MARK: Final = pickle.MARK[0]
_TUPLE: Final = pickle.TUPLE[0]
_TUPLE1: Final = pickle.TUPLE1[0]
_NEWOBJ: Final = pickle.NEWOBJ[0]
_BUILD: Final = pickle.BUILD[0]
_SETITEM: Final = pickle.SETITEM[0]
_TO_MARK: Final = {pickle.SETITEMS[0], pickle.APPENDS[0]}
_GLOBAL: Final = pickle.GLOBAL[0]
_FRAME: Final = pickle.FRAME[0]
_STOP: Final = pickle.STOP[0]
_CONSTANTS: Final = {
    op[0]: nbytes
    for op, nbytes in {
        pickle.NONE: 0,
        pickle.NEWTRUE: 0,
        pickle.NEWFALSE: 0,
        pickle.EMPTY_TUPLE: 0,
        pickle.EMPTY_LIST: 0,
        pickle.EMPTY_DICT: 0,
        pickle.BININT1: 1,
        pickle.BININT2: 2,
        pickle.BININT: 4,
        pickle.BINFLOAT: 8,
    }.items()
}
"""What pushes a value, and the length of its argument."""
_SIZED: Final = {
    op[0]: nbytes
    for op, nbytes in {
        pickle.SHORT_BINUNICODE: 1,
        pickle.BINUNICODE: 4,
        pickle.BINUNICODE8: 8,
        pickle.SHORT_BINBYTES: 1,
        pickle.BINBYTES: 4,
        pickle.BINBYTES8: 8,
        pickle.LONG1: 1,
    }.items()
}
"""What pushes a text, bytes or a number, and the length of the length of its argument."""
_TUPLES: Final = {pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3, pickle.TUPLE[0]: 0}
_TAKING: Final = {op[0] for op in (pickle.REDUCE, pickle.APPEND, pickle.STACK_GLOBAL)}
"""What takes one value from the stack and leaves another in place of the next one."""
