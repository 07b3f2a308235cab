"""The training data: several streams of prepared images or encoded latents, mixed, as samples of a batch."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from streaming.base.world import World

from diffusion.config.data import ImageSize, Representation
from diffusion.datasets.bad_images import BadImage, BadImages
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.fetching import Downloads, FetchedStream
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.datasets.locations import StreamLocation
from diffusion.datasets.sample_ids import SampleId
from diffusion.datasets.shards import ShardDataset
from diffusion.datasets.substitutes import Substitutes, find_substitutes
from diffusion.datasets.tiers import TierMeter
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import DataError
from diffusion.randomness import Purpose, random_word, sample_address

logger = logging.getLogger(__name__)

Tokenize = Callable[[list[str]], NDArray[np.int32]]
"""K captions -> int32 [K, L]."""

Sample = dict[BatchKey, Any]
"""Arrays and integers of one sample, without the batch dimension."""

PREPARED_COLUMNS = {"image", "captions"}
ENCODED_COLUMNS = {"latent_mean", "token_ids"}


class TextImageDataset(ShardDataset):
    """Samples of several streams as dictionaries with the entries of `BatchKey`.

    Iterated over, it yields this worker's part of the global order; indexed, it gives any sample.

    Args:
        locations: the streams, checked; their order is the stream index in a sample's address.
        representation: whether the streams hold images or latents.
        transforms: what is done with the images of each stream; for latents, only their sizes are used.
        tokenize: encodes captions; None with latents, whose token ids are stored.
        seed: seed of the run: order, crops, flips and choices of captions.
        with_logvar: whether the log-variance of latents is wanted.
        choose_caption: draw one of a sample's captions in each epoch; otherwise the first is taken.
        with_text_embeddings: whether the text encoder's stored output is wanted; only with latents.
        downloads: how shards are fetched.
        options: further arguments of `ShardDataset` and `streaming.StreamingDataset`.

    Raises:
        DataError: a stream is damaged or not what was asked for.
    """

    def __init__(
        self,
        *,
        locations: Sequence[StreamLocation],
        representation: Representation,
        transforms: Sequence[ImageTransform],
        tokenize: Tokenize | None,
        seed: int,
        with_logvar: bool,
        choose_caption: bool,
        with_text_embeddings: bool = False,
        downloads: Downloads | None = None,
        **options: Any,
    ) -> None:
        assert (tokenize is None) == (representation == Representation.latents)
        self.representation = representation
        self.transforms = list(transforms)
        self.tokenize = tokenize
        self.seed = seed
        self.with_logvar = with_logvar
        self.choose_caption = choose_caption
        self.with_text_embeddings = with_text_embeddings
        self.bad_images = BadImages(World.detect().num_ranks if "order" in options else 1)
        meter = TierMeter()
        streams = [FetchedStream(location, downloads or Downloads(), meter) for location in locations]
        wanted = ["latent_mean", "token_ids"] if tokenize is None else ["image", "captions", "key"]
        wanted += ["latent_logvar"] if with_logvar else []
        wanted += ["text_embeddings", "pooled_text_embeddings"] if with_text_embeddings else []
        wanted += ["placement"]  # Where it is there: some models are told it.
        names = [location.name for location in locations]
        super().__init__(
            stream_names=names,
            meter=meter,
            streams=streams,
            proportions=[location.proportion for location in locations],
            repeats=[location.repeat for location in locations],
            shuffle_seed=seed,
            columns=wanted,
            **options,
        )
        for stream, location in enumerate(locations):
            self._check_columns(stream, location)
        self.substitutes: list[Substitutes] = [
            find_substitutes(location, int(num))
            for location, num in zip(locations, self.samples_per_stream, strict=True)
        ]
        """Of each stream."""
        for name, substitutes in zip(names, self.substitutes, strict=True):
            if len(substitutes) and self._unique_rank_world.rank == 0:
                logger.warning(
                    "stream '%s': %d of %d samples are withdrawn (or could not be encoded); others take their places",
                    name, len(substitutes), substitutes.num_samples,
                )  # fmt: skip

    def substitute_of(self, stream: int, index: int) -> int:
        """Number of the sample of a stream that is read for a number: itself unless it is withdrawn."""
        return self.substitutes[stream].substitute_of(index)

    def samples_of_step(self, step: int) -> list[tuple[str, int, str]]:
        """The samples of all ranks in a step of training, from 0: stream, number in it, and name of the shard."""
        assert self.order is not None, "data without an order has no steps"
        epoch, inside = divmod(step, self.order.num_steps)
        slots = self.order.epoch(epoch).slots(inside, inside + 1)
        samples = []
        for stream, drawn in zip(slots.stream[0].tolist(), slots.index[0].tolist(), strict=True):
            index = self.substitute_of(stream, drawn)
            shard = bisect_right(self._first_of_shards, self.first_samples[stream] + index) - 1
            samples.append((self.stream_names[stream], index, self.shard_path(shard).name))
        return samples

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
                    f"{where} holds images, and data.representation is latents: encode them with "
                    "`python scripts/encode.py PREPARED OUT --resolution "
                    f"{self.transforms[stream].size.height}` and point data.local (data.remote) at OUT, or set "
                    "data.representation=images"
                )
            self._check_latents(where, stream, columns)

    def _check_latents(self, where: str, stream: int, columns: dict[str, str]) -> None:
        """Check that the latents have the stream's size, are of the kind of the first stream's, and have a variance."""
        expected = self.shards[0].column_encodings[self.shards[0].column_names.index("latent_mean")]
        (kind, first), (other, latent) = (_latent_type(encoding) for encoding in (expected, columns["latent_mean"]))
        size = self.transforms[stream].size
        if other != kind or ("placement" in columns) != ("placement" in self.shards[0].column_names):
            raise DataError(
                f"{where} holds latents of type {columns['latent_mean']}, the first stream of type {expected}, or one "
                "of them holds `placement` and the other does not: encode all streams with one command"
            )
        factor = self.transforms[0].size.height // first.height
        if size.height % latent.height or size != (latent.height * factor, latent.width * factor):
            raise DataError(
                f"{where} holds latents of {latent}, which do not fit images of {size} (data.resolution, or the "
                "resolution of the stream): set the size they were encoded with, or run scripts/encode.py again"
            )
        if self.with_text_embeddings and not {"text_embeddings", "pooled_text_embeddings"} <= columns.keys():
            raise DataError(
                f"{where} holds no text embeddings, and data.text_embeddings is true: set it to false, or run "
                "scripts/encode.py with --text-embeddings"
            )
        if self.with_logvar and "latent_logvar" not in columns:
            raise DataError(
                f"{where} holds only the means of the latents, and objective.posterior is sample: set "
                "objective.posterior=mean, or run scripts/encode.py without --mean-only"
            )

    def get_item(self, sample_id: int, retry: int = 7) -> Sample:
        """Read one sample.

        Returns:
            `TOKEN_IDS` int64 [L]; `IMAGE` uint8 [3, height, width], or `LATENT_MEAN` (and `LATENT_LOGVAR`) float16
            [C, H, W]; `TEXT_EMBEDDING` float16 [L, D] and `POOLED_TEXT_EMBEDDING` float16 [P] if wanted; `PLACEMENT`
            int64 [6] if it is there; `SAMPLE` and `STREAM` integers. A sample that is read by its number, not in the
            order, has occurrence 0.
        """
        address = sample_id.address if isinstance(sample_id, SampleId) else None
        sample_id = int(sample_id)
        stream = bisect_right(self.first_samples, sample_id) - 1
        if address is None:
            address = int(sample_address(stream, sample_id - self.first_samples[stream]))
        sample: Sample = {BatchKey.SAMPLE: address, BatchKey.STREAM: stream}
        if self.representation == Representation.latents:
            first = self.first_samples[stream]
            columns = super().get_item(first + self.substitutes[stream].substitute_of(sample_id - first), retry)
            all_ids = columns["token_ids"]
            sample[BatchKey.LATENT_MEAN] = columns["latent_mean"]
            if self.with_logvar:
                sample[BatchKey.LATENT_LOGVAR] = columns["latent_logvar"]
            if "placement" in columns:
                sample[BatchKey.PLACEMENT] = columns["placement"].astype(np.int64)
            caption = self._caption(len(all_ids), address)
            token_ids = all_ids[caption]
            if self.with_text_embeddings:
                sample[BatchKey.TEXT_EMBEDDING] = columns["text_embeddings"][caption]
                sample[BatchKey.POOLED_TEXT_EMBEDDING] = columns["pooled_text_embeddings"][caption]
        else:
            assert self.tokenize is not None
            columns, image = self._decodable(sample_id, stream, retry)
            captions = columns["captions"]
            transform, place = self.transforms[stream], {"epoch": self.epoch, "sample": address}
            sample[BatchKey.IMAGE] = transform(image, **place)
            sample[BatchKey.PLACEMENT] = np.array(transform.placement(image.size, **place), np.int64)
            token_ids = self.tokenize([captions[self._caption(len(captions), address)]])[0]
        sample[BatchKey.TOKEN_IDS] = token_ids.astype(np.int64)
        return sample

    def _caption(self, num_captions: int, address: int) -> int:
        """Which of a sample's captions is used in this epoch."""
        if num_captions == 1 or not self.choose_caption:
            return 0
        return (random_word(self.seed, Purpose.CAPTION_CHOICE, self.epoch, address) * num_captions) >> 32

    def _decodable(self, sample_id: int, stream: int, retry: int) -> tuple[dict[str, Any], Image.Image]:
        """Read a sample's columns and image; in place of an undecodable one, the next decodable one of its stream."""
        self.bad_images.count_read()
        first, substitutes = self.first_samples[stream], self.substitutes[stream]
        index = start = substitutes.substitute_of(sample_id - first)
        while True:
            columns = super().get_item(first + index, retry)
            try:
                return columns, decode_rgb(columns["image"])
            except UndecodableImageError as error:
                image = BadImage(
                    stream=self.stream_names[stream],
                    index=index,
                    key=columns.get("key", str(index)),
                    epoch=self.epoch,
                    error=str(error),
                )
                self.bad_images.count_bad(image)
            index = substitutes.substitute_of((index + 1) % substitutes.num_samples)
            if index == start:
                name = self.stream_names[stream]
                raise DataError(f"no image of the stream '{name}' can be decoded: prepare it again")


def _latent_type(encoding: str) -> tuple[str, ImageSize]:
    """Split `ndarray:float16:C,H,W` into dtype and channels, and height and width of the latent."""
    kind, height, width = encoding.rsplit(",", 2)
    return kind, ImageSize(int(height), int(width))
