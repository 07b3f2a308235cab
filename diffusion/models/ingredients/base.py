"""Base class of ingredients, and the state that they share during a call of the network.

Shape letters: B batch, C channels, H W height and width of the latent, L image tokens, K those that go through all
blocks, D width of the hidden states, E width of the time embedding.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from diffusion.models.conditioning import Conditioning
from diffusion.models.fast.norms import autocast_dtype
from diffusion.models.flops import OperationCounter
from diffusion.models.networks import Network, predict
from diffusion.models.objectives import velocity
from diffusion.models.pretrained import FrozenParts

if TYPE_CHECKING:
    from diffusion.models.latent_diffusion import Prediction


@dataclass(kw_only=True)
class Call:
    """A call of the network: what passes between the model, the ingredients and their hooks.

    It stays after the call, because recomputation runs the hooks of blocks again.
    """

    seed: int = 0
    is_training: bool = False
    """True in a training step; false in validation and sampling."""

    batch: Mapping[str, Tensor] = field(default_factory=dict)
    """The entries of `BatchKey`; empty in sampling."""

    kept: Tensor | None = None
    """int64 [B, K], ascending numbers of the tokens that go through all blocks; None: all."""

    skipped: tuple[Tensor, Tensor] | None = None
    """All tokens [B, L, D] before the blocks that some skip, and the positions of the kept ones."""

    time_vector: Tensor | None = None
    """[B, E], added to the time embedding."""

    hidden: Tensor | None = None
    """[B, K or L, D], or [B, D, h, w] in a U-Net: hidden states for a term of the loss."""


class Ingredient:
    """A part of the recipe beside network, VAE and text encoder.

    Each method has a default that does nothing. Its own weights are those of `module`, which is a child of the model
    under the name `part`.
    """

    key: ClassVar[str] = ""
    """Key of its section in the section `model`, if it has one."""

    part: ClassVar[str] = ""
    """Name of its weights in models and checkpoints, if it has any."""

    serves_training_only: ClassVar[bool] = False
    """Models for sampling are built without it."""

    wide_matrices: ClassVar[Sequence[str]] = ()
    """Names of its matrices whose inputs are as wide as a transformer's hidden states (`optimizer.base_width`)."""

    freezes_weights: ClassVar[bool] = False
    """It freezes all other weights, so that averages hold only its own."""

    name_in_exports: ClassVar[str] = ""
    """Its name in the error of single-file exports, which cannot hold it; empty if they can."""

    continues_text_encoder: bool = False
    """It takes hidden states of a CLIP text encoder before the final norm."""

    module: nn.Module | None = None
    """Trained weights, after `build`."""

    frozen: Mapping[str, nn.Module] = {}
    """Frozen parts by name, after `build`."""

    # Construction

    def build(self, network: Network, text_encoder: nn.Module, *, is_meta: bool = False) -> None:
        """Build the modules for a network and a text encoder; on the meta device without reading weights."""

    def attach(self, network: Network, caller: "Caller") -> None:
        """Register hooks, which find the current call in `caller.call`."""

    def adapt(self, network: nn.Module, parts: Sequence[nn.Module], missing: Collection[str], seed: int) -> None:
        """Change what is trained, when the initial weights are loaded.

        Args:
            network: the trained network.
            parts: modules of all ingredients.
            missing: keys of ingredients that the initial weights lack.
            seed: of random weights.
        """

    # The forward pass and the loss

    def condition(self, conditioning: Conditioning, call: Call) -> Conditioning:
        """Change the conditioning of a batch or of prompts, once for all calls of the network."""
        return conditioning

    def requested_scores(self, scores: Mapping[str, float]) -> Tensor | None:
        """Scores float32 [S] to ask for in sampling, by name; None if it takes none."""
        return None

    def prepare(self, call: Call, noised: Tensor, conditioning: Conditioning) -> None:
        """Prepare a call of the network for noised latents [B, C, H, W]."""

    def values(self, call: Call, noised: Tensor) -> dict[str, Tensor]:
        """Return values float32 [B] by name for the loss of training, after a call; they become `Prediction.values`."""
        return {}

    def error(self, error: Tensor, outputs: "Prediction") -> Tensor:
        """Change or replace the error of each sample, float32 [B], in the loss of training."""
        return error

    def loss(self, outputs: "Prediction") -> dict[str, Tensor]:
        """Return further terms of the loss of training, float32 [] each."""
        return {}

    # Operations, counted as in `models.flops`

    def operations(self, num_tokens: int) -> OperationCounter | None:
        """Count the operations on a caption before the network; a result means that the text needs gradients.

        Args:
            num_tokens: tokens of the caption.
        """
        return None

    def num_kept(self, num_tokens: int, block: int, depth: int) -> int:
        """Image tokens of `num_tokens` that a block of a transformer of `depth` gets in training."""
        return num_tokens

    # Checkpoints and exports

    def merged(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the equivalent model for sampling, or for another phase."""
        return weights

    def exported(self, weights: dict[str, Tensor], network: Network, scores: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the weights whose network gives by itself what it gave with the ingredient.

        Args:
            weights: merged weights of the model by name.
            network: the network on the meta device.
            scores: scores to ask for, by name.
        """
        return weights

    def write(self, folder: Path, frozen: FrozenParts, weights: Mapping[str, Tensor]) -> FrozenParts:
        """Write own files of an exported pipeline, and return the frozen parts to write.

        Args:
            folder: the export.
            frozen: VAE, text encoder and tokenizer.
            weights: weights of `module`.
        """
        return frozen


class Caller:
    """Calls of a network with ingredients.

    Args:
        network: the trained network, which gets the hooks of the ingredients.
        ingredients: in the order in which each step asks them.
        is_pixel: the network works on pixels, and gives the image (`velocity`).
    """

    def __init__(self, network: Network, ingredients: Sequence[Ingredient], *, is_pixel: bool = False) -> None:
        self.call = Call()
        self._network, self._ingredients, self.is_pixel = network, ingredients, is_pixel
        for ingredient in ingredients:
            ingredient.attach(network, self)

    def condition(self, conditioning: Conditioning, call: Call) -> Conditioning:
        """Let the ingredients change the conditioning by the frozen text encoder."""
        for ingredient in self._ingredients:
            conditioning = ingredient.condition(conditioning, call)
        return conditioning

    def __call__(
        self, noised: Tensor, timesteps: Tensor, conditioning: Conditioning, call: Call | None = None
    ) -> Tensor:
        """Prediction for noised latents, [B, C, H, W] each; in the precision of the weights unless there is autocast.

        Args:
            noised: x_t, [B, C, H, W].
            timesteps: [B] or [].
            conditioning: result of `condition`.
            call: of training or validation; None: of sampling.
        """
        exact = noised
        if autocast_dtype(noised) is None:
            dtype = next(self._network.parameters()).dtype
            noised, conditioning = noised.to(dtype), conditioning.to(dtype)
        self.call = call = call or Call()
        for ingredient in self._ingredients:
            ingredient.prepare(call, noised, conditioning)
        prediction = predict(self._network, noised, timesteps, conditioning)
        return velocity(exact, prediction, timesteps) if self.is_pixel else prediction
