"""The thread that writes checkpoints in the background."""

import threading

import torch
from composer.utils import dist

from diffusion.callbacks.saving import SaveCheckpoints


def test_the_thread_uses_the_gpu_of_its_rank(monkeypatch, tmp_path):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((threading.get_ident(), device)))
    monkeypatch.setattr(dist, "get_local_rank", lambda: 3)
    saver = SaveCheckpoints(tmp_path, "1ba", background=True)
    assert saver._pool is not None
    thread = saver._pool.submit(threading.get_ident).result()
    assert devices == [(thread, 3)]
