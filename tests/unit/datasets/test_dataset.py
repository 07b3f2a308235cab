from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffusion.config.data import Crop, Mixing, Representation, StreamConfig
from diffusion.datasets.bad_images import MAX_BAD_IMAGES
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.dataset import TrainingDataset
from diffusion.datasets.loader import BatchLoader, train_loader
from diffusion.datasets.sample_order import NUM_INDEX_BITS, NUM_OCCURRENCE_BITS, sample_address
from diffusion.datasets.streams import check_location, locate_streams
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import DataError
from diffusion.formats.shards import SampleDecoder, ShardFiles, read_index, write_index
from diffusion.randomness import Purpose, random_word
from tests.tools.written_data import (
    PREPARED,
    data_config,
    prepared_sample,
    smooth_image,
    tokenize,
    write_encoded,
    write_mds,
    write_prepared,
)

LATENTS: dict[str, Any] = {"representation": Representation.latents}


def open_loader(local: Path, *names: str, with_logvar: bool = True, **options: Any) -> BatchLoader:
    config = data_config(local, *names, **options)
    return train_loader(config, seed=3, tokenize=tokenize, with_logvar=with_logvar)


def open_data(*arguments: Any, **options: Any) -> TrainingDataset:
    dataset = open_loader(*arguments, **options).dataset
    assert isinstance(dataset, TrainingDataset)
    return dataset


def addresses_of(loader: BatchLoader) -> list[int]:
    return [address for batch in loader for address in batch[BatchKey.SAMPLE].tolist()]


def split_address(address: int) -> tuple[int, int]:
    """Stream and index of an address whose occurrence is 0."""
    assert (address >> NUM_INDEX_BITS) % 2**NUM_OCCURRENCE_BITS == 0
    return address >> (NUM_INDEX_BITS + NUM_OCCURRENCE_BITS), address % 2**NUM_INDEX_BITS


def test_a_sample_of_images(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"16-32": 10, "32-64": 12})
    sample = open_data(root, "16-32", "32-64")[10 + 4]
    assert split_address(sample[BatchKey.SAMPLE]) == (1, 4)
    assert sample[BatchKey.STREAM] == 1
    np.testing.assert_array_equal(sample[BatchKey.IMAGE], ImageTransform.square(16)(smooth_image(4)))
    assert sample[BatchKey.TOKEN_IDS].dtype == np.int64
    np.testing.assert_array_equal(sample[BatchKey.TOKEN_IDS], tokenize(["4 32-64 0"])[0])
    assert set(sample) == {BatchKey.SAMPLE, BatchKey.STREAM, BatchKey.IMAGE, BatchKey.PLACEMENT, BatchKey.TOKEN_IDS}
    assert sample[BatchKey.PLACEMENT].tolist() == [32, 40, 0, 2, 16, 16]


def test_a_sample_of_latents(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"16-32": 10, "32-64": 12})
    sample = open_data(root, "16-32", "32-64", **LATENTS)[10 + 4]
    assert split_address(sample[BatchKey.SAMPLE]) == (1, 4)
    np.testing.assert_array_equal(sample[BatchKey.LATENT_MEAN], np.full((4, 4, 4), 4, np.float16))
    np.testing.assert_array_equal(sample[BatchKey.LATENT_LOGVAR], np.full((4, 4, 4), -4, np.float16))
    np.testing.assert_array_equal(sample[BatchKey.TOKEN_IDS], tokenize(["4 32-64 0"])[0])
    assert BatchKey.LATENT_LOGVAR not in open_data(root, "16-32", with_logvar=False, **LATENTS)[0]


def test_the_caption_is_drawn_by_epoch_and_sample_alike_for_images_and_latents(tmp_path: Path) -> None:
    from_images = open_data(write_prepared(tmp_path / "a", {"b": 60}, num_captions=3), "b")
    from_latents = open_data(write_encoded(tmp_path / "b", {"b": 60}, num_captions=3), "b", **LATENTS)
    chosen = []
    for epoch in (0, 1):
        for i in range(60):
            expected = random_word(3, Purpose.CAPTION_CHOICE, epoch, i) * 3 >> 32
            for dataset in (from_images, from_latents):
                np.testing.assert_array_equal(
                    dataset.read(0, i, epoch=epoch)[BatchKey.TOKEN_IDS],
                    tokenize([f"{i} b {k}" for k in range(3)])[expected],
                )
            chosen.append(expected)
    assert set(chosen) == {0, 1, 2}
    assert chosen[:60] != chosen[60:]


def chosen_captions(dataset: TrainingDataset, num_samples: int, num_epochs: int) -> list[int]:
    """Numbers of the captions that are drawn, which end their texts."""
    texts: list[str] = []

    def note(captions: list[str]) -> np.ndarray:
        texts.extend(captions)
        return tokenize(captions)

    dataset.tokenize = note
    for epoch in range(num_epochs):
        for i in range(num_samples):
            dataset.read(0, i, epoch=epoch)
    return [int(text.split()[-1]) for text in texts]


def test_captions_are_drawn_by_their_weights(tmp_path: Path) -> None:
    root = write_prepared(tmp_path / "several", {"b": 60}, num_captions=3)
    drawn = {}
    for weights in ((1, 1, 1), (1, 0, 4), (1, 3), (0.5, 0.5, 0.5)):
        drawn[weights] = chosen_captions(open_data(root, "b", caption_weights=weights), 60, 10)
        for k, weight in enumerate((*weights, 0)[:3]):
            share = weight / sum(weights)
            spread = 4 * (share * (1 - share) / 600) ** 0.5
            assert abs(drawn[weights].count(k) / 600 - share) <= spread
    assert drawn[1, 1, 1] == drawn[0.5, 0.5, 0.5] == chosen_captions(open_data(root, "b"), 60, 10)
    assert chosen_captions(open_data(root, "b", caption_weights=(5e-324, 0)), 60, 10) == [0] * 600
    root = write_prepared(tmp_path / "one", {"b": 16})
    assert chosen_captions(open_data(root, "b", caption_weights=(1, 4)), 16, 1) == [0] * 16


def test_crop_and_flip_are_addressed_by_epoch_and_sample(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"b": 10})
    dataset = open_data(root, "b", crop=Crop.random, horizontal_flip=0.5)
    transform = ImageTransform.square(16, crop=Crop.random, horizontal_flip=0.5, seed=3)
    for epoch in (0, 5):
        for i in range(10):
            expected = transform(smooth_image(i), epoch=epoch, sample=i)
            np.testing.assert_array_equal(dataset.read(0, i, epoch=epoch)[BatchKey.IMAGE], expected)


def test_an_undecodable_image_is_replaced_by_the_next_of_its_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_prepared(tmp_path, {"a": 8, "b": 10}, bad=(6, 7))
    dataset = open_data(root, "a", "b", crop=Crop.random)
    transform = ImageTransform.square(16, crop=Crop.random, seed=3)
    for slot, address, number, name in [(6, 6, 0, "a"), (8 + 6, (1 << 53) + 6, 8, "b")]:
        sample = dataset[slot]
        assert sample[BatchKey.SAMPLE] == address
        np.testing.assert_array_equal(sample[BatchKey.IMAGE], transform(smooth_image(number), sample=address))
        np.testing.assert_array_equal(sample[BatchKey.TOKEN_IDS], tokenize([f"{number} {name} 0"])[0])
    assert dataset.bad_images.num_bad == 4
    assert "stream 'b', key 'b/7'" in caplog.text


def test_too_many_undecodable_images_end_the_run(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"b": 30}, bad=tuple(range(0, 22, 2)))
    dataset = open_data(root, "b")
    for _ in range(2):  # Each counts once.
        for number in range(MAX_BAD_IMAGES):
            assert dataset[2 * number][BatchKey.SAMPLE] == 2 * number
    with pytest.raises(DataError, match="key 'b/20'"):
        dataset[20]


def test_a_stream_without_any_decodable_image(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"b": 8}, bad=tuple(range(8)))
    with pytest.raises(DataError, match="no image of the stream 'b' can be decoded"):
        open_data(root, "b")[2]


def test_each_sample_comes_once_unless_proportions_and_repeats_change_the_mix(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    once = [split_address(address) for address in addresses_of(open_loader(root, "a", "b", **LATENTS))]
    assert sorted(once) == [(0, i) for i in range(40)] + [(1, i) for i in range(24)]
    halves = [StreamConfig(name="a", proportion=0.5), StreamConfig(name="b", proportion=0.5)]
    numbers = [address >> 53 for address in addresses_of(open_loader(root, streams=halves, **LATENTS))]
    assert (numbers.count(0), numbers.count(1)) == (32, 32)
    repeated = [StreamConfig(name="a"), StreamConfig(name="b", repeat=2.0)]
    addresses = addresses_of(open_loader(root, streams=repeated, **LATENTS))
    expected = [sample_address(0, i) for i in range(40)] + [sample_address(1, i, k) for i in range(24) for k in (0, 1)]
    assert sorted(addresses) == sorted(expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_position_is_entered_and_left_behind(tmp_path: Path, num_workers: int) -> None:
    root = write_encoded(tmp_path, {"b": 48})
    loader = open_loader(root, "b", num_workers=num_workers, **LATENTS)
    epochs = [addresses_of(loader) for _ in range(9)]
    assert len({tuple(epoch) for epoch in epochs}) == 9
    data = loader.dataset
    assert isinstance(data, TrainingDataset)
    assert data.state_dict(16, from_beginning=True)["epoch"] == 8
    data.load_state_dict(data.state_dict(16, from_beginning=True) | {"epoch": 7})  # In workers that have begun.
    assert data.state_dict(8, from_beginning=False)["sample_in_epoch"] == 24
    assert [addresses_of(loader) for _ in range(2)] == [epochs[7][16:], epochs[8]]


def test_the_state_of_a_run_on_a_streaming_dataset_is_continued(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"b": 48})
    loader = open_loader(root, "b", **LATENTS)
    state = open_data(root, "b", **LATENTS).state_dict(16, from_beginning=True)
    of_streaming = {"num_canonical_nodes": 4, "shuffle_seed": 3, "initial_physical_nodes": 1}
    dataset = loader.dataset
    assert isinstance(dataset, TrainingDataset)
    first = addresses_of(loader)
    dataset.load_state_dict({**state, **of_streaming})
    assert addresses_of(loader) == first[16:]
    dataset.load_state_dict({**state, **of_streaming, "epoch": -1, "sample_in_epoch": 0})  # Before the first step.
    assert addresses_of(loader) == first
    with pytest.raises(DataError, match=r"init_from\.checkpoint"):
        dataset.load_state_dict(of_streaming)


def test_missing_and_half_written_streams(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_prepared(tmp_path, {"a": 8, "b": 8})
    advice = r"data\.streams='\[{name: a}, {name: b}\]'"
    with pytest.raises(DataError, match=rf"train/c \(stream 'c'\) .*index.json.*{advice}"):
        open_data(root, "c")
    with pytest.raises(DataError, match=r"scripts/prepare.py"):
        open_data(tmp_path / "no" / "where", "a")
    with pytest.raises(DataError, match=r"stream 'c'"):
        open_data(tmp_path / "cache", "c", remote=str(root))
    (root / "a" / "index.json").rename(root / "a" / "index.gone")
    with pytest.raises(DataError, match=r"train/a \(stream 'a'\) .*index.json"):
        open_data(root, "a")
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "work.partial").mkdir()
    with pytest.raises(DataError, match=r"no manifest\.json"):
        open_data(root, "b")
    (tmp_path / "work.partial").rmdir()
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        check_location(locate_streams(None, str(root), [StreamConfig(name="b")])[0])
    assert not caplog.text
    open_data(root, "b")
    open_data(root, "b")
    assert caplog.text.count("taken for an MDS folder of another tool") == 1, "said once, though it is opened twice"


@pytest.mark.parametrize(
    ("given", "streams", "advised"),
    [
        ("prepared", "a", "data.local=prepared/train"),
        ("prepared/train/a", "a", "data.local=prepared/train"),
        ("prepared/trian", "a", "data.local=prepared/train"),
        ("", "a", "data.local=prepared/train"),
        ("encoded", "a", "data.local=encoded/16/train"),
        ("prepared", "x", "data.local=prepared/train and data.streams='[{name: a}, {name: b}]'"),
    ],
)
def test_the_folder_beside_a_wrong_one_is_named(tmp_path: Path, given: str, streams: str, advised: str) -> None:
    write_prepared(tmp_path / "prepared", {"a": 8, "b": 8})
    write_encoded(tmp_path / "encoded/16", {"a": 8})
    with pytest.raises(DataError) as raised:
        open_data(tmp_path / given, streams)
    assert f"set {advised}" in str(raised.value).replace(f"{tmp_path}/", "")


def test_images_instead_of_latents_and_the_reverse(tmp_path: Path) -> None:
    images, latents = write_prepared(tmp_path / "a", {"b": 8}), write_encoded(tmp_path / "b", {"b": 8})
    with pytest.raises(DataError, match=r"latent_mean.*data.representation=images"):
        open_data(images, "b", **LATENTS)
    with pytest.raises(DataError, match=r"image.*data.representation=latents"):
        open_data(latents, "b")
    write_mds(tmp_path / "c" / "b", {"text": "str"}, [{"text": "x"}] * 8)
    with pytest.raises(DataError, match=r"no image, only text"):
        open_data(tmp_path / "c", "b")


def test_latents_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"b": 8}, logvar=False)
    with pytest.raises(DataError, match=r"latent_logvar.*objective.posterior"):
        open_data(root, "b", **LATENTS)
    assert BatchKey.LATENT_LOGVAR not in open_data(root, "b", with_logvar=False, **LATENTS)[0]
    with pytest.raises(DataError, match=r"latents of 4 x 4, which do not fit images of 18 x 18"):
        open_data(root, "b", resolution=18, with_logvar=False, **LATENTS)
    for size in ([16, 24], [32, 32]):
        streams_ = [StreamConfig(name="a"), StreamConfig(name="b", resolution=size)]
        sized = write_encoded(tmp_path / str(size), {"a": 8, "b": 8})
        with pytest.raises(DataError, match=rf"train/b .*latents of 4 x 4, which do not fit images of {size[0]} x"):
            open_data(sized, streams=streams_, mixing=Mixing.bucket, **LATENTS)


def test_a_truncated_original_is_refused_at_the_start(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"b": 8})
    shard = root / "b" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(DataError, match=str(shard)):
        open_data(root, "b")
    shard.unlink()
    with pytest.raises(DataError, match=r"shard.00000.mds is missing, and there is no remote"):
        open_data(root, "b")


def test_an_original_is_not_taken_for_a_cached_copy(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"b": 8})
    shard = root / "b" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DataError, match=r"there is no remote"):
        open_data(root, "b", remote=str(root))
    assert shard.is_file()


def test_an_mds_folder_of_another_tool(tmp_path: Path) -> None:
    """Shards in subfolders below one index, columns that are not read, and of types that are not decoded here."""
    columns = PREPARED | {"score": "float64", "extra": "pkl", "size": "uint16"}
    samples = [prepared_sample("b", i) | {"score": 0.5, "extra": {"a": 1}, "size": np.uint16(3)} for i in range(16)]
    entries = []
    for part in range(2):
        write_mds(tmp_path / "b" / f"{part}", columns, samples[8 * part : 8 * part + 8])
        for entry in read_index(tmp_path / "b" / f"{part}").shards:
            entries.append(entry._replace(raw=entry.raw._replace(name=f"{part}/{entry.raw.name}")))
        (tmp_path / "b" / f"{part}" / "index.json").unlink()
    write_index(tmp_path / "b", entries)
    for options in ({}, {"remote": str(tmp_path)}):
        dataset = open_data(tmp_path / "cache" if options else tmp_path, "b", **options)
        for number in (0, 9, 15):
            np.testing.assert_array_equal(
                dataset[number][BatchKey.IMAGE], ImageTransform.square(16)(smooth_image(number))
            )
    index = read_index(tmp_path / "b")
    decoder = SampleDecoder(index.shards[0].format, {"score", "size", "captions", "metadata"})
    sample = decoder(ShardFiles().read(str(tmp_path / "b" / index.shards[0].raw.name), 0))
    assert sample == {"captions": ["0 b 0"], "metadata": {}, "score": 0.5, "size": 3}
    with pytest.raises(DataError, match="pkl"):  # It would run code.
        SampleDecoder(index.shards[0].format)
