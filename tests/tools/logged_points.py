"""Read back what TensorBoard shows of event files, and what wandb has written offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 2**15
_FULL, _FIRST, _LAST = 1, 2, 4


def tensorboard_points(folder: Path) -> list[tuple[str, int]]:
    """Names and steps of the points that TensorBoard shows of a folder of event files."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()
    scalars = [(tag, event.step) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    return scalars + [(tag, event.step) for tag in events.Tags()["images"] for event in events.Images(tag)]


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an offline file, with their `_step`."""
    for row in wandb_history(path):
        yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item}


def wandb_history(path: Path) -> Iterator[Any]:
    """Rows of an offline file as wandb stores them (`HistoryRecord`)."""
    if path.stat().st_size == 0:
        return
    for content in stored_records(path):
        record: Any = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            yield record.history


def stored_records(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, after a header of 7 bytes, up to one that a kill has cut off."""
    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := _BLOCK - position % _BLOCK) < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        part = content[position + 7 : position + 7 + length]
        position += 7 + length
        if not kind or len(part) < length:
            return
        record = part if kind in (_FULL, _FIRST) else record + part
        if kind in (_FULL, _LAST):
            yield record
