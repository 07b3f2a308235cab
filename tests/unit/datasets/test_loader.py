import multiprocessing
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from diffusion.config.data import Crop, ImageSize, Mixing, Representation, Shuffling, StreamConfig, ValidationConfig
from diffusion.datasets.batch import BatchKey, collate, split_batch
from diffusion.datasets.loader import (
    BatchLoader,
    share_of,
    stop_workers,
    train_loader,
    validation_dataset,
    validation_loader,
)
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import ConfigurationError, DataError
from tests.tools.written_data import data_config, smooth_image, tokenize, write_encoded, write_prepared

LATENTS = {"representation": Representation.latents}


def open_loader(local: Path, *names: str, tokenize: Any = tokenize, **options: Any) -> BatchLoader:
    config = data_config(local, *names, **options)
    return train_loader(config, seed=3, tokenize=tokenize)


def addresses(loader: BatchLoader) -> list[list[int]]:
    return [batch[BatchKey.SAMPLE].tolist() for batch in loader]


def test_a_batch_of_images_is_a_dictionary_of_tensors(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"a": 12, "b": 12})
    batch = next(iter(open_loader(root, "a", "b")))
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in batch.items()} == {
        BatchKey.IMAGE: (torch.uint8, (8, 3, 16, 16)),
        BatchKey.PLACEMENT: (torch.int64, (8, 6)),
        BatchKey.TOKEN_IDS: (torch.int64, (8, 5)),
        BatchKey.SAMPLE: (torch.int64, (8,)),
        BatchKey.STREAM: (torch.int64, (8,)),
    }
    index = int(batch[BatchKey.SAMPLE][2]) % 2**40
    np.testing.assert_array_equal(batch[BatchKey.IMAGE][2], ImageTransform.square(16)(smooth_image(index)))
    assert batch[BatchKey.SAMPLE][2] >> 53 == batch[BatchKey.STREAM][2]


def test_a_batch_of_latents_is_a_dictionary_of_tensors(tmp_path: Path) -> None:
    batch = next(iter(open_loader(write_encoded(tmp_path, {"a": 12}), "a", **LATENTS)))
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in batch.items()} == {
        BatchKey.LATENT_MEAN: (torch.float16, (8, 4, 4, 4)),
        BatchKey.LATENT_LOGVAR: (torch.float16, (8, 4, 4, 4)),
        BatchKey.TOKEN_IDS: (torch.int64, (8, 5)),
        BatchKey.SAMPLE: (torch.int64, (8,)),
        BatchKey.STREAM: (torch.int64, (8,)),
    }
    torch.testing.assert_close(batch[BatchKey.LATENT_MEAN][:, 0, 0, 0].long(), batch[BatchKey.SAMPLE])


def test_batches_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"a": 30, "b": 40}, num_captions=2, bad=(7,))
    options = {"crop": Crop.random, "horizontal_flip": 0.5}
    loaders = [open_loader(root, "a", "b", num_workers=num, **options) for num in (0, 2)]
    epochs = [[list(loader) for loader in loaders] for _ in range(2)]
    for alone, with_workers in epochs:
        assert len(alone) == len(with_workers) == len(loaders[0]) == 8  # 70 samples, cut to 64
        for one, other in zip(alone, with_workers, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(epochs[0][0][0][BatchKey.SAMPLE], epochs[1][0][0][BatchKey.SAMPLE])


def test_less_than_a_global_batch_is_refused(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 6})
    with pytest.raises(ConfigurationError, match=r"6 samples.* data\.global_batch_size 8"):
        open_loader(root, "a", **LATENTS)
    assert len(open_loader(root, "a", global_batch_size=4, num_canonical_nodes=16, **LATENTS)) == 1


def test_a_batch_of_one_bucket_and_a_batch_of_groups(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    buckets = [batch[BatchKey.STREAM] for batch in open_loader(root, "a", "b", mixing=Mixing.bucket, **LATENTS)]
    assert all(len(set(streams.tolist())) == 1 for streams in buckets)
    assert sorted(int(streams[0]) for streams in buckets) == [0] * 5 + [1] * 3
    groups = list(open_loader(root, "a", "b", mixing=Mixing.groups, group_size=2, **LATENTS))
    assert len(groups) == 8
    for batch in groups:
        streams = batch[BatchKey.STREAM].view(4, 2)
        assert torch.equal(streams[:, 0], streams[:, 1])
    assert any(len(set(batch[BatchKey.STREAM].tolist())) == 2 for batch in groups)


@pytest.mark.parametrize("mixing", [Mixing.mixed, Mixing.bucket, Mixing.groups])
def test_an_empty_stream_is_refused(tmp_path: Path, mixing: Mixing) -> None:
    root = write_encoded(tmp_path, {"a": 40, "b": 0})
    group_size = 2 if mixing is Mixing.groups else None
    with pytest.raises(DataError, match=r"train/b/index\.json"):
        open_loader(root, "a", "b", mixing=mixing, group_size=group_size, **LATENTS)


def test_samples_of_several_shapes_in_one_batch_or_group_are_refused() -> None:
    samples = [{BatchKey.IMAGE: np.zeros((3, 8, size), np.uint8)} for size in (8, 16)]
    for collate_fn in (collate, partial(collate, group_size=2)):
        with pytest.raises(DataError, match=r"image of the shapes \(3, 8, 8\), \(3, 8, 16\)"):
            collate_fn(samples)


LATENT_SIZES = {"a": (4, 4), "b": (2, 6), "c": (6, 2)}
SIZED_STREAMS = [
    StreamConfig(name=name, resolution=[4 * height, 4 * width]) for name, (height, width) in LATENT_SIZES.items()
]


@pytest.mark.parametrize("representation", list(Representation))
@pytest.mark.parametrize("mixing", [Mixing.bucket, Mixing.groups])
def test_streams_of_several_sizes(tmp_path: Path, representation: Representation, mixing: Mixing) -> None:
    counts = {"a": 40, "b": 26, "c": 19}
    if representation == Representation.images:
        root, key, factor = write_prepared(tmp_path, counts), BatchKey.IMAGE, 4
    else:
        root, key, factor = write_encoded(tmp_path, counts, latents=LATENT_SIZES), BatchKey.LATENT_MEAN, 1
    group_size = 2 if mixing is Mixing.groups else None
    options = {"representation": representation, "mixing": mixing, "group_size": group_size, "streams": SIZED_STREAMS}
    loader = open_loader(root, **options)
    shapes = [(factor * height, factor * width) for height, width in LATENT_SIZES.values()]
    drawn = np.zeros(3, int)
    meetings = 0
    for batch in loader:
        assert isinstance(batch[key], list) == (mixing is Mixing.groups)
        meetings += len(set(batch[BatchKey.STREAM].tolist()))
        for part in split_batch(batch, 2):
            streams, images = part[BatchKey.STREAM], part[key]
            assert streams[0] == streams[1]
            drawn[int(streams[0])] += 2
            assert tuple(images.shape[2:]) == shapes[int(streams[0])]
            for address, pixels in zip(part[BatchKey.SAMPLE].tolist(), images, strict=True):
                number = address % 2**40
                if representation == Representation.images:
                    size = SIZED_STREAMS[int(streams[0])].resolution
                    assert size is not None
                    expected = ImageTransform(size=ImageSize(*size))(smooth_image(number))
                    np.testing.assert_array_equal(pixels, expected)
                else:
                    assert pixels.unique().tolist() == [number]
    assert meetings == len(loader) if mixing is Mixing.bucket else meetings > 2 * len(loader)
    expected = [5 * 8, 3 * 8, 2 * 8] if mixing is Mixing.bucket else counts.values()
    assert all(num <= most for num, most in zip(drawn, expected, strict=True))
    assert drawn.sum() == 8 * len(loader) == {Mixing.bucket: 80, Mixing.groups: 80}[mixing]
    workers = [batch[BatchKey.SAMPLE].tolist() for batch in open_loader(root, **options, num_workers=2)]
    assert workers == addresses(open_loader(root, **options))


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"mixing": Mixing.bucket}, "9 global batches of 8; dropped: 2 of 42 of 'a', 1 of 33 of 'b'"),
        ({"mixing": Mixing.groups, "group_size": 4}, "9 global batches of 8; dropped: 2 of 42 of 'a', 1 of 33 of 'b'"),
        ({"mixing": Mixing.mixed}, "9 global batches of 8; dropped: "),
    ],
    ids=["bucket", "groups", "mixed"],
)
def test_what_an_epoch_drops_is_logged_by_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], dropped: str
) -> None:
    root = write_encoded(tmp_path, {"a": 42, "b": 33})
    with caplog.at_level("INFO"):
        open_loader(root, "a", "b", **LATENTS, **options)
    assert f"an epoch has {dropped}" in caplog.text


def test_samples_that_never_come_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_encoded(tmp_path, {"a": 42})
    with caplog.at_level("WARNING"):
        open_loader(root, "a", **LATENTS)
        assert "dropped" not in caplog.text
        loader = open_loader(root, "a", **LATENTS, shuffle=Shuffling.none)
    assert "dropped: 2 of 42 of 'a'" in caplog.text
    assert len({tuple(chain.from_iterable(addresses(loader))) for _ in range(3)}) == 1


def test_a_resumption_in_another_order_is_refused(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    streams = [StreamConfig(name="a"), StreamConfig(name="b")]
    loader = open_loader(root, streams=streams, **LATENTS)
    state = loader.dataset.state_dict(16, from_beginning=True)  # pyright: ignore[reportAttributeAccessIssue]
    expected = addresses(loader)

    def resumed(**options: Any) -> list[list[int]]:
        other = open_loader(root, **({"streams": streams} | LATENTS | options))
        other.dataset.load_state_dict(state | {"epoch": 0})  # pyright: ignore[reportAttributeAccessIssue]
        return addresses(other)

    assert resumed() == resumed(num_workers=2) == expected[2:]
    for options, message in [
        ({"global_batch_size": 16}, r"data.global_batch_size \(was 8, is 16\)"),
        ({"num_canonical_nodes": 8}, r"data.num_canonical_nodes \(was 4, is 8\)"),
        ({"shuffle": Shuffling.block}, r"data.shuffle \(was shard, is block of 262144\)"),
        ({"shuffle": Shuffling.none}, r"data.shuffle \(was shard, is none\)"),
        ({"mixing": Mixing.bucket}, r"data.mixing \(was mixed, is bucket\)"),
        ({"streams": [streams[0], StreamConfig(name="b", repeat=2.0)]}, r"proportion and repeat of data.streams"),
        ({"streams": streams[:1]}, r"number of data.streams \(was 2, is 1\)"),
        ({"streams": streams[::-1]}, r"shards of data.streams"),
    ]:
        with pytest.raises(DataError, match=message):
            resumed(**options)
    state["sample_in_epoch"] = 12
    with pytest.raises(DataError, match="sample 12 of an epoch"):
        resumed()


def test_an_error_in_a_worker_arrives_without_its_traceback(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"a": 40}, bad=tuple(range(0, 40, 2)))
    with pytest.raises(DataError) as caught:
        addresses(open_loader(root, "a", num_workers=1))
    assert "images cannot be decoded" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_worker_that_gives_nothing_ends_the_run(tmp_path: Path) -> None:
    def never(captions: list[str]) -> np.ndarray:
        time.sleep(4)
        return tokenize(captions)

    root = write_prepared(tmp_path, {"a": 8})
    loader = open_loader(root, "a", tokenize=never, num_workers=1, loader_timeout=1.0)
    with pytest.raises(DataError, match=r"1 s.* data\.loader_timeout"):
        addresses(loader)


def test_stopped_workers_have_ended_and_another_pass_starts_new_ones() -> None:
    loader = BatchLoader([1, 2], num_workers=2, persistent_workers=True)  # pyright: ignore[reportArgumentType]
    before = {*multiprocessing.active_children()}
    assert [int(one) for one in loader] == [1, 2]
    assert len({*multiprocessing.active_children()} - before) == 2
    stop_workers(loader)
    assert not {*multiprocessing.active_children()} - before
    assert [int(one) for one in loader] == [1, 2]
    stop_workers(loader)


def test_validation_data_is_read_in_order_without_dropping_or_drawing(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"a": 7, "b": 6}, num_captions=3)
    data = data_config(root, "a", "b", crop=Crop.random, horizontal_flip=1.0)
    config = ValidationConfig(local=str(root), device_batch_size=4)
    dataset = validation_dataset(config, data, tokenize=tokenize)
    assert len(dataset) == 13
    batches = list(validation_loader(dataset, config, data))
    assert [len(batch[BatchKey.SAMPLE]) for batch in batches] == [4, 3, 4, 2]
    assert all(batch[BatchKey.IS_COUNTED].all() for batch in batches)
    samples = torch.cat([batch[BatchKey.SAMPLE] for batch in batches]).tolist()
    assert samples == [*range(7), *((1 << 53) + i for i in range(6))]
    images = torch.cat([batch[BatchKey.IMAGE] for batch in batches])
    expected = np.stack([ImageTransform.square(16)(smooth_image(i)) for i in [*range(7), *range(6)]])
    np.testing.assert_array_equal(images, expected)
    ids = torch.cat([batch[BatchKey.TOKEN_IDS] for batch in batches])
    np.testing.assert_array_equal(ids, tokenize([f"{i} a 0" for i in range(7)] + [f"{i} b 0" for i in range(6)]))


def test_validation_data_of_each_rank_with_workers_and_a_remote(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 30, "b": 9})
    data = data_config(root, "a", num_workers=2, **LATENTS)
    config = ValidationConfig(
        remote=str(root), local=str(tmp_path / "cache"), streams=[StreamConfig(name="b"), StreamConfig(name="a")],
        num_samples=20, device_batch_size=4,
    )  # fmt: skip
    dataset = validation_dataset(config, data, tokenize=None)
    assert len(dataset) == 20
    assert dataset.parts == [range(5), range(5, 20)]  # in proportion to 9 and 30
    read = []
    sizes = []
    for rank in range(2):
        loader = validation_loader(dataset, config, data, rank=rank, num_ranks=2)
        batches = [*loader, *loader]
        sizes.append([len(batch[BatchKey.SAMPLE]) for batch in batches])
        for batch in batches:
            assert torch.equal(batch[BatchKey.LATENT_MEAN][:, 0, 0, 0].long(), batch[BatchKey.SAMPLE] % 2**40)
            assert len(batch[BatchKey.STREAM].unique()) == 1
            read += batch[BatchKey.SAMPLE][batch[BatchKey.IS_COUNTED]].tolist()
    assert sizes == [[3, 4, 4] * 2] * 2
    assert sorted(read) == sorted(2 * [*range(5), *((1 << 53) + i for i in range(15))])
    with pytest.raises(IndexError, match="20 of 20"):
        dataset[20]


@pytest.mark.parametrize("num", range(1, 9))
def test_ranks_get_equal_shares_of_validation_data(num: int) -> None:
    for num_ranks in (1, 2, 3, 5):
        shares = [share_of(range(100, 100 + num), num_ranks, rank) for rank in range(num_ranks)]
        assert len({len(share) for share in shares}) == 1
        counted = [index for share in shares for index in share if index >= 0]
        assert sorted(counted) == list(range(100, 100 + num))
        assert {index for share in shares for index in share if index < 0} <= {~(100 + num - 1)}


def test_validation_data_of_several_sizes(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"a": 7, "b": 5, "c": 6})
    data = data_config(root, streams=SIZED_STREAMS, mixing=Mixing.bucket)
    config = ValidationConfig(local=str(root), device_batch_size=4)
    dataset = validation_dataset(config, data, tokenize=tokenize)
    batches = list(validation_loader(dataset, config, data))
    assert [tuple(batch[BatchKey.IMAGE].shape) for batch in batches] == [
        (4, 3, 16, 16), (3, 3, 16, 16), (4, 3, 8, 24), (1, 3, 8, 24), (4, 3, 24, 8), (2, 3, 24, 8),
    ]  # fmt: skip


def test_validation_data_has_an_identity(tmp_path: Path) -> None:
    def identity(folder: str, num_captions: int) -> str:
        root = write_prepared(tmp_path / folder, {"a": 7, "b": 6}, num_captions)
        config = ValidationConfig(local=str(root))
        return validation_dataset(config, data_config(root, "a", "b"), tokenize=tokenize).identity()

    assert identity("one", 1) == identity("copy", 1) != identity("other", 2)


def test_validation_data_that_is_missing(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"a": 8})
    config = ValidationConfig(local=str(tmp_path / "validation"))
    with pytest.raises(DataError, match=r"validation/a \(stream 'a'\)"):
        validation_dataset(config, data_config(root, "a"), tokenize=tokenize)


def test_a_plain_loader_reads_by_numbers(tmp_path: Path) -> None:
    dataset: Any = open_loader(write_encoded(tmp_path, {"a": 12}), "a", tokenize=None, **LATENTS).dataset
    batches = list(DataLoader(dataset, 4))
    assert torch.cat([batch[BatchKey.SAMPLE] for batch in batches]).tolist() == [
        one[BatchKey.SAMPLE] for one in dataset
    ]
    assert dataset[-1][BatchKey.SAMPLE] == dataset[11][BatchKey.SAMPLE]
    with pytest.raises(IndexError):
        dataset[-13]


def test_images_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tokenize"):
        open_loader(write_prepared(tmp_path, {"a": 12}), "a", tokenize=None)
