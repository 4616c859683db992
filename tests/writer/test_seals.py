"""Checksums of pieces combine, and seals put them into containers wherever chunks begin."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import accumulate
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from nostall._model.checksum import combine
from nostall._model.jobs import Seal, SealTable
from nostall._writer import seals
from nostall._writer.seals import Payloads, Window, plan_chunks
from support.sealing import seal_patches

# --- checksums ------------------------------------------------------------------------------------


@given(pieces=st.lists(st.binary(max_size=300), max_size=8))
@example(pieces=[b"in front", bytes(4096), bytes(65537)])
@example(pieces=[b"in front", bytes((8 << 20) + 3)])
def test_combined_checksums_of_pieces_are_that_of_the_whole(pieces: list[bytes]) -> None:
    """However bytes are cut, ``combine`` over the pieces gives what zlib gives for all of them."""
    crc = 0
    for piece in pieces:
        crc = combine(crc, zlib.crc32(piece), len(piece))
    assert crc == zlib.crc32(b"".join(pieces))


CRCS = st.integers(0, 2**32 - 1)
LENGTHS = st.integers(1, 2**44)


@given(a=CRCS, b=CRCS, c=CRCS, nbytes_b=LENGTHS, nbytes_c=LENGTHS)
def test_checksums_combine_in_any_grouping(
    a: int, b: int, c: int, nbytes_b: int, nbytes_c: int
) -> None:
    """Neighbours may be joined in any order, for lengths that no test could hold in memory."""
    left = combine(combine(a, b, nbytes_b), c, nbytes_c)
    right = combine(a, combine(b, c, nbytes_c), nbytes_b + nbytes_c)
    assert left == right


# --- sealing --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Form:
    """A container's form: where its payload lies, how long it is itself, and how it is sealed."""

    offset: int
    nbytes: int
    length: int
    seal: Seal


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Forms with their fields anywhere behind the payload."""
    offset, nbytes = draw(st.integers(0, 5)), draw(st.integers(1, 40))
    widths = [("crc", 4), ("crc in directory", 4), ("id", 40), ("id crc", 4), ("id directory", 4)]
    places, at = {}, offset + nbytes
    for name, width in draw(st.permutations(widths)):
        at += draw(st.integers(0, 3))
        places[name] = at
        at += width
    seal = Seal(
        payload_crc_at=(places["crc"], places["crc in directory"]),
        hash_before=draw(st.integers(0, 2**64 - 1)),
        crcs_after=tuple(draw(st.lists(CRCS, max_size=3))),
        id_at=places["id"],
        id_names=draw(st.text("0123456789", min_size=20, max_size=20)).encode(),
        id_crc_at=(places["id crc"], places["id directory"]),
    )
    return Form(offset=offset, nbytes=nbytes, length=at, seal=seal)


def sealed(image: bytes, blob: int, form: Form) -> tuple[int, bytes]:
    """The payload's CRC, and the image with one container sealed by what the patches say."""
    begin = blob + form.offset
    crc32 = zlib.crc32(image[begin : begin + form.nbytes])
    content = bytearray(image)
    for at, field in seal_patches(form.seal, crc32):
        content[blob + at : blob + at + len(field)] = field
    return crc32, bytes(content)


@given(
    data=st.data(),
    kinds=st.lists(forms(), min_size=1, max_size=3),
    left_open=st.sets(st.integers(0, 2), max_size=1),
)
def test_an_image_is_sealed_the_same_wherever_it_is_cut(
    data: st.DataObject, kinds: list[Form], left_open: set[int]
) -> None:
    """Payloads in one chunk or many, summed in any order: the seals are the whole payloads'."""
    template_of_slot = data.draw(st.lists(st.integers(0, len(kinds) - 1), max_size=6))
    offsets = [0, *accumulate(kinds[kind].length for kind in template_of_slot)]
    end = offsets.pop()
    image = expected = data.draw(st.binary(min_size=end, max_size=end))
    crcs = [0] * len(offsets)
    for slot, (blob, kind) in enumerate(zip(offsets, template_of_slot, strict=True)):
        if kind not in left_open:
            crcs[slot], expected = sealed(expected, blob, kinds[kind])
    table = SealTable(
        templates=tuple(
            (form.offset, form.nbytes, None if kind in left_open else form.seal)
            for kind, form in enumerate(kinds)
        ),
        blob_offsets=tuple(offsets),
        template_of_slot=tuple(template_of_slot),
    )
    size = data.draw(st.integers(1, 200))
    bounds = (*range(0, end, size), end) if end else (0, 0)
    plan_chunks.cache_clear()
    with patch.object(seals, "_WORTH_JOINING_NBYTES", data.draw(st.integers(1, 90))):
        payloads = Payloads(table, bounds)
    memory = bytearray(image)
    window = Window(memoryview(memory), 0)
    chunks = range(len(bounds) - 1)
    for chunk in data.draw(st.permutations(chunks)):
        payloads.sum_parts(window, chunk)
    for chunk in data.draw(st.permutations(chunks)):
        payloads.seal_ending_in(window, chunk)
    assert bytes(memory) == expected
    assert list(payloads.crc32) == crcs
    for chunk in data.draw(st.permutations(chunks)):
        payloads.sum_chunk(window, chunk)
    assert payloads.crc32_of_file == zlib.crc32(expected)
