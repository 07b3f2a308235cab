"""Parts of a trained model beside its checkpoint: as a section of a configuration, and as options of a command."""

import argparse
from dataclasses import dataclass, field, replace

from diffusion.config.fields import check_sections, location
from diffusion.config.model import ModelConfig
from diffusion.errors import ConfigurationError


@dataclass(kw_only=True)
class FrozenPaths:
    """Other paths of the frozen parts of a trained model, which must be those of its training; and its code."""

    pretrained: str | None = location(None)
    """In place of `model.pretrained`; null: its path in training."""

    vae: str | None = location(None)
    """In place of `model.vae`; null: its path in training."""

    text_encoder: str | None = location(None)
    """In place of `model.text_encoder.path`; null: its path in training."""

    ingredients: list[str] = field(default_factory=list)
    """Import paths of ingredients of your own that the model has; others of a checkpoint are refused, not imported."""

    def check_ingredients(self, config: ModelConfig, where: str) -> None:
        """Raise a ConfigurationError if a stored configuration has ingredients that the user has not named."""
        if unnamed := sorted({one.path for one in config.ingredients} - {*self.ingredients}):
            raise ConfigurationError(
                f"{where} was trained with model.ingredients {', '.join(unnamed)}, which would run code on this "
                f"machine. If it is your own, name it: --ingredients {' '.join(unnamed)}, or frozen.ingredients of an "
                "evaluation"
            )

    def applied(self, config: ModelConfig) -> ModelConfig:
        """Copy a configuration, with these paths in place of its own."""
        text = replace(config.text_encoder, path=self.text_encoder or config.text_encoder.path)
        pretrained, vae = self.pretrained or config.pretrained, self.vae or config.vae
        return replace(config, pretrained=pretrained, vae=vae, text_encoder=text)


def add_model(parser: argparse.ArgumentParser, *, compares: bool = False, help_text: str | None = None) -> None:
    """Add arguments for a trained model: checkpoint and weights, and parts beside it, which `frozen_paths` reads.

    The parser is a `CommandParser`. A command that compares weights takes several, and by default those that there are.
    """
    parser.add_argument(
        "checkpoint",
        type="checkpoint",
        help=help_text
        or "checkpoint, run folder or its `checkpoints` folder (newest checkpoint), or a file of averaged weights",
    )
    words = "raw: training weights; ema: their average; decay-0.999: one of several averages. Default: raw"
    if compares:
        parser.add_argument("--weights", nargs="+", help=f"weights to compare. {words}, and ema if there is one")
    else:
        parser.add_argument("--weights", default="raw", help=words)
    parser.add_argument(
        "--ingredients", nargs="+", default=[], metavar="PATH", help="import paths of its own model.ingredients to run"
    )
    group = parser.add_argument_group("frozen parts, where they are not at the paths of the training")
    group.add_argument("--pretrained", metavar="FOLDER", help="folder in the diffusers layout, or hub name")
    group.add_argument("--vae", metavar="FOLDER", help="folder of the VAE, if it is not that of --pretrained")
    group.add_argument("--text-encoder", metavar="FOLDER", help="folder of the language model, if there is one")


def frozen_paths(arguments: argparse.Namespace) -> FrozenPaths:
    """Read the options of `add_model`; an empty path is a ConfigurationError."""
    named = getattr(arguments, "ingredients", [])
    paths = FrozenPaths(
        pretrained=arguments.pretrained, vae=arguments.vae, text_encoder=arguments.text_encoder, ingredients=named
    )
    check_sections(paths)
    return paths
