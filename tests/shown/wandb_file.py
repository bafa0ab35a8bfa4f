"""Read back what an offline run of W&B wrote; W&B itself reads it only to send it.

The file is a log as LevelDB writes them: blocks of 32 KiB, in them chunks with a header of a
checksum, a length and a type (whole, first, middle, last), after a head of 7 bytes of its own. A
record is a `Record` of W&B's protocol buffers.
"""

import json
import struct
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def rows(path: Path, seconds: float = 60.0) -> List[Dict[str, Any]]:
    """The history rows of a finished run: key to value.

    W&B's own process writes the file, and may be a little behind: the last record says that the run
    has ended.
    """
    from wandb.proto import wandb_internal_pb2

    given_up = time.monotonic() + seconds
    while True:
        records = []
        for data in _records(path.read_bytes()):
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(data)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            break
        assert time.monotonic() < given_up, f"{path} is not complete"
        time.sleep(0.1)
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def _records(content: bytes) -> Iterator[bytes]:
    position, parts = 7, b""
    while position + _HEADER.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(content, position)
        position += _HEADER.size
        if position + length > len(content):
            return  # being written
        parts += content[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
