import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from diffusion.config.data import Representation, Shuffling, StreamConfig
from diffusion.datasets.bad_images import BadImage, BadImages, check_bad_images
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.dataset import TrainingDataset
from diffusion.datasets.loader import train_loader
from diffusion.datasets.streams import StreamLocation, Substitutes, find_manifest, find_substitutes, locate_streams
from diffusion.errors import DataError
from diffusion.storage import Access
from tests.tools.web import WebServer, send
from tests.tools.written_data import data_config, tokenize, write_encoded, write_prepared

ROOT = Path(__file__).resolve().parents[3]


def a_image(number: int) -> BadImage:
    return BadImage(stream="b", index=number, key=f"b/{number}", epoch=0, error="cut off")


def test_keys_of_strangers_reach_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    BadImages().count_bad(BadImage(stream="b", index=0, key="\x1b[31m/\n", epoch=0, error="cut\roff"))
    assert caplog.messages and all(map(str.isprintable, caplog.messages))


def test_substitutes_are_the_next_usable_samples() -> None:
    substitutes = Substitutes(8, [7, 2, 3, 0])
    assert [substitutes.substitute_of(index) for index in range(8)] == [1, 1, 4, 4, 4, 5, 6, 1]
    assert substitutes.absent == [0, 2, 3, 7]
    assert [Substitutes(8).substitute_of(index) for index in range(8)] == list(range(8))
    with pytest.raises(DataError, match="all 3 samples of stream 'x'"):
        Substitutes(3, range(3), "x")
    with pytest.raises(DataError, match=r"has 3 samples, but sample 3 is marked in withdrawn.json"):
        Substitutes(3, [3], "x")


def test_withdrawn_samples_are_replaced_alike_in_images_and_latents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = {
        Representation.images: write_prepared(tmp_path / "images", {"a": 20, "b": 12}, bad=(6,)),
        Representation.latents: write_encoded(tmp_path / "latents", {"a": 20, "b": 12}),
    }
    plain: dict[Representation, list[tuple[int, int]]] = {}
    marked: dict[Representation, list[tuple[int, int]]] = {}
    withdrawn = {"train/a": [3, 4, 7, 19], "validation/a": [1]}
    for representation, root in roots.items():
        for result in (plain, marked):
            if result is marked:
                (root.parent / "withdrawn.json").write_text(json.dumps(withdrawn))
                (root.parent / "damaged.json").write_text(json.dumps({"train/a": [6]}))
            config = data_config(root, "a", "b", representation=representation)
            loader = train_loader(config, seed=3, tokenize=tokenize)
            result[representation] = [
                (address, "".join(chr(code) for code in ids[1:4]).split(" ")[0])
                for batch in loader
                for address, ids in zip(
                    batch[BatchKey.SAMPLE].tolist(), batch[BatchKey.TOKEN_IDS].tolist(), strict=True
                )
            ]
            dataset = loader.dataset
            assert isinstance(dataset, TrainingDataset)
            if result is marked:
                assert [dataset.substitutes[0].substitute_of(i) for i in (3, 4, 6, 7, 19, 5)] == [5, 5, 8, 8, 0, 5]
                assert dataset.substitutes[1].substitute_of(3) == 3
                assert dataset.bad_images.num_bad == (1 if representation == Representation.images else 0)  # of b
    assert marked[Representation.images] != plain[Representation.images]
    assert [address for address, _ in marked[Representation.images]] == [
        address for address, _ in plain[Representation.images]
    ]
    in_a = {rep: {address: number for address, number in rows if address < 2**53} for rep, rows in marked.items()}
    assert in_a[Representation.images] == in_a[Representation.latents]
    numbers = [int(number) for number in in_a[Representation.latents].values()]
    assert not {3, 4, 6, 7, 19} & set(numbers)
    assert (numbers.count(5), numbers.count(8), numbers.count(0)) == (3, 3, 2)
    assert "stream 'a': 5 of 20 samples" in caplog.text
    location = locate_streams(None, str(roots[Representation.latents]), [StreamConfig(name="a")])[0]
    assert len(find_substitutes(location, 20)) == 5
    (tmp_path / "latents" / "withdrawn.json").write_text('{"train/a": 3}')
    with pytest.raises(DataError, match=r"withdrawn.json beside .*train/a is damaged"):
        find_substitutes(location, 20)


def test_a_bad_image_is_not_replaced_by_a_withdrawn_one(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"b": 10}, bad=(4,))
    (tmp_path / "withdrawn.json").write_text(json.dumps({"train/b": [5]}))
    dataset = train_loader(data_config(root, "b"), seed=3, tokenize=tokenize).dataset
    np.testing.assert_array_equal(dataset[4][BatchKey.TOKEN_IDS], tokenize(["6 b 0"])[0])


def test_a_rare_bad_image_does_not_end_the_run() -> None:
    counter = BadImages()
    for read in range(1, 20_001):
        counter.count_read()
        if read % 1250 == 0:
            counter.count_bad(a_image(read))
    assert (counter.num_bad, counter.num_read) == (16, 20_000)
    assert [image.index for image in counter.take()] == list(range(1250, 20_001, 1250))
    assert counter.take() == []
    counter.count_bad(a_image(5))
    assert counter.take() == [a_image(5)]


def test_the_limit_is_ten_or_a_thousandth_of_the_job() -> None:
    check_bad_images(10, 20, "x")
    check_bad_images(20, 20_000, "x")
    with pytest.raises(DataError, match=r"11 of 9999 images .*: x"):
        check_bad_images(11, 9_999, "x")
    with pytest.raises(DataError, match=r"21 of 20000 images"):
        check_bad_images(21, 20_000, "x")
    alone, of_four = BadImages(), BadImages(num_ranks=4)
    for counter in (alone, of_four):
        for read in range(5_000):
            counter.count_read()
            if read % 500 == 0:
                counter.count_bad(a_image(read))
    of_four.count_bad(a_image(1))  # 11 of about 20,000
    with pytest.raises(DataError, match="11 of 5000"):
        alone.count_bad(a_image(1))


def test_workers_count_together(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"b": 48}, bad=(5, 6, 20))
    config = data_config(root, "b", num_workers=2, shuffle=Shuffling.none)
    loader = train_loader(config, seed=3, tokenize=tokenize)
    list(loader)
    dataset = loader.dataset
    assert isinstance(dataset, TrainingDataset)
    assert dataset.bad_images.num_read == 48
    assert sorted(image.index for image in dataset.bad_images.take()) == [5, 6, 20]


class Forbidding(WebServer):
    """Answers as S3 does to who may read but not list: 403 for `withdrawn.json`, 404 for the rest."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        send(request, 403 if request.path.endswith("withdrawn.json") else 404)


def test_marks_that_may_not_be_read_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = Forbidding()
    access = Access(endpoint_url=server.url)
    location = StreamLocation(name="a", remote="s3://bucket/data/train/a", local=str(tmp_path), access=access)
    try:
        assert find_manifest(location) is None
        with pytest.raises(DataError, match="s3:ListBucket"):
            find_substitutes(location, 20)
    finally:
        server.close()
