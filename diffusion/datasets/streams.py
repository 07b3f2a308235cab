"""The training data: several streams of prepared pictures or encoded latents, mixed, as samples of a batch."""

import logging
import multiprocessing
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from streaming import Stream

from diffusion.config.data import Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.datasets.locations import StreamLocation
from diffusion.datasets.shards import SampleId, ShardDataset
from diffusion.datasets.transforms import SquareTransform
from diffusion.errors import DataError
from diffusion.randomness import Purpose, random_word, sample_address

logger = logging.getLogger(__name__)

Tokenize = Callable[[list[str]], NDArray[np.int32]]
"""K captions -> int32 [K, L]."""

Sample = dict[BatchKey, Any]
"""Arrays and integers of one sample, without the batch dimension."""

PREPARED_COLUMNS = {"image", "captions"}
ENCODED_COLUMNS = {"latent_mean", "token_ids"}
MAX_BAD_PICTURES = 10
MAX_BAD_FRACTION = 0.001


class BadPictures:
    """Counts pictures that could not be decoded, over the loader workers of a rank, and ends the run at too many."""

    def __init__(self) -> None:
        self._num_read = multiprocessing.Value("q", 0)
        self._num_bad = multiprocessing.Value("q", 0)

    @property
    def num_bad(self) -> int:
        """How many were met; one that is met in each epoch counts each time."""
        return self._num_bad.value

    def count_read(self) -> None:
        """Count a sample."""
        with self._num_read.get_lock():
            self._num_read.value += 1

    def count_bad(self, what: str) -> None:
        """Count and log a picture that could not be decoded.

        Raises:
            DataError: there were more than `MAX_BAD_PICTURES` and more than `MAX_BAD_FRACTION` of those read.
        """
        with self._num_bad.get_lock():
            self._num_bad.value += 1
            num_bad = self._num_bad.value
        num_read = self._num_read.value
        logger.warning("%s; another picture takes its place (%d of %d so far)", what, num_bad, num_read)
        if num_bad > max(MAX_BAD_PICTURES, MAX_BAD_FRACTION * num_read):
            raise DataError(
                f"{num_bad} of {num_read} pictures cannot be decoded (at most {MAX_BAD_PICTURES} or "
                f"{MAX_BAD_FRACTION:.1%} may be), the last: {what}. The data is damaged: check the disk and the "
                "copies, or run scripts/prepare.py again"
            )


class TextImageDataset(ShardDataset):
    """Samples of several streams as dictionaries with the entries of `BatchKey`.

    Iterated over, it yields this worker's part of the global order; indexed, it gives any sample.

    Args:
        locations: the streams, checked; their order is the stream index in a sample's address.
        representation: whether the streams hold pictures or latents.
        transform: what is done with a picture; for latents, only its resolution is used.
        tokenize: encodes captions; None with latents, whose token ids are stored.
        seed: seed of the run: order, crops, flips and choices of captions.
        with_logvar: whether the log-variance of latents is wanted.
        choose_caption: draw one of a sample's captions in each epoch; otherwise the first is taken.
        options: further arguments of `ShardDataset` and `streaming.StreamingDataset`.

    Raises:
        DataError: a stream is damaged or not what was asked for.
    """

    def __init__(
        self,
        *,
        locations: Sequence[StreamLocation],
        representation: Representation,
        transform: SquareTransform,
        tokenize: Tokenize | None,
        seed: int,
        with_logvar: bool,
        choose_caption: bool,
        **options: Any,
    ) -> None:
        assert (tokenize is None) == (representation == Representation.latents)
        self.representation = representation
        self.transform = transform
        self.tokenize = tokenize
        self.seed = seed
        self.with_logvar = with_logvar
        self.choose_caption = choose_caption
        self.bad_pictures = BadPictures()
        streams = [_stream(location) for location in locations]
        names = [location.name for location in locations]
        super().__init__(
            stream_names=names,
            streams=streams,
            proportions=[location.proportion for location in locations],
            repeats=[location.repeat for location in locations],
            shuffle_seed=seed,
            **options,
        )
        for stream, location in enumerate(locations):
            self._check_columns(stream, location)

    def _check_columns(self, stream: int, location: StreamLocation) -> None:
        """Compare a stream's columns with the representation that was asked for."""
        shard = self.shards[self.shard_offset_per_stream[stream]]
        columns = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        where = f"{location.source} (stream '{location.name}')"
        is_prepared, is_encoded = columns.keys() >= PREPARED_COLUMNS, columns.keys() >= ENCODED_COLUMNS
        if not is_prepared and not is_encoded:
            raise DataError(
                f"{where} has the columns {', '.join(sorted(columns))}; prepared data has "
                f"{', '.join(sorted(PREPARED_COLUMNS))} and encoded data {', '.join(sorted(ENCODED_COLUMNS))}: "
                "write it with scripts/prepare.py"
            )
        if self.representation == Representation.images and not is_prepared:
            raise DataError(
                f"{where} holds latents, and data.representation is images: set data.representation=latents, or point "
                "data.local (data.remote) at the output of scripts/prepare.py"
            )
        if self.representation == Representation.latents:
            if not is_encoded:
                raise DataError(
                    f"{where} holds pictures, and data.representation is latents: encode them with "
                    f"`python scripts/encode.py PREPARED OUT --resolution {self.transform.resolution}` and point "
                    "data.local (data.remote) at OUT, or set data.representation=images"
                )
            self._check_latents(where, columns)

    def _check_latents(self, where: str, columns: dict[str, str]) -> None:
        """Check the latents' shape, which must be that of the first stream, and that the log-variance is there."""
        expected = self.shards[0].column_encodings[self.shards[0].column_names.index("latent_mean")]
        if columns["latent_mean"] != expected:
            raise DataError(
                f"{where} holds latents of type {columns['latent_mean']}, the first stream of type {expected}: encode "
                "all streams with one command"
            )
        height, width = (int(n) for n in expected.rsplit(":", 1)[-1].split(",")[-2:])
        if height != width or self.transform.resolution % height:
            raise DataError(
                f"{where} holds latents of {height} x {width}, which do not fit data.resolution "
                f"{self.transform.resolution}: set the resolution they were encoded with, or run scripts/encode.py "
                f"with --resolution {self.transform.resolution}"
            )
        if self.with_logvar and "latent_logvar" not in columns:
            raise DataError(
                f"{where} holds only the means of the latents, and objective.posterior is sample: set "
                "objective.posterior=mean, or run scripts/encode.py without --mean-only"
            )

    def get_item(self, sample_id: int, retry: int = 7) -> Sample:
        """Read one sample.

        Returns:
            `TOKEN_IDS` int64 [L]; `IMAGE` uint8 [3, R, R], or `LATENT_MEAN` (and `LATENT_LOGVAR`) float16 [C, H, W];
            `SAMPLE` and `STREAM` integers. A sample that is read by its number, not in the order, has occurrence 0.
        """
        address = sample_id.address if isinstance(sample_id, SampleId) else None
        sample_id = int(sample_id)
        stream = bisect_right(self.first_samples, sample_id) - 1
        if address is None:
            address = int(sample_address(stream, sample_id - self.first_samples[stream]))
        sample: Sample = {BatchKey.SAMPLE: address, BatchKey.STREAM: stream}
        if self.representation == Representation.latents:
            columns = super().get_item(sample_id, retry)
            all_ids = columns["token_ids"]
            sample[BatchKey.LATENT_MEAN] = columns["latent_mean"]
            if self.with_logvar:
                sample[BatchKey.LATENT_LOGVAR] = columns["latent_logvar"]
            token_ids = all_ids[self._caption(len(all_ids), address)]
        else:
            assert self.tokenize is not None
            columns, picture = self._decodable(sample_id, stream, retry)
            captions = columns["captions"]
            sample[BatchKey.IMAGE] = self.transform(picture, epoch=self.epoch, sample=address)
            token_ids = self.tokenize([captions[self._caption(len(captions), address)]])[0]
        sample[BatchKey.TOKEN_IDS] = token_ids.astype(np.int64)
        return sample

    def _caption(self, num_captions: int, address: int) -> int:
        """Which of a sample's captions is used in this epoch."""
        if num_captions == 1 or not self.choose_caption:
            return 0
        return (random_word(self.seed, Purpose.CAPTION_CHOICE, self.epoch, address) * num_captions) >> 32

    def _decodable(self, sample_id: int, stream: int, retry: int) -> tuple[dict[str, Any], Image.Image]:
        """Read a sample's columns and picture; in place of an undecodable one, the next decodable one of its stream."""
        self.bad_pictures.count_read()
        first, num_samples = self.first_samples[stream], int(self.samples_per_stream[stream])
        for step in range(num_samples):
            columns = super().get_item(first + (sample_id - first + step) % num_samples, retry)
            try:
                return columns, decode_rgb(columns["image"])
            except UndecodableImageError as error:
                what = f"stream '{self.stream_names[stream]}', key '{columns.get('key', sample_id + step)}': {error}"
                self.bad_pictures.count_bad(what)
        raise DataError(f"no picture of the stream '{self.stream_names[stream]}' can be decoded: prepare it again")


def _stream(location: StreamLocation) -> Stream:
    return Stream(remote=location.remote, local=location.local, proportion=location.proportion, repeat=location.repeat)
