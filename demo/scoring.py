"""How often generated images show the scenes of their captions, by the oracle."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from PIL import Image

from diffusion.evaluation.shape_checks import score
from diffusion.evaluation.shapes import COLOURS, SHAPES, Scene, caption, draw, prompts, scenes
from diffusion.models.latent_diffusion import LatentDiffusion

SEEDS_PER_PROMPT = 4


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of images that are right, 0 to 1."""

    colour: float
    shape: float
    relation: float | None = None


@dataclass(frozen=True, kw_only=True)
class DemoScores:
    """Result of the demo."""

    num_single: int
    """Images of one object."""

    single: Rates
    """Over all colour x shape pairs."""

    num_pairs: int
    """Images of two objects."""

    pairs: Rates
    """Over the relation prompts."""

    oracle: Rates
    """The oracle on real validation images."""

    oracle_shuffled: Rates
    """The same images against one another's captions: chance."""

    by_shape: dict[str, Rates] = field(default_factory=dict)
    by_colour: dict[str, Rates] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def rates(images: Sequence[Image.Image], asked: Sequence[Scene]) -> Rates:
    """Shares of images that show the colours, shapes and relations of their scenes."""
    scores = [score(image, scene) for image, scene in zip(images, asked, strict=True)]
    related = [one.relation for one in scores if one.relation is not None]
    return Rates(
        colour=sum(one.colour for one in scores) / len(scores),
        shape=sum(one.shape for one in scores) / len(scores),
        relation=sum(related) / len(related) if related else None,
    )


def oracle_rates(num: int, size: int) -> tuple[Rates, Rates]:
    """The oracle on validation images of one object, with their own captions and with shuffled ones."""
    real = [scene for scene in scenes(2 * num, split="oracle") if scene.relation is None][:num]
    images = [draw(scene, size) for scene in real]
    shuffled = list(real)
    random.Random(0).shuffle(shuffled)
    return rates(images, real), rates(images, shuffled)


def score_model(
    model: LatentDiffusion, *, guidance_scale: float, num_inference_steps: int, seeds_per_prompt: int = SEEDS_PER_PROMPT
) -> tuple[DemoScores, list[Image.Image], list[Image.Image]]:
    """Generate for every evaluation prompt, and score.

    Args:
        model: with the weights to score.
        guidance_scale: classifier-free guidance.
        num_inference_steps: DDIM steps.
        seeds_per_prompt: images of each prompt.

    Returns:
        The scores; images of one object, `seeds_per_prompt` for each prompt next to one another; images of two, half as
        many for each prompt.
    """
    single, pairs = prompts()
    pair_seeds = max(1, seeds_per_prompt // 2)
    images: list[list[Image.Image]] = []
    for asked, seed, num_seeds in ((single, 0, seeds_per_prompt), (pairs, 1_000_000, pair_seeds)):
        generated = model.generate(
            [caption(scene) for scene in asked],
            num_images_per_prompt=num_seeds,
            seed=seed,
            guidance_scale=guidance_scale,
            num_inference_steps=num_inference_steps,
            batch_size=32,
        )
        assert isinstance(generated, list)
        images.append(generated)
    asked_single = [scene for scene in single for _ in range(seeds_per_prompt)]
    asked_pairs = [scene for scene in pairs for _ in range(pair_seeds)]

    def subset(attribute: str, value: str) -> Rates:
        chosen = [i for i, scene in enumerate(asked_single) if getattr(scene.things[0], attribute) == value]
        return rates([images[0][i] for i in chosen], [asked_single[i] for i in chosen])

    own, shuffled = oracle_rates(200, model.resolution)
    scores = DemoScores(
        num_single=len(asked_single),
        single=rates(images[0], asked_single),
        num_pairs=len(asked_pairs),
        pairs=rates(images[1], asked_pairs),
        oracle=own,
        oracle_shuffled=shuffled,
        by_shape={shape: subset("shape", shape) for shape in SHAPES},
        by_colour={colour: subset("colour", colour) for colour in COLOURS},
    )
    return scores, images[0], images[1]
