"""Configuration of the ingredients (`diffusion.models.ingredients`), beside one another: a section each.

They stand here and not beside their networks, because commands that only read files load no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from diffusion.config.data import Representation
from diffusion.config.fields import Plugin, bounded, location
from diffusion.errors import ConfigurationError

if TYPE_CHECKING:
    from diffusion.config.schema import Config

MAX_DEVIATIONS = 16.0
"""Standard deviations after which the features of scores repeat."""


class IngredientConfig:
    """Section of an ingredient."""

    @property
    def inputs(self) -> Any:
        """Inputs that the trained weights expect, the same in all phases."""
        return None

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Describe what contradicts it in other sections."""
        return iter(())


@dataclass(kw_only=True)
class TextAdapterConfig(IngredientConfig):
    """Trained layers between the frozen text encoder and the network."""

    layers: int = bounded(2, min=1)
    """Layers like those of the text encoder; at first they change nothing."""

    width: int | None = bounded(None, min=1)
    """Width of the text for the network, after a language model; null: that of the language model."""

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Describe what contradicts it in other sections."""
        architecture, encoder = config.model.architecture, config.model.text_encoder
        if architecture.is_extended:
            yield (
                f"model.text_adapter continues one text encoder, and model.architecture {architecture.value} has two. "
                "Remove model.text_adapter, or choose another architecture."
            )
        if encoder.path is None and self.width is not None:
            yield (
                f"model.text_adapter.width is {self.width}, but CLIP's adapter has CLIP's width. Remove it, or set "
                "model.text_encoder.path."
            )
        if encoder.path is None and config.data.text_embeddings:
            yield (
                "data.text_embeddings is true with model.text_adapter, which continues CLIP before its final norm, and "
                "what is stored comes after it. Set data.text_embeddings=false."
            )


@dataclass(kw_only=True)
class TokenRoutingConfig(IngredientConfig):
    """Token routing (TREAD, Krause et al. 2025): in training, image tokens skip blocks of a transformer."""

    share: float = bounded(0.5, min=0, below=1)
    """Share of an image's tokens that skip the blocks, drawn anew for each sample and step."""

    first: int = 2
    """First block that they skip, counted from 0, or from the end if negative."""

    last: int = -2
    """Last block that they skip; -2 is the last but one."""

    def num_kept(self, num_tokens: int) -> int:
        """Tokens of `num_tokens` that go through all blocks."""
        return num_tokens - int(self.share * num_tokens)

    def blocks(self, depth: int) -> range:
        """Numbers of the skipped blocks of a network of `depth`; a ConfigurationError if there are none."""
        within = all(-depth <= number < depth for number in (self.first, self.last))
        if not within or self.first % depth > self.last % depth:
            raise ConfigurationError(
                f"model.token_routing: from block {self.first} to block {self.last} there is none in a transformer of "
                f"{depth} blocks. Change token_routing.first or token_routing.last."
            )
        return range(self.first % depth, self.last % depth + 1)

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Describe what contradicts it in other sections."""
        if not config.model.architecture.is_transformer:
            yield (
                f"model.token_routing is set with model.architecture {config.model.architecture.value}, a U-Net, whose "
                "blocks take whole images. Set model.architecture=transformer_m, or model.token_routing=null."
            )
        yield from _recomputed_states(config, "model.token_routing")


@dataclass(kw_only=True)
class ScoreColumn:
    """A score of the training images."""

    name: str = MISSING
    """Key in the samples' metadata: column of a scorer of `prepare`, or of the source."""

    mean: float = 0.0
    """Mean of the scores, by which the model takes them: (score - mean) / std."""

    std: float = bounded(1.0, above=0)
    """Standard deviation of the scores. Features repeat after 16 of them."""


@dataclass(kw_only=True)
class ScoreConditioningConfig(IngredientConfig):
    """Conditioning on scores of the training images (MIRO, Dufour et al. 2025)."""

    columns: list[ScoreColumn] = field(default_factory=list)
    """The scores, in the order of the data's `scores`."""

    dropout: float = bounded(0.1, min=0, max=1)
    """Probability that a score is replaced by a learned "none" in training, for each score by itself."""

    @property
    def names(self) -> list[str]:
        """Names of the scores."""
        return [column.name for column in self.columns]

    @property
    def inputs(self) -> list[ScoreColumn]:
        """Order and normalisation of the scores."""
        return self.columns

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if not self.columns or len(set(self.names)) < len(self.names):
            yield f"{key}.columns is {self.names}, but must name at least one score, and none twice."

    def out_of_range(self, scores: Mapping[str, float]) -> Iterator[str]:
        """Describe requested scores that would have the features of others."""
        for column in self.columns:
            score = scores.get(column.name, column.mean)
            if abs(score - column.mean) > MAX_DEVIATIONS * column.std:
                yield (
                    f"{column.name}={score:g} is more than {MAX_DEVIATIONS:g} standard deviations ({column.std:g}) "
                    f"from the mean ({column.mean:g}) of model.score_conditioning.columns, and means another score"
                )


@dataclass(kw_only=True)
class AlignmentConfig(IngredientConfig):
    """Alignment of hidden states with the features of a frozen image encoder (REPA; Yu et al. 2025)."""

    path: str = location(MISSING)
    """Folder of a vision transformer in the layout of transformers, such as DINOv2."""

    weight: float = bounded(0.5, above=0)
    """Weight of the mean cosine similarity in the loss."""

    block: int | None = bounded(None, min=0)
    """Block of a transformer, counted from 0, whose output is aligned; null: the last of the first third. Of a U-Net
    it is always the middle."""

    width: int = bounded(2048, min=1)
    """Width of the trained projection."""

    def block_of(self, depth: int) -> int:
        """Number of the aligned block of a transformer of `depth` blocks; a ConfigurationError if it has none such."""
        block = max(depth // 3 - 1, 0) if self.block is None else self.block
        if block >= depth:
            raise ConfigurationError(f"model.alignment.block is {block} in a transformer of {depth} blocks. Lower it.")
        return block

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Describe what contradicts it in other sections."""
        if config.model.network.get("mid_block_type", "") is None:
            yield (
                "model.network.mid_block_type is null with model.alignment, which aligns the middle of a U-Net. Remove "
                "one of them."
            )
        if config.model.lora is not None:
            yield "model.alignment trains a new projection, which model.lora does not. Remove one of them."
        if config.data.representation is Representation.latents:
            yield (
                "model.alignment is set with data.representation latents, and the image encoder needs images. Set "
                "data.representation=images and data.local of prepared data, or model.alignment=null."
            )
        yield from _recomputed_states(config, "model.alignment")


def _recomputed_states(config: "Config", key: str) -> Iterator[str]:
    """Describe a graph of a whole transformer in which hidden states would be kept within recomputed blocks."""
    is_recomputed = config.model.architecture.is_transformer and config.trainer.activation_checkpointing
    if is_recomputed and config.performance.compilation == "unet":
        yield (
            f"performance.compilation is unet with trainer.activation_checkpointing and {key}, which keeps hidden "
            "states between blocks. Set performance.compilation=blocks."
        )


@dataclass(kw_only=True)
class LoraConfig(IngredientConfig):
    """Low-rank adaptation (Hu et al. 2021): trains low-rank matrices beside frozen weights of the network."""

    rank: int = bounded(16, min=1)
    """Rank of the matrices."""

    alpha: float = bounded(16.0, above=0)
    """The output of the matrices is multiplied by alpha / rank."""

    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    """Adapted layers of the network, by the ends of their names; by default those of a U-Net's attention. Those of a
    transformer's are img_qkv_proj, txt_kv_proj and to_out.0."""

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Describe what contradicts it in other sections."""
        if config.init_from is None:
            yield "model.lora adapts trained weights. Set init_from.checkpoint, or model.lora=null."


@dataclass(kw_only=True)
class Ingredients:
    """The sections of all ingredients; `models.ingredients` lists what they build."""

    text_adapter: TextAdapterConfig | None = None
    """Train layers behind the text encoder, too; null: none. Not with SDXL, or with CLIP's stored embeddings; with
    `lora` they stay as they are."""

    token_routing: TokenRoutingConfig | None = None
    """Let image tokens skip blocks in training; null: none. Transformers only."""

    score_conditioning: ScoreConditioningConfig | None = None
    """Condition the network on scores of the images, too; null: do not. With `lora` what was learned stays."""

    alignment: AlignmentConfig | None = None
    """Align the network with a frozen image encoder in training; null: do not. Needs images; not with `lora`."""

    lora: LoraConfig | None = None
    """Train LoRA matrices on top of `init_from`; null: train all weights."""

    ingredients: list[Plugin] = field(default_factory=list)
    """Ingredients of your own, such as a term of the loss: subclasses of `diffusion.models.ingredients.Ingredient`."""

    @property
    def ingredient_sections(self) -> dict[str, IngredientConfig]:
        """Sections of the ingredients that are configured, by key."""
        found = {field.name: getattr(self, field.name) for field in fields(Ingredients)}
        return {key: section for key, section in found.items() if isinstance(section, IngredientConfig)}

    @property
    def adapted_text_width(self) -> int | None:
        """Width of the text for the network, unless it is that of the text encoder."""
        return None if self.text_adapter is None else self.text_adapter.width

    @property
    def score_names(self) -> list[str]:
        """Names of the scores that the network is conditioned on."""
        return [] if self.score_conditioning is None else self.score_conditioning.names

    def token_counts(self, num_tokens: int) -> set[int]:
        """Tokens that blocks get in training of an image of `num_tokens`."""
        return {num_tokens} | ({self.token_routing.num_kept(num_tokens)} if self.token_routing is not None else set())
