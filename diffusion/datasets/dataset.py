"""The training data: samples of several streams of images or latents, read by index or in the global order.

The order (`sample_order.py`) says which samples a rank reads in a step, the index of a stream (`formats/shards.py`)
which shard holds a sample, and the cache (`cache.py`) has the shard on this machine. A loader worker is given (epoch,
step), computes the samples of its rank in that step, and fetches ahead what the next steps need, also those of the next
epoch. The position in the data is known to the main process of a rank only.
"""

import json
import logging
import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Condition, Thread
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from diffusion.config.data import ImageSize, Representation
from diffusion.datasets.bad_images import BadImage, BadImages
from diffusion.datasets.batch import BatchKey, Sample
from diffusion.datasets.cache import CacheLimit, StreamShards, TierCounts, TierMeter, files_of_cache
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.datasets.sample_order import (
    SHARDS_OF_STREAMS,
    GlobalOrder,
    OrderSettings,
    RankOrder,
    describe_changes,
    sample_address,
    stream_shapes,
)
from diffusion.datasets.streams import StreamLocation, Substitutes, converts_to_srgb, find_substitutes
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import ConfigurationError, DataError
from diffusion.formats.shards import ShardFiles
from diffusion.randomness import Purpose, random_word
from diffusion.storage import shown

logger = logging.getLogger(__name__)

Tokenize = Callable[[list[str]], NDArray[np.int32]]
"""K captions -> int32 [K, L]."""

BATCHES_AHEAD = 8
"""Batches whose shards a loader worker fetches ahead, where `data.predownload` is null."""


class TextImageDataset(Dataset):
    """Samples of several streams as dictionaries with the entries of `BatchKey`.

    Args:
        locations: the streams, checked; their order is the stream index in a sample's address.
        representation: whether the streams hold images or latents.
        transforms: of the images of each stream; of latents, only the sizes are used.
        tokenize: encodes captions; None with latents, whose token ids are stored.
        seed: of crops, flips and choices of captions.
        with_logvar: whether the log-variance of latents is wanted.
        choose_caption: draw one of a sample's captions in each epoch; otherwise the first is taken.
        caption_weights: relative frequencies of the first captions, others are not drawn; None: all alike.
        with_text_embeddings: whether the text encoder's stored output is wanted; only with latents.
        score_names: scores that are wanted, with latents those that they were encoded with.
        hash_kind: hash that shards are compared with; None is one that the index gives.
        cache_limit: bytes that the caches may take on this machine; None is no limit.
        rank: each rank checks its share of the originals' sizes.
        num_ranks: world size.

    Raises:
        DataError: a stream is damaged, or not what was asked for.
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
        caption_weights: Sequence[float] | None = None,
        with_text_embeddings: bool = False,
        score_names: Sequence[str] = (),
        hash_kind: str | None = None,
        cache_limit: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if (tokenize is None) != (representation == Representation.latents):
            raise ConfigurationError("tokenize: give one for images, and None for latents, which hold token ids")
        self.representation, self.transforms, self.tokenize = representation, list(transforms), tokenize
        self.seed, self.choose_caption, self.caption_weights = seed, choose_caption, caption_weights
        self.with_logvar, self.with_text_embeddings = with_logvar, with_text_embeddings
        self.score_names = list(score_names)
        self.bad_images, self.meter = BadImages(num_ranks), TierMeter()
        self._required = ["latent_mean", "token_ids"] if tokenize is None else ["image", "captions"]
        self._required += ["latent_logvar"] if with_logvar and tokenize is None else []
        self._required += ["text_embeddings", "pooled_text_embeddings"] if with_text_embeddings else []
        if score_names:
            self._required.append("scores" if tokenize is None else "metadata")
        wanted = [*self._required, "placement" if tokenize is None else "key"]  # The last one is optional.
        limit, files = None if cache_limit is None else CacheLimit(cache_limit), ShardFiles()
        self.streams = [
            StreamShards(location, hash_kind=hash_kind, limit=limit, meter=self.meter, columns=wanted, files=files)
            for location in locations
        ]
        self.stream_names = [location.name for location in locations]
        ends = list(accumulate(stream.index.num_samples for stream in self.streams))
        self.num_samples = ends[-1]
        self.first_samples = [0, *ends[:-1]]
        """Number of the first sample of each stream among the samples of all streams."""
        self.substitutes: list[Substitutes] = []
        """Substitutes of each stream."""
        self._convert_to_srgb = [tokenize is not None and converts_to_srgb(location) for location in locations]
        for number, (stream, location) in enumerate(zip(self.streams, locations, strict=True)):
            stream.check_sizes(slice(rank, None, num_ranks))
            self._check_columns(number, location)
            substitutes = find_substitutes(location, stream.index.num_samples)
            self.substitutes.append(substitutes)
            if len(substitutes) and rank == 0:
                logger.warning(
                    "stream '%s': %d of %d samples are marked as unusable; others are read in their place",
                    stream.name, len(substitutes), substitutes.num_samples,
                )  # fmt: skip

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> Sample:
        """Read a sample by its number among the samples of all streams, as in epoch 0."""
        number = range(self.num_samples)[number]
        stream = bisect_right(self.first_samples, number) - 1
        return self.read(stream, number - self.first_samples[stream])

    def read(self, stream: int, index: int, *, occurrence: int = 0, epoch: int = 0) -> Sample:
        """Read a sample.

        Args:
            stream: index of the stream.
            index: of the sample in the stream.
            occurrence: how often it came before in the epoch.
            epoch: which crop, flip and caption are drawn.

        Returns:
            `TOKEN_IDS` int64 [L]; `IMAGE` uint8 [3, height, width], or `LATENT_MEAN` (and `LATENT_LOGVAR`) float16
            [C, H, W]; `TEXT_EMBEDDING` float16 [L, D] and `POOLED_TEXT_EMBEDDING` float16 [P] if wanted; `PLACEMENT`
            int64 [6] if it is there; `SCORES` float32 [S] if wanted; `SAMPLE` and `STREAM` integers.

        Raises:
            DataError: its shard is damaged, or cannot be fetched.
        """
        address = int(sample_address(stream, index, occurrence))
        sample: Sample = {BatchKey.SAMPLE: address, BatchKey.STREAM: stream}
        if self.representation == Representation.latents:
            columns = self.streams[stream].read(self.substitutes[stream].substitute_of(index))
            all_ids = columns["token_ids"]
            sample[BatchKey.LATENT_MEAN] = columns["latent_mean"]
            if self.with_logvar:
                sample[BatchKey.LATENT_LOGVAR] = columns["latent_logvar"]
            if "placement" in columns:
                sample[BatchKey.PLACEMENT] = columns["placement"].astype(np.int64)
            if self.score_names:
                sample[BatchKey.SCORES] = columns["scores"]
            caption = self._caption(len(all_ids), epoch, address)
            token_ids = all_ids[caption]
            if self.with_text_embeddings:
                sample[BatchKey.TEXT_EMBEDDING] = columns["text_embeddings"][caption]
                sample[BatchKey.POOLED_TEXT_EMBEDDING] = columns["pooled_text_embeddings"][caption]
        else:
            assert self.tokenize is not None
            columns, image = self._read_decodable(stream, index, epoch)
            captions = columns["captions"]
            if self.score_names:
                sample[BatchKey.SCORES] = read_scores(columns["metadata"], self.score_names)
            transform, drawn_for = self.transforms[stream], {"epoch": epoch, "sample": address}
            sample[BatchKey.IMAGE] = transform(image, **drawn_for)
            sample[BatchKey.PLACEMENT] = np.array(transform.placement(image.size, **drawn_for), np.int64)
            token_ids = self.tokenize([captions[self._caption(len(captions), epoch, address)]])[0]
        sample[BatchKey.TOKEN_IDS] = token_ids.astype(np.int64)
        return sample

    def _caption(self, num_captions: int, epoch: int, address: int) -> int:
        if num_captions == 1 or not self.choose_caption:
            return 0
        word = random_word(self.seed, Purpose.CAPTION_CHOICE, epoch, address)
        if self.caption_weights is None:
            return (word * num_captions) >> 32
        ends = list(accumulate(self.caption_weights[:num_captions]))
        below = math.nextafter(ends[-1], 0.0)  # The product of tiny weights may be rounded up to their sum.
        return bisect_right(ends, min(word / 2**32 * ends[-1], below))

    def _read_decodable(self, stream: int, index: int, epoch: int) -> tuple[dict[str, Any], Image.Image]:
        """Read a sample; in place of an undecodable one, the next decodable one of its stream."""
        self.bad_images.count_read()
        name, substitutes = self.stream_names[stream], self.substitutes[stream]
        index = start = substitutes.substitute_of(index)
        while True:
            columns = self.streams[stream].read(index)
            try:
                return columns, decode_rgb(columns["image"], convert_to_srgb=self._convert_to_srgb[stream])
            except UndecodableImageError as error:
                key = columns.get("key", str(index))
                self.bad_images.count_bad(BadImage(stream=name, index=index, key=key, epoch=epoch, error=str(error)))
            index = substitutes.substitute_of((index + 1) % substitutes.num_samples)
            if index == start:
                raise DataError(f"no image of the stream '{name}' can be decoded: prepare it again")

    def cache_bytes(self) -> int:
        """Bytes that the caches of the streams take now."""
        folders = {stream.folder for stream in self.streams if stream.remote is not None}
        return sum(found.st_size for folder in folders for _, found in files_of_cache(folder))

    def close(self) -> None:
        """Close all files, and let caches be removed."""
        for stream in self.streams:
            stream.close()

    def _check_columns(self, stream: int, location: StreamLocation) -> None:
        columns = self.streams[stream].index.shards[0].format.columns
        where = f"{shown(location.source)} (stream '{location.name}')"
        for name in self._required:
            if name not in columns:
                raise DataError(f"{where} has no {name}, only {', '.join(sorted(columns))}. {_REMEDIES[name]}")
        if self.representation == Representation.latents:
            self._check_latents(where, stream, columns)

    def _check_latents(self, where: str, stream: int, columns: dict[str, str]) -> None:
        """Check that latents have the stream's size, and are of the kind of the first stream's."""
        expected = self.streams[0].index.shards[0].format.columns
        first_type, own_type = expected["latent_mean"], columns["latent_mean"]
        (kind, first), (other, latent) = _latent_type(first_type), _latent_type(own_type)
        size = self.transforms[stream].size
        if other != kind or ("placement" in columns) != ("placement" in expected):
            raise DataError(
                f"{where} holds latents of type {own_type}, the first stream of type {first_type}, or one of them "
                "holds `placement` and the other does not: encode all streams with one command"
            )
        factor = self.transforms[0].size.height // first.height
        if size.height % latent.height or size != (latent.height * factor, latent.width * factor):
            raise DataError(
                f"{where} holds latents of {latent}, which do not fit images of {size} (data.resolution, or the "
                "resolution of the stream): set the size they were encoded with, or run scripts/encode.py again"
            )


_REMEDIES = {
    **dict.fromkeys(
        ("image", "captions"),
        "data.representation is images: point data.local (data.remote) at PREPARED/train, written by "
        "scripts/prepare.py, or if this is encoded data, set data.representation=latents",
    ),
    **dict.fromkeys(
        ("latent_mean", "token_ids"),
        "data.representation is latents: encode prepared data with `python scripts/encode.py PREPARED OUT --resolution "
        "R` and point data.local (data.remote) at OUT/train, or set data.representation=images",
    ),
    **dict.fromkeys(
        ("text_embeddings", "pooled_text_embeddings"),
        "data.text_embeddings is true: set it to false, or run scripts/encode.py with --text-embeddings",
    ),
    **dict.fromkeys(
        ("scores", "metadata"),
        "model.score_conditioning is set: run scripts/prepare.py with scorers, and scripts/encode.py with --config of "
        "this run, or set model.score_conditioning=null",
    ),
    "latent_logvar": "objective.posterior is sample: set it to mean, or run scripts/encode.py without --mean-only",
}
"""Remedies for a missing column."""


def read_scores(metadata: Mapping[str, Any], names: Sequence[str]) -> NDArray[np.float32]:
    """Read scores from the metadata of a prepared sample: [S], NaN where one is null.

    A score that is not there, or no number, is a DataError.
    """
    values = []
    for name in names:
        if name not in metadata:
            raise DataError(
                f"a sample has no score '{name}' in its metadata, only {', '.join(sorted(metadata)) or 'nothing'}: "
                "correct model.score_conditioning.columns, or run scripts/prepare.py with a scorer for it"
            )
        value = metadata[name]
        if value is not None and not isinstance(value, int | float):
            raise DataError(f"a sample's '{name}' is {value!r}: model.score_conditioning.columns must be numbers")
        values.append(np.nan if value is None else value)
    return np.array(values, np.float32)


class Position(NamedTuple):
    """A step of training."""

    epoch: int
    step: int
    """In the epoch."""


class TrainingDataset(TextImageDataset):
    """The samples of this rank in the global order: `TrainingSteps` yields positions, and each gives a batch.

    Args:
        order: what the order depends on besides the data.
        predownload: samples that each loader worker fetches ahead; None is `BATCHES_AHEAD` batches.
        options: further arguments of `TextImageDataset`.

    Raises:
        ConfigurationError: the streams do not give a global batch (or a group), or the ranks cannot share one.
        DataError: a stream is damaged, or not what was asked for.
    """

    def __init__(
        self,
        *,
        locations: Sequence[StreamLocation],
        order: OrderSettings,
        rank: int = 0,
        num_ranks: int = 1,
        predownload: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(locations=locations, seed=order.seed, rank=rank, num_ranks=num_ranks, **options)
        shapes = stream_shapes(locations, [stream.index.samples_per_shard for stream in self.streams])
        self.order = GlobalOrder(shapes, order)
        self._rank_order = RankOrder(self.order, rank=rank, num_ranks=num_ranks)
        rank_batch_size = order.global_batch_size // num_ranks
        self.batches_ahead = BATCHES_AHEAD if predownload is None else -(-predownload // rank_batch_size)
        """Batches whose shards each loader worker fetches ahead."""
        self._prefetcher: Prefetcher | None = None
        self._begin, self._has_begun = Position(0, 0), False
        """First position of the epoch that is read now, or next."""
        if rank == 0:
            dropped = ", ".join(
                f"{num} of {shape.draws} of '{shape.name}'"
                for shape, num in zip(shapes, self.order.epoch(0).dropped, strict=True)
                if num
            )
            logger.log(
                logging.WARNING if dropped and not order.shuffle else logging.INFO,
                "an epoch has %d global batches of %d; dropped: %s (%s in each epoch)",
                self.order.num_steps, order.global_batch_size, dropped or "nothing",
                "others" if order.shuffle else "the same",
            )  # fmt: skip

    def __getitems__(self, position: Position | Sequence[int]) -> list[Sample]:
        """Read the samples of this rank in a step; or by their numbers, for a plain DataLoader."""
        if not isinstance(position, Position):
            return [self[number] for number in position]
        if self._prefetcher is None:  # In the process that reads: threads do not survive a fork.
            self._prefetcher = Prefetcher(self._rank_order, self)
            weakref.finalize(self, Prefetcher.close, self._prefetcher)
        self.meter.add(self._prefetcher.reach(position, self._upcoming(position)))
        slots = self._rank_order.slots(*position)
        try:
            return [
                self.read(stream, index, occurrence=occurrence, epoch=position.epoch)
                for stream, index, occurrence in zip(*(array.tolist() for array in slots), strict=True)
            ]
        finally:
            self.meter.add(TierCounts(read_bytes=sum(stream.end_batch() for stream in self.streams)))

    def _upcoming(self, position: Position) -> list[Position]:
        """The next steps that this loader worker reads, of this epoch and the next one."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        upcoming, (epoch, step) = [], position
        while len(upcoming) < self.batches_ahead:
            step += num_workers
            if step >= self.order.num_steps:
                epoch, step = epoch + 1, worker
                if step >= self.order.num_steps:
                    break
            upcoming.append(Position(epoch, step))
        return upcoming

    def begin_epoch(self) -> Position:
        """Return the first position of the epoch that begins now: one that was loaded, or its first step."""
        if self._has_begun:
            self._begin = Position(self._begin.epoch + 1, 0)
        self._has_begun = True
        return self._begin

    def samples_of_step(self, step: int) -> list[tuple[str, int, str]]:
        """The samples of all ranks in a step of training, from 0: stream, index in it, and name of the shard."""
        epoch, inside = divmod(step, self.order.num_steps)
        slots = self.order.epoch(epoch).slots(inside, inside + 1)
        samples = []
        for stream, drawn in zip(slots.stream[0].tolist(), slots.index[0].tolist(), strict=True):
            index, shards = self.substitutes[stream].substitute_of(drawn), self.streams[stream]
            samples.append((self.stream_names[stream], index, shards.path(shards.index.locate(index)[0]).name))
        return samples

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The position in the data, as Composer asks for it and as `StreamingDataset` names it.

        Args:
            num_samples: samples that all ranks have trained on in the epoch.
            from_beginning: whether they are counted from its beginning; otherwise, from where the run continued.
        """
        first = 0 if from_beginning else self._begin.step * self.order.settings.global_batch_size
        return {
            "epoch": self._begin.epoch,
            "sample_in_epoch": first + num_samples,
            "order": json.dumps(self.order.fingerprint()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, in the order in which it was reached.

        Raises:
            DataError: the order would be another one now.
        """
        if "order" not in state:
            raise DataError(
                "the checkpoint does not say in which order its samples came, so it cannot be continued in the "
                "middle of the data: start a new run from its weights (init_from.checkpoint)"
            )
        before, now = json.loads(state["order"]), self.order.fingerprint()
        if changes := describe_changes(before, now):
            is_same_data = before.get(SHARDS_OF_STREAMS) == now[SHARDS_OF_STREAMS]
            remedy = "Set these back, or" if is_same_data else "The data has grown, or was replaced:"
            raise DataError(
                f"the samples would come in another order than in the run that is continued: {'; '.join(changes)}. "
                f"{remedy} start a new run from its weights (init_from.checkpoint)"
            )
        size = self.order.settings.global_batch_size
        step, inside = divmod(state["sample_in_epoch"], size)
        if inside:
            raise DataError(
                f"the data is to be continued at sample {state['sample_in_epoch']} of an epoch, which is not the "
                f"beginning of a global batch of {size}: the checkpoint is of another run"
            )
        self._begin, self._has_begun = Position(max(0, state["epoch"]), step), False

    def close(self) -> None:
        """End the thread that fetches ahead, and close all files."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        super().close()


class Prefetcher:
    """Fetches the shards of a rank's next steps ahead, in a thread of the reading process.

    A sample is a cache hit if its shard was on this machine when it was first looked for.
    """

    def __init__(self, order: RankOrder, data: TextImageDataset) -> None:
        self._order, self._streams, self._substitutes = order, data.streams, data.substitutes
        self._upcoming: list[Position] = []
        self._visited: dict[Position, TierCounts | None] = {}
        self._changed = Condition()
        self._is_closed = False
        Thread(target=self._run, name="prefetch", daemon=True).start()

    def reach(self, position: Position, upcoming: Sequence[Position]) -> TierCounts:
        """Visit the upcoming steps from now on, in order; return the hits of the step that is read now."""
        with self._changed:
            counts = self._visited.pop(position, None)
            self._visited = {step: counts for step, counts in self._visited.items() if step in upcoming}
            self._upcoming = [step for step in upcoming if step not in self._visited]
            self._changed.notify()
        return self._look(self._shards(position)) if counts is None else counts

    def close(self) -> None:
        """End the thread after what it visits now."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._upcoming or self._is_closed)
                if self._is_closed:
                    return
                position = self._upcoming.pop(0)
                self._visited[position] = None
            shards = self._shards(position)
            counts = self._look(shards)
            with self._changed:
                if position in self._visited:
                    self._visited[position] = counts
            for stream, shard, _ in shards:
                try:
                    self._streams[stream].ensure(shard)
                except DataError as error:  # Tried again when the step is read.
                    logger.warning("a shard that is needed soon is not here yet: %s", error)

    def _shards(self, position: Position) -> list[tuple[int, int, int]]:
        """Stream, shard and number of samples."""
        slots, needed = self._order.slots(*position), []
        for stream in np.unique(slots.stream).tolist():
            indices, substitutes = slots.index[slots.stream == stream], self._substitutes[stream]
            if len(substitutes):
                indices = np.array([substitutes.substitute_of(index) for index in indices.tolist()])
            shards, counts = np.unique(self._streams[stream].index.shards_of(indices), return_counts=True)
            needed += [(stream, *pair) for pair in zip(shards.tolist(), counts.tolist(), strict=True)]
        return needed

    def _look(self, shards: Sequence[tuple[int, int, int]]) -> TierCounts:
        cached = [(stream, shard, num) for stream, shard, num in shards if self._streams[stream].remote is not None]
        return TierCounts(
            samples=sum(num for _, _, num in cached),
            hits=sum(num for stream, shard, num in cached if self._streams[stream].is_here(shard)),
        )


class TrainingSteps(DistributedSampler):
    """Positions of the steps of an epoch, from where the data set continues.

    Composer asks for a sampler of this class where a data set is read by several ranks.
    """

    def __init__(self, dataset: TrainingDataset, *, rank: int, num_ranks: int) -> None:
        super().__init__(dataset, num_replicas=num_ranks, rank=rank, shuffle=False)
        self._data = dataset

    def __len__(self) -> int:
        return self._data.order.num_steps

    def __iter__(self) -> Iterator[Position]:  # pyright: ignore[reportIncompatibleMethodOverride]
        epoch, first = self._data.begin_epoch()  # Here: torch makes iterators that it never advances.
        for step in range(first, len(self)):
            yield Position(epoch, step)


def _latent_type(encoding: str) -> tuple[str, ImageSize]:
    """Split `ndarray:float16:C,H,W` into dtype and channels, and height and width of the latent."""
    kind, height, width = encoding.rsplit(",", 2)
    return kind, ImageSize(int(height), int(width))
