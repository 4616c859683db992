"""One message of each kind between trainer and writer, as examples."""

from __future__ import annotations

import json
from typing import Any

from nostall._model.jobs import (
    Failure,
    FileImage,
    FileReceipt,
    RankFailed,
    RankWritten,
    Seal,
    SealTable,
    WriteJob,
)
from nostall._writer.framing import encode
from nostall._writer.messages import (
    job_to_message,
    report_to_message,
    seals_to_message,
)


def over_the_wire(message: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(message)[12:])
    return body


def example_table() -> SealTable:
    seal = Seal(
        payload_crc_at=(1, 2),
        hash_before=3,
        crcs_after=(4,),
        id_at=5,
        id_names=b"0" * 20,
        id_crc_at=(6, 7),
    )
    return SealTable(templates=((0, 9, seal),), blob_offsets=(0,), template_of_slot=(0,))


def example_messages() -> list[dict[str, Any]]:
    image = FileImage(name="f", nbytes=1, block=1, block_offset=0, seals=example_table())
    job = WriteJob(
        job="j",
        rank=0,
        directory="/d",
        files=(image,),
        sync_files=True,
        io_threads=1,
        chunk_nbytes=4096,
        direct=True,
        stream=b"pickle",
        sys_path=("p",),
    )
    receipt = FileReceipt(
        name="f",
        planned_name="f",
        nbytes=1,
        crc32_of_file=7,
        extents=((0, 1),),
        started_s=0.0,
        finished_s=1.0,
        fsynced=True,
    )
    failure = Failure(kind="WriteError", message="m", phase="write")
    return [
        over_the_wire(job_to_message(job, 3)),
        over_the_wire(report_to_message("j", RankWritten(rank=0, receipts=(receipt,)))),
        over_the_wire(report_to_message("j", RankFailed(rank=0, failure=failure))),
        over_the_wire(seals_to_message(3, (example_table(),))),
    ]
