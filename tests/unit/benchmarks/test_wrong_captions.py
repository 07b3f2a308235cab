"""Captions of other scenes, and scores that separate them from right ones."""

from statistics import fmean

from benchmarks.wrong_captions import Agreement, WrongCaptions
from demo.scenes import caption, draw, scenes


def test_scores_separate_wrong_captions_from_right_ones() -> None:
    drawn = scenes(200, shares=(0.3, 0.35, 0.35))
    images, texts = [draw(scene, 64) for scene in drawn], [[caption(scene)] for scene in drawn]
    captions = WrongCaptions(0.5)(images, texts)
    is_right = [[new] == text for new, text in zip(captions, texts, strict=True)]
    assert 0.4 < fmean(is_right) < 0.6
    assert all((" objects " in new) == (" objects " in text) for new, [text] in zip(captions, texts, strict=True))
    scores = Agreement()(images, [[new] for new in captions])
    right, wrong = ([one for one, kept in zip(scores, is_right, strict=True) if kept is of] for of in (True, False))
    assert fmean(right) > 0.98
    assert fmean(wrong) < 0.5
