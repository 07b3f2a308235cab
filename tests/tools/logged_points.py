"""Read back what TensorBoard shows of event files, and what wandb has written offline."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore


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
    store = DataStore()
    store.open_for_scan(str(path))
    while (content := _scan(store)) is not None:
        record: Any = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            yield record.history
    store.close()


def _scan(store: DataStore) -> Any:
    try:
        return store.scan_data()
    except AssertionError:  # What the reader raises for a record that a kill has cut off.
        return None
