"""Captioners and scorers: models that look at decoded images while they are prepared, loaded once per worker."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from PIL import Image

from diffusion.config.loading import from_dict, to_dict
from diffusion.config.training import Plugin
from diffusion.errors import ConfigurationError
from diffusion.plugins import build_plugin
from diffusion.preparation.config import CaptionerConfig, CaptionMode, PrepareConfig, ScorerConfig
from diffusion.preparation.records import clean_text, fit_for_json
from diffusion.preparation.selection.measures import MEASURES

logger = logging.getLogger(__name__)

GENERATED = "generated_captions"
"""Key of the metadata: the indices of the captions that a captioner wrote, ascending; absent where there are none."""

RESERVED = (*MEASURES, GENERATED, "key", "width", "height", "captions", "source", "split", "bucket", "reason", "detail")
"""Columns that a scorer cannot write."""


class Scorer(Protocol):
    """Computes one value for each image."""

    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> Sequence[Any]:
        """Score a batch.

        Args:
            images: Decoded, upright, mode RGB, of any sizes.
            captions: Of each image, the generated ones among them.

        Returns:
            For each image a number, a text, or None where it has no score. It must not depend on the other images
            of the batch.
        """
        ...


class Captioner(Protocol):
    """Writes a caption for each image."""

    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> Sequence[str]:
        """Caption a batch.

        Args:
            images: Decoded, upright, mode RGB, of any sizes.
            captions: What each image came with; may be empty.

        Returns:
            A caption for each image; a blank one counts as none. It must not depend on the other images of the
            batch.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """What the plug-ins say about an image."""

    captions: list[str]
    """The captions that it has from now on; empty if it came without and none was written."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The scores by column, and `generated_captions`; to be laid over the metadata of the source."""


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """The captioner and the scorers of a preparation, loaded."""

    captioner: Captioner | None = None
    captioner_config: CaptionerConfig | None = None
    scorers: list[tuple[ScorerConfig, Scorer]] = field(default_factory=list)

    @property
    def takes_missing_captions(self) -> bool:
        """Whether images that came without a caption are to be passed on: a captioner writes one in each mode."""
        return self.captioner is not None

    def annotate(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[Annotation]:
        """Caption and score images, in batches of the configured sizes.

        Args:
            images: Decoded, upright, mode RGB.
            captions: Of each image; empty lists where a captioner is to write one.

        Returns:
            For each image its captions and what goes into its metadata.

        Raises:
            ConfigurationError: A plug-in returned something else than it should.
        """
        results = [Annotation(captions=list(texts)) for texts in captions]
        if self.captioner is not None and self.captioner_config is not None:
            results = self._caption(images, captions, self.captioner, self.captioner_config)
        for config, scorer in self.scorers:
            described = [result.captions for result in results]
            values = _in_batches(scorer, config, f"scorer of '{config.column}'", images, described)
            for result, value in zip(results, values, strict=True):
                if value is not None and not isinstance(value, str | int | float):
                    value = value.item() if callable(getattr(value, "item", None)) else str(value)
                result.metadata[config.column] = fit_for_json(value)
        return results

    @staticmethod
    def _caption(
        images: Sequence[Image.Image],
        captions: Sequence[list[str]],
        captioner: Captioner,
        config: CaptionerConfig,
    ) -> list[Annotation]:
        """Write captions for the images that the mode asks for."""
        asked = [i for i, texts in enumerate(captions) if config.mode is not CaptionMode.missing or not texts]
        chosen, known = [images[i] for i in asked], [captions[i] for i in asked]
        written = dict(zip(asked, _in_batches(captioner, config, "captioner", chosen, known), strict=True))
        results = []
        for i, texts in enumerate(captions):
            text = written.get(i)
            if text is not None and not isinstance(text, str):
                raise ConfigurationError(f"captioner.path={config.path} returned {text!r}; it must return texts")
            text = clean_text(text or "").strip()
            kept = [] if config.mode is CaptionMode.instead and text else list(texts)
            metadata = {GENERATED: [len(kept)]} if text else {}
            results.append(Annotation(captions=kept + [text] * bool(text), metadata=metadata))
        return results


def load_plugins(config: PrepareConfig) -> Plugins:
    """Load the captioner and the scorers of a configuration; in one process the same ones are loaded once.

    Args:
        config: The configuration.

    Raises:
        ConfigurationError: One cannot be imported, refuses its arguments, or two write the same column.
        DataError: Weights are not where they should be.
    """
    captioner = None if config.captioner is None else to_dict(config.captioner)
    return _load(json.dumps({"captioner": captioner, "scorers": [to_dict(one) for one in config.scorers]}))


@lru_cache(maxsize=1)
def _load(text: str) -> Plugins:
    """Load what a text in JSON names; the text is what the cache goes by."""
    values = json.loads(text)
    captioner_config = None
    if values["captioner"] is not None:
        captioner_config = from_dict(CaptionerConfig, values["captioner"], "captioner")
    scorer_configs = [from_dict(ScorerConfig, one, f"scorers.{i}") for i, one in enumerate(values["scorers"])]
    _check(scorer_configs, captioner_config)
    return Plugins(
        captioner=None if captioner_config is None else _callable(captioner_config, "captioner"),
        captioner_config=captioner_config,
        scorers=[(config, _callable(config, f"scorers.{i}")) for i, config in enumerate(scorer_configs)],
    )


def _check(scorers: Sequence[ScorerConfig], captioner: CaptionerConfig | None) -> None:
    """Refuse columns that are reserved or given twice, and empty batches."""
    columns = [scorer.column for scorer in scorers]
    for i, column in enumerate(columns):
        if column in RESERVED or not column or column == "???":
            raise ConfigurationError(
                f"scorers.{i}.column is {column!r}; choose a name of its own, not one of {', '.join(RESERVED)}"
            )
        if column in columns[:i]:
            raise ConfigurationError(f"scorers.{i}.column is {column!r}, and an earlier scorer's, too; rename one")
    batches = {f"scorers.{i}.batch_size": scorer.batch_size for i, scorer in enumerate(scorers)}
    if captioner is not None:
        batches["captioner.batch_size"] = captioner.batch_size
    for key, size in batches.items():
        if size < 1:
            raise ConfigurationError(f"{key} is {size}; it must be 1 or more")


def _callable(plugin: Plugin, key: str) -> Any:
    """Load a plug-in and check that it can be called."""
    logger.debug("loading %s", plugin.path)
    built = build_plugin(Plugin(path=plugin.path, arguments=plugin.arguments), key)
    if not callable(built):
        raise ConfigurationError(f"{key}.path={plugin.path}: what it makes cannot be called with images and captions")
    return built


def _in_batches(
    plugin: Callable[..., Sequence[Any]],
    config: ScorerConfig | CaptionerConfig,
    what: str,
    images: Sequence[Image.Image],
    captions: Sequence[list[str]],
) -> list[Any]:
    """Call a plug-in batch by batch and check that it answers for each image."""
    results: list[Any] = []
    for start in range(0, len(images), config.batch_size):
        end = start + config.batch_size
        batch = images[start:end]
        answers = list(plugin(batch, captions[start:end]))
        if len(answers) != len(batch):
            raise ConfigurationError(
                f"{what}, {config.path}: {len(answers)} results for {len(batch)} images; return one for each"
            )
        results += answers
    return results
