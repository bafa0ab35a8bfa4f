"""Read back what an offline run of W&B wrote; W&B itself reads it only to send it.

The file is a log as LevelDB writes them: blocks of 32 KiB, in them chunks with a header of a
checksum, a length and a type (whole, first, middle, last), after a head of 7 bytes of its own. A
record is a `Record` of W&B's protocol buffers.
"""

import json
import struct
from pathlib import Path
from typing import Any, Dict, Iterator

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def rows(path: Path) -> Iterator[Dict[str, Any]]:
    """The history rows of a run: key to value."""
    from wandb.proto import wandb_internal_pb2

    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }


def _records(content: bytes) -> Iterator[bytes]:
    position, parts = 7, b""
    while position + _HEADER.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(content, position)
        position += _HEADER.size
        parts += content[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
