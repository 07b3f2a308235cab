"""The ingredients of the recipe, one file each; `base` says what an ingredient is.

A new one is a subclass of `Ingredient` in a file of its own, named in a run by `model.ingredients`; one of this package
has a section in `config.ingredients` and stands in `INGREDIENTS`.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from diffusion.config.model import ModelConfig
from diffusion.errors import ConfigurationError
from diffusion.models.ingredients.alignment import AlignmentIngredient
from diffusion.models.ingredients.base import Call, Caller, Ingredient
from diffusion.models.ingredients.lora import LoraIngredient
from diffusion.models.ingredients.score_conditioning import ScoreConditioningIngredient
from diffusion.models.ingredients.text_adapter import TextAdapterIngredient
from diffusion.models.ingredients.token_routing import TokenRoutingIngredient
from diffusion.plugins import import_plugin

__all__ = ["INGREDIENTS", "Call", "Caller", "Ingredient", "adapt", "find_ingredients", "merged"]

INGREDIENTS = (
    TextAdapterIngredient,
    ScoreConditioningIngredient,
    TokenRoutingIngredient,
    AlignmentIngredient,
    LoraIngredient,
)
"""All ingredients of this package, in the order in which their weights stand in a model and steps ask them."""


def find_ingredients(config: ModelConfig) -> list[Ingredient]:
    """Make the ingredients of a configuration, without their modules.

    Raises:
        ConfigurationError: one of the user's cannot be imported, or is no ingredient.
    """
    sections = config.ingredient_sections
    known: list[Ingredient] = [kind(sections[kind.key]) for kind in INGREDIENTS if kind.key in sections]  # pyright: ignore
    for number, plugin in enumerate(config.ingredients):
        kind = import_plugin(plugin, key := f"model.ingredients.{number}")
        if not (isinstance(kind, type) and issubclass(kind, Ingredient)):
            raise ConfigurationError(f"{key}.path={plugin.path} is no subclass of {__name__}.Ingredient: name one")
        known.append(kind(**plugin.arguments))
    return known


def adapt(
    network: nn.Module, ingredients: Sequence[Ingredient], initial: Mapping[str, Tensor] | None, seed: int
) -> None:
    """Let the ingredients freeze or add weights, after initial weights are loaded."""
    missing = []
    if initial is not None:
        parts = {name.partition(".")[0] for name in initial}
        missing = [one.key or "ingredients" for one in ingredients if one.part and one.part not in parts]
    for ingredient in ingredients:
        ingredient.adapt(network, [one.module for one in ingredients if one.module is not None], missing, seed)


def merged(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of the equivalent model for sampling, or for another phase."""
    for ingredient in find_ingredients(config):
        weights = ingredient.merged(weights)
    return weights
