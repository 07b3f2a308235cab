import hashlib
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from diffusion.config.data import Mixing, StreamConfig, legal_world_sizes
from diffusion.datasets.balanced import BalancedSequence, floor_sum, permutation
from diffusion.datasets.sample_order import (
    NUM_INDEX_BITS,
    NUM_OCCURRENCE_BITS,
    EpochOrder,
    GlobalOrder,
    OrderSettings,
    RankOrder,
    Slots,
    StreamShape,
    stream_shapes,
)
from diffusion.errors import ConfigurationError

WORLDS = [1, 2, 4, 8, 16, 32, 64, 128]
MIXINGS = [
    {"mixing": Mixing.mixed},
    {"mixing": Mixing.bucket},
    {"mixing": Mixing.groups, "group_size": 2},
]


def rank_slots(order: EpochOrder, step: int, *, rank: int, num_ranks: int) -> Slots:
    """Samples of one rank in one step, in slot order: arrays [B / num_ranks]."""
    mine = order.whole.rank_range(rank, num_ranks)
    return Slots(*(array[0] for array in order.slots(step, step + 1, mine.start, mine.stop)))


def shape(name: str, num_samples: int, shard: int, draws: int | None = None) -> StreamShape:
    """A stream with shards of one size and a smaller last one."""
    sizes = [shard] * (num_samples // shard) + ([num_samples % shard] if num_samples % shard else [])
    return StreamShape(
        name=name, samples_per_shard=np.array(sizes, np.int64), draws=num_samples if draws is None else draws
    )


def make(*streams: StreamShape, seed: int = 3, **options: Any) -> GlobalOrder:
    defaults = {"global_batch_size": 256, "num_canonical_nodes": 128, "shuffle_block_size": None}
    return GlobalOrder(streams, OrderSettings(seed=seed, **(defaults | options)))


def three(**options: Any) -> GlobalOrder:
    """Three streams, one of them seen 2.5 times and one 0.4 times."""
    return make(shape("a", 5000, 100), shape("b", 900, 64, 2250), shape("c", 4000, 333, 1600), **options)


def whole(epoch: EpochOrder) -> Slots:
    return epoch.slots(0, epoch.num_steps)


def flat(slots: Slots) -> list[tuple[int, int, int]]:
    return list(zip(*(array.ravel().tolist() for array in slots), strict=True))


# What the order is made of


def test_floor_sum_and_counts_of_a_balanced_sequence_against_loops():
    rng = np.random.default_rng(0)
    for _ in range(200):
        m = int(rng.integers(1, 1000))
        n, a, b = int(rng.integers(0, 500)), int(rng.integers(0, m)), int(rng.integers(0, 2 * m))
        assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))
    big = 2**31 - 1
    assert floor_sum(big, big, big - 1, 5) == sum_exactly(big, big, big - 1, 5) - 2**64 * (
        sum_exactly(big, big, big - 1, 5) >= 2**63
    )
    sequence = BalancedSequence(np.array([50, 0, 7, 43]), offset=11)
    for stride, phase, num in [(1, 0, 100), (1, 0, 0), (4, 3, 25), (10, 9, 10), (1, 0, 250)]:
        labels = sequence.labels(0, num, stride=stride, phase=phase)
        counts = np.diff(sequence.cumulative(num, stride=stride, phase=phase))
        np.testing.assert_array_equal(counts, np.bincount(labels, minlength=4))
        np.testing.assert_array_equal(sequence.labels(num // 3, num, stride=stride, phase=phase), labels[num // 3 :])


def sum_exactly(n: int, m: int, a: int, b: int) -> int:
    total = 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        if a * n + b < m:
            return total
        n, b, m, a = (a * n + b) // m, (a * n + b) % m, a, m


def test_a_balanced_sequence_keeps_the_proportions_in_each_stretch():
    counts = np.array([700, 250, 50])
    labels = BalancedSequence(counts, offset=123).labels(0, 1000)
    np.testing.assert_array_equal(np.bincount(labels), counts)
    cumulative = np.cumsum(labels[:, None] == np.arange(3), axis=0)
    for width in (20, 100, 400):
        inside = cumulative[width:] - cumulative[:-width]
        assert np.abs(inside - width * counts / 1000).max() < 4


def test_permutations_are_uniform_and_depend_on_the_address_alone():
    drawn = Counter(tuple(permutation(4, (1, 2), (3, 4, i)).tolist()) for i in range(4800))
    assert len(drawn) == 24
    assert sum((count - 200) ** 2 / 200 for count in drawn.values()) < 50  # chi square, 23 degrees of freedom, p < 1e-3
    assert sorted(permutation(1000, (5, 6), (7, 8, 9)).tolist()) == list(range(1000))
    assert permutation(0, (1, 2), (3, 4, 5)).tolist() == []
    assert permutation(6, (1, 2), (3, 4, 5)).tolist() == [3, 4, 2, 0, 5, 1]  # the same in every version of numpy


# The promise


@pytest.mark.parametrize("options", MIXINGS, ids=lambda options: options["mixing"].value)
def test_global_batches_are_the_same_in_every_world_and_from_any_step(options: dict[str, Any]):
    order = three(**options)
    expected = whole(order.epoch(5)).addresses()
    steps, size = expected.shape
    for world in WORLDS:
        if world not in legal_world_sizes(size, order.settings.unit_size):
            continue
        for step in (0, steps // 2, steps - 1):
            fresh = order.epoch(5)
            ranks = [rank_slots(fresh, step, rank=rank, num_ranks=world).addresses() for rank in range(world)]
            assert {len(rank) for rank in ranks} == {size // world}
            np.testing.assert_array_equal(np.concatenate(ranks), expected[step])


@pytest.mark.parametrize("options", MIXINGS, ids=lambda options: options["mixing"].value)
def test_a_rank_finds_its_samples_at_any_step_of_any_epoch(options: dict[str, Any]):
    order = three(**options)
    epochs = [whole(order.epoch(epoch)).addresses() for epoch in range(3)]
    for world in (1, 4):
        share = 256 // world
        for rank in {0, world - 1}:
            samples = RankOrder(order, rank=rank, num_ranks=world)
            last = order.num_steps - 1
            # Forward, into the next epoch and back, and far away: as a loader worker and what it fetches ahead.
            for epoch, step in [(0, 0), (0, 7), (0, last), (1, 0), (0, last), (2, 3), (0, 1), (2, last), (1, 2)]:
                expected = epochs[epoch][step, rank * share : (rank + 1) * share]
                np.testing.assert_array_equal(samples.slots(epoch, step).addresses(), expected)


def test_threads_of_a_rank_may_read_at_once():
    order = make(shape("a", 60_000, 1000), global_batch_size=64, num_canonical_nodes=8)
    samples = RankOrder(order, rank=0, num_ranks=1)
    expected = whole(order.epoch(0)).addresses()
    places = np.random.default_rng(0).integers(order.num_steps, size=(4, 300)).tolist()
    with ThreadPoolExecutor(4) as pool:
        read = pool.map(lambda steps: [samples.slots(0, step).addresses() for step in steps], places)
        for steps, found in zip(places, read, strict=True):
            np.testing.assert_array_equal(np.stack(found), expected[steps])


def test_a_world_that_does_not_divide_the_canonical_nodes_still_gets_the_same_batches():
    order = make(shape("a", 5000, 100), shape("b", 900, 64), global_batch_size=96, num_canonical_nodes=64)
    assert order.num_lanes == 32
    expected = order.epoch(0).slots(3, 4).addresses()[0]
    for world in (3, 6, 12, 24, 48, 96):
        ranks = [rank_slots(order.epoch(0), 3, rank=rank, num_ranks=world).addresses() for rank in range(world)]
        np.testing.assert_array_equal(np.concatenate(ranks), expected)


def test_the_order_does_not_change_unnoticed():
    """Another hash is another order for every run that goes on: raise ORDER_VERSION with it."""
    orders = [three(shuffle_block_size=block, **options) for options in MIXINGS for block in (None, 64)]
    orders.append(three(num_canonical_nodes=2))
    hashes = [hashlib.sha256(whole(order.epoch(1)).addresses().tobytes()).hexdigest()[:8] for order in orders]
    assert hashes == GOLDEN


GOLDEN = ["214f0c44", "1ccff285", "f6eb02b2", "9651a002", "89efa1ed", "f11a4613", "6de417a9"]


# How often


@pytest.mark.parametrize("options", MIXINGS, ids=lambda options: options["mixing"].value)
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_comes_as_often_as_its_stream_says(options: dict[str, Any], block: int | None, shuffle: bool):
    order = three(**options, shuffle_block_size=block, shuffle=shuffle)
    epoch = order.epoch(1)
    slots = whole(epoch)
    assert slots.stream.shape == (order.num_steps, 256)
    addresses = slots.addresses().ravel()
    assert len(np.unique(addresses)) == len(addresses)
    assert len(addresses) + sum(epoch.dropped) == 5000 + 2250 + 1600
    smallest = {Mixing.mixed: 1, Mixing.groups: 2, Mixing.bucket: 256}[options["mixing"]]
    for stream, shape_ in enumerate(order.streams):
        chosen = slots.stream == stream
        index, occurrence = slots.index[chosen], slots.occurrence[chosen]
        drawn = shape_.draws - epoch.dropped[stream]
        assert drawn == chosen.sum()
        assert 0 <= epoch.dropped[stream] < 256 + smallest
        counts = np.bincount(index, minlength=shape_.num_samples)
        low, high = drawn // shape_.num_samples, -(-drawn // shape_.num_samples)
        assert {low, high} >= set(counts.tolist())
        # The occurrences of a sample that comes n times are 0 ... n - 1.
        assert (
            np.bincount(index, weights=occurrence, minlength=len(counts)).tolist()
            == (counts * (counts - 1) / 2).tolist()
        )
        assert occurrence.max() == high - 1


def test_empty_shards_are_passed_over():
    stream = StreamShape(name="a", samples_per_shard=np.array([5, 0, 5, 5, 5, 0]), draws=20)
    for seed in range(50):
        order = make(stream, seed=seed, global_batch_size=4, num_canonical_nodes=1)
        assert sorted(whole(order.epoch(0)).index.ravel()) == list(range(20))
        assert sum(order.epoch(0).streams[0].pieces(0).num_samples) == 20


def test_an_occurrence_is_how_often_the_sample_came_before():
    order = make(shape("a", 2560, 40, 10240), shape("b", 5120, 64), global_batch_size=64, num_canonical_nodes=8)
    seen: Counter[tuple[int, int]] = Counter()
    wrong = 0
    for stream, index, occurrence in flat(whole(order.epoch(0))):
        wrong += seen[stream, index] != occurrence
        seen[stream, index] += 1
    assert wrong == 0


@pytest.mark.parametrize(
    ("sizes", "key", "values", "draws"),
    [
        ([40, 24], "repeat", [None, None], [40, 24]),
        ([40, 24], "proportion", [0.5, 0.5], [32, 32]),
        ([40, 24], "repeat", [0.25, 2.5], [10, 60]),
        ([10, 10, 10], "proportion", [1, 1, 1e-9], [15, 15, 0]),
        ([101, 57, 3], "proportion", [0.3, 0.3, 0.4], [48, 49, 64]),
    ],
)
def test_draws_by_proportion_and_repeat(sizes: list[int], key: str, values: list[float | None], draws: list[int]):
    streams = [StreamConfig(name="a", **cast("Any", {key: value})) for value in values]
    assert [one.draws for one in stream_shapes(streams, [np.array([size]) for size in sizes])] == draws


def test_tiny_streams_that_are_repeated_a_thousand_times():
    order = make(shape("a", 20_000, 500), shape("b", 5, 2, 5000), shape("c", 1, 1, 1000))
    epoch = order.epoch(0)
    slots = whole(epoch)
    for stream, times in ((1, 1000), (2, 1000)):
        chosen = slots.stream == stream
        counts = np.bincount(slots.index[chosen])
        assert counts.min() >= times - 50 and counts.max() <= times and counts.max() - counts.min() <= 1
    assert len(np.unique(slots.addresses())) == slots.stream.size
    per_step = (slots.stream == 2).sum(axis=1)
    assert abs(per_step - 256 / 26).max() < 4


# Mixing


def test_every_batch_holds_the_streams_in_their_proportions():
    order = make(shape("a", 50_000, 500), shape("b", 25_000, 500), shape("c", 2500, 100))
    slots = whole(order.epoch(0))
    for stream, share in enumerate((50 / 77.5, 25 / 77.5, 2.5 / 77.5)):
        assert np.abs((slots.stream == stream).sum(axis=1) - 256 * share).max() <= 3


def test_a_bucket_batch_holds_one_stream():
    order = three(mixing=Mixing.bucket)
    slots = whole(order.epoch(0))
    assert (slots.stream == slots.stream[:, :1]).all()
    assert np.bincount(slots.stream[:, 0]).tolist() == [5000 // 256, 2250 // 256, 1600 // 256]
    assert order.epoch(0).dropped == [5000 % 256, 2250 % 256, 1600 % 256]


@pytest.mark.parametrize("group_size", [1, 4, 32, 256])
def test_groups_hold_one_stream_and_ranks_whole_groups(group_size: int):
    order = make(
        shape("a", 5000, 100), shape("b", 900, 64), mixing=Mixing.groups, group_size=group_size, num_canonical_nodes=16
    )
    slots = whole(order.epoch(0))
    groups = slots.stream.reshape(-1, group_size)
    assert (groups == groups[:, :1]).all()
    legal = legal_world_sizes(256, group_size)
    assert legal == [2**i for i in range(9) if 2**i <= 256 // group_size]
    for world in legal:
        share = rank_slots(order.epoch(0), 0, rank=world - 1, num_ranks=world).stream
        assert len(share) % group_size == 0
    if group_size > 1:
        with pytest.raises(ConfigurationError, match=rf"512 ranks .* Legal numbers of ranks are {legal[0]}"):
            rank_slots(order.epoch(0), 0, rank=0, num_ranks=512)


# Mistakes


def test_what_cannot_be():
    with pytest.raises(ConfigurationError, match=r"the streams give 200 samples an epoch, less than .* 256"):
        make(shape("a", 200, 10))
    with pytest.raises(ConfigurationError, match=r"'b' \(100 samples\) .*less than one global batch of 256"):
        make(shape("a", 2000, 10), shape("b", 100, 10), mixing=Mixing.bucket)
    with pytest.raises(ConfigurationError, match=r"less than one group of 16"):
        make(shape("a", 2000, 10), shape("b", 10, 10), mixing=Mixing.groups, group_size=16)
    with pytest.raises(ConfigurationError, match=r"'b' \(0 samples\) gives 0 samples"):
        make(shape("a", 2000, 10), StreamShape(name="b", samples_per_shard=np.zeros(0, np.int64), draws=0))
    with pytest.raises(ConfigurationError, match=r"group_size is 24, which does not divide .* 256"):
        make(shape("a", 2000, 10), mixing=Mixing.groups, group_size=24)
    with pytest.raises(ConfigurationError, match=r"data.mixing is groups: give their size"):
        make(shape("a", 2000, 10), mixing=Mixing.groups)
    with pytest.raises(ConfigurationError, match=r"each more than 8192 times"):
        make(shape("a", 2000, 10), shape("b", 1, 1, 8193))
    with pytest.raises(ConfigurationError, match=r"an epoch has at most 2147483647"):
        make(shape("a", 2**31, 2**20))
    with pytest.raises(ConfigurationError, match=r"3 ranks cannot share the 256 samples .* 1, 2, 4, 8"):
        rank_slots(three().epoch(0), 0, rank=0, num_ranks=3)


def test_the_fingerprint_names_what_changes():
    here = three().fingerprint()
    for other, name in [
        (three(seed=4), "seed"),
        (three(global_batch_size=128), "data.global_batch_size"),
        (three(num_canonical_nodes=64), "data.num_canonical_nodes"),
        (three(shuffle=False), "data.shuffle"),
        (three(mixing=Mixing.bucket), "data.mixing"),
    ]:
        there = other.fingerprint()
        assert [key for key in here if here[key] != there[key]] == [name]
    shards = make(shape("a", 5000, 50), shape("b", 900, 64, 2250), shape("c", 4000, 333, 1600)).fingerprint()
    assert [key for key in here if here[key] != shards[key]] == ["shards of data.streams"]


# The shuffle


def test_epochs_and_seeds_give_other_orders_of_the_same_samples():
    first, second, other = (
        whole(order.epoch(epoch)).addresses().ravel()
        for order, epoch in ((three(), 0), (three(), 1), (three(seed=4), 0))
    )
    assert (first == second).mean() < 0.1  # a lane holds 7 samples of the second stream
    assert (first == other).mean() < 0.1
    assert len(np.intersect1d(first, second)) > 0.7 * len(first)


def test_a_lane_reads_the_same_shards_in_every_epoch():
    order = make(shape("a", 50_000, 100), shape("b", 30_000, 100), num_canonical_nodes=16)
    for stream in (0, 1):
        shards = [set(order.epoch(epoch).streams[stream].pieces(7).shard.tolist()) for epoch in range(4)]
        assert len(set.union(*shards)) <= len(set.intersection(*shards)) + 2


@pytest.mark.parametrize("block", [None, 400])
def test_the_shuffle_is_uniform(block: int | None):
    """Correlation of index and place, and where the first sample goes over many epochs."""
    order = make(shape("a", 2000, 100), global_batch_size=16, num_canonical_nodes=4, shuffle_block_size=block)
    places = np.empty((300, 2000), np.int64)
    for epoch in range(300):
        places[epoch, whole(order.epoch(epoch)).index.ravel()] = np.arange(2000)
    # Each sample visits its lane's places evenly: the mean over epochs is within 5 standard errors of the middle; with
    # blocks, whose input is whole shards in their order, within half a shard more.
    error = 2000 / 12**0.5 / 300**0.5
    assert np.abs(places.mean(axis=0) - 999.5).max() < 5 * error + (200 if block else 0)
    assert abs(places.std() / (2000 / 12**0.5) - 1) < 0.01
    # Two samples of one shard that lie side by side are as far apart as any two of it, where a cut or the end of a
    # block has not come between those.
    near = np.abs(places[:, 0:2000:100] - places[:, 1:2000:100])
    far = np.abs(places[:, 0:2000:100] - places[:, 51:2000:100])
    assert abs(np.median(near) / np.median(far) - 1) < 0.3


# Locality, speed and memory


@pytest.mark.parametrize("block", [None, 1000])
def test_lanes_do_not_begin_their_shards_at_the_same_time(block: int | None):
    order = make(shape("a", 128 * 10_000, 1000), global_batch_size=1024, shuffle_block_size=block)
    ends = [int(order.epoch(0).streams[0].pieces(lane).last[0]) for lane in range(128)]
    assert len(set(ends)) > 100
    assert max(ends) - min(ends) > 900


@pytest.mark.parametrize("block", [None, 2000])
def test_a_node_fetches_little_more_than_its_share_of_the_shards(block: int | None):
    order = make(shape("a", 600_000, 1000), shape("b", 200_000, 500), shape("c", 60_000, 1000),
                 global_batch_size=2048, shuffle_block_size=block)  # fmt: skip
    slots = whole(order.epoch(0))
    starts = [np.cumsum(stream.samples_per_shard) for stream in order.streams]
    fetched = 0
    for node in np.split(np.arange(2048), 16):
        for stream, ends in enumerate(starts):
            chosen = slots.stream[:, node] == stream
            fetched += len(np.unique(np.searchsorted(ends, slots.index[:, node][chosen], side="right")))
    assert fetched / sum(len(ends) for ends in starts) < 1.07
    # The pieces say the same, and the shards are needed for a short time only.
    epoch = order.epoch(0)
    for stream in range(3):
        pieces = epoch.streams[stream].pieces(5)
        assert pieces.num_samples.sum() >= epoch.streams[stream].ends[-1, 5] > 0
        assert (pieces.last > pieces.first).all()
        width = 1000 if block is None else 2000
        assert (pieces.last - pieces.first).max() <= 3 * width


def test_any_step_of_twenty_million_samples_is_there_at_once():
    tracemalloc.start()
    began = time.process_time()
    order = make(shape("a", 14_000_000, 8000), shape("b", 6_000_000, 8000), global_batch_size=2048,
                 shuffle_block_size=2**16)  # fmt: skip
    epoch = order.epoch(3)
    whole_step = epoch.slots(order.num_steps // 2, order.num_steps // 2 + 1)
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert whole_step.stream.shape == (1, 2048)
    assert peak < 150e6  # one block per lane and stream: 8.4M samples of 8 bytes
    assert seconds < 8
    address = rank_slots(order.epoch(3), order.num_steps // 2, rank=5, num_ranks=128).addresses()
    np.testing.assert_array_equal(address, whole_step.addresses()[0, 80:96])
    assert address.max() >> (NUM_INDEX_BITS + NUM_OCCURRENCE_BITS) <= 1
