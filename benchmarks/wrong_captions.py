"""Plugins of `prepare` for drawn shapes: captions of other scenes, and the agreement of images with captions."""

import random
import re
from collections.abc import Sequence

from PIL import Image

from demo.scenes import COLOURS, RELATIONS, SHAPES, caption, scenes
from demo.shape_checks import ShapesOracle


class WrongCaptions:
    """A captioner: the caption of another scene with as many objects for a share of the images, else that they have.

    The captions of the images choose the share.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[str]:
        """Caption images that have one caption each."""
        return [self._caption(text) for [text] in captions]

    def _caption(self, text: str) -> str:
        if random.Random(text).random() >= self.share:
            return text
        num = 3 if " objects " in text else 2 if any(f" {one} a " in text for one in RELATIONS) else 1
        [scene] = scenes(1, split=text, shares=(float(num == 1), float(num == 2), float(num == 3)))
        return caption(scene)


class Agreement:
    """A scorer: colours and shapes that an image shows and its caption names, intersection over union (0 to 1)."""

    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[float]:
        """Score images that have one caption each."""
        oracle, scores = ShapesOracle(), []
        for image, [text] in zip(images, captions, strict=True):
            named = {*re.findall(r"\w+", text)} & {*COLOURS, *SHAPES}
            shown = {word for one in oracle.find(image) for word in (one.colour, one.label)}
            scores.append(len(named & shown) / len(named | shown))
        return scores
