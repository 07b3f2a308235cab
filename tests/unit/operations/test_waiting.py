"""Why training waits, on recorded usage; what is counted between two readings."""

import re
from dataclasses import replace

import pytest

from diffusion.operations.utilisation import (
    Counters,
    LoaderSettings,
    Usage,
    explain_waiting,
    read_counters,
    usage_between,
)

IDLE = Usage(cpu=0.2, cpu_waiting=0.0, workers=0.1, disk_read=0, memory=0.3)
LOADER = LoaderSettings(num_workers=8, num_cores=96, decodes=True)


@pytest.mark.parametrize(
    ("usage", "downloaded", "settings", "remedy"),
    [
        ({}, 0, {"num_workers": 0}, "data.num_workers"),
        ({"cpu": 0.98, "workers": 0.7}, 0, {}, "scripts/encode.py"),
        ({"cpu": 0.98}, 0, {"decodes": False}, "more cores"),
        ({"workers": 0.97}, 0, {}, "raise data.num_workers"),
        ({}, 120e6, {}, "120.0 MB/s.*data.predownload"),
        ({}, 120e6, {"has_cache_limit": True}, "120.0 MB/s.*data.cache_limit"),
        ({"cpu_waiting": 0.4, "disk_read": 90e6}, 0, {}, "90.0 MB/s.*data.local"),
        ({}, 0, {}, "10%.*data.num_workers"),
    ],
)
def test_the_remedy_suits_the_cause(usage, downloaded, settings, remedy):
    text = explain_waiting(replace(IDLE, **usage), downloaded, replace(LOADER, **settings))
    assert re.search(remedy, text)


def test_usage_between_two_readings():
    before = Counters(
        clock=100.0, cpu_busy=50.0, cpu_waiting=1.0, cpu_total=400.0, disk_read=0,
        memory_total=1000, memory_available=800, worker_seconds={1: 5.0, 2: 7.0, 3: 0.0, 4: 1.0},
    )  # fmt: skip
    after = replace(
        before, clock=110.0, cpu_busy=60.0, cpu_waiting=3.0, cpu_total=440.0, memory_available=400,
        worker_seconds={1: 14.0, 2: 12.0, 3: 0.0, 9: 3.0},
    )  # fmt: skip
    usage = usage_between(before, after, num_workers=2)
    assert usage.cpu == pytest.approx(0.25)
    assert usage.cpu_waiting == pytest.approx(0.05)
    assert usage.memory == pytest.approx(0.6)
    # Worker 3 belongs to the idle validation loader; 4 and 9 are not in both.
    assert usage.workers == pytest.approx(0.7)
    assert usage_between(before, after, num_workers=0).workers is None


def test_counters_of_this_machine_grow():
    before = read_counters()
    total = sum(number * number for number in range(300_000))
    after = read_counters()
    assert total > 0
    assert after.clock > before.clock
    assert after.cpu_total >= before.cpu_total
    assert 0 < after.memory_available < after.memory_total
