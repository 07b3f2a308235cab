"""Writing of checkpoints: the thread in the background, and a store that is gone."""

import threading
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from diffusion.callbacks.saving import SaveCheckpoints
from diffusion.errors import ConfigurationError, DataError, MachineError


def test_the_thread_uses_the_gpu_of_its_rank(monkeypatch, tmp_path):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((threading.get_ident(), device)))
    monkeypatch.setenv("LOCAL_RANK", "3")
    saver = SaveCheckpoints(tmp_path, "1ba", background=True)
    assert saver._pool is not None
    thread = saver._pool.submit(threading.get_ident).result()
    assert devices == [(thread, 3)]


def test_a_bucket_that_is_gone_ends_the_run_and_keeps_the_files(tmp_path):
    class Gone:
        def remove_named(self, name: str) -> None:
            raise DataError("s3://bucket does not exist")

        def uri_of(self, name: str) -> str:
            return f"s3://bucket/{name}"

    remote: Any = Gone()
    path = tmp_path / "ep0-ba2.pt"
    path.touch()
    with pytest.raises(MachineError, match=r"s3://bucket/ep0-ba2\.pt") as caught:
        SaveCheckpoints(tmp_path, "1ba", remote=remote)._upload(remote, path, is_sharded=False)
    assert caught.value.is_agreed
    assert path.exists()


@pytest.mark.parametrize("is_awaited", [False, True])
def test_the_error_of_a_write_in_the_background_is_logged_unless_its_end_is_awaited(
    tmp_path, monkeypatch, caplog, is_awaited
):
    saver, may_fail = SaveCheckpoints(tmp_path, "1ba", background=True), threading.Event()

    def fail(*_: Any) -> None:
        assert may_fail.wait(60)
        raise MachineError("the disk is full")

    time = SimpleNamespace(batch=SimpleNamespace(value=2), epoch=SimpleNamespace(value=0))
    state: Any = SimpleNamespace(timestamp=time, fsdp_sharded_state_dict_enabled=False, optimizers=[], state_dict=dict)
    monkeypatch.setattr(saver, "_write", fail)
    monkeypatch.setattr(saver, "_is_due", lambda *_: True)
    saver._group = "none"
    saver.batch_checkpoint(state, Mock())
    if is_awaited:
        threading.Timer(0.5, may_fail.set).start()
    else:
        may_fail.set()
        saver.close(state, Mock())
        assert saver._pool is not None
        saver._pool.shutdown()
    with pytest.raises(MachineError, match="full"):
        saver.fit_end(state, Mock())
    assert caplog.text.count("the disk is full") == (0 if is_awaited else 1)


def test_a_state_that_could_not_be_loaded_ends_the_run_at_its_first_checkpoint(tmp_path):
    time = SimpleNamespace(batch=SimpleNamespace(value=2), epoch=SimpleNamespace(value=0))
    callbacks = {"Fine": {"a": torch.ones(2), "b": [(1, "x"), None]}, "Mine": {"begun": [datetime.now()]}}
    state: Any = SimpleNamespace(
        timestamp=time,
        fsdp_sharded_state_dict_enabled=False,
        optimizers=[],
        state_dict=lambda: {"callbacks": callbacks},
    )
    saver, logger = SaveCheckpoints(tmp_path, "1ba"), Mock()
    saver._group = "none"
    with pytest.raises(ConfigurationError, match=r"the state of Mine .*datetime"):
        saver.save(state, logger)
    assert list(tmp_path.iterdir()) == []
