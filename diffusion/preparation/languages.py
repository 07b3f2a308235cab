"""Scorer: the language of the captions, by py3langid's naive Bayes model over byte n-grams, offline.

    scorers:
      - path: diffusion.preparation.languages.CaptionLanguage
        column: language

Captions are short, and a word such as "radio" belongs to many languages. So the candidates are the common written
languages, and the expected one has a prior: it is chosen unless another is several times likelier.
"""

import math
from collections.abc import Sequence

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from diffusion.errors import ConfigurationError

COMMON = (
    *("ar", "bg", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "he", "hi", "hu", "id", "it"),
    *("ja", "ko", "nl", "no", "pl", "pt", "ro", "ru", "sv", "th", "tr", "uk", "vi", "zh"),
)
"""Default candidates, ISO 639-1."""

SEVERAL = "mul"
"""Code of ISO 639-2 for an image whose captions are in several languages."""


class CaptionLanguage:
    """Language of an image's captions."""

    reads_images = False

    def __init__(self, expected: str = "en", prior: float = 3.0, languages: Sequence[str] = COMMON) -> None:
        """Load the model, which is part of the library.

        Args:
            expected: language of most captions, ISO 639-1.
            prior: odds of the expected language to each other one before the caption is read; 1 is none.
            languages: candidates, ISO 639-1; `expected` must be among them.

        Raises:
            ConfigurationError: a language is unknown, `expected` is not among them, or the prior is out of range.
        """
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        unknown = sorted(set(languages) - set(self._identifier.labels))
        if unknown:
            raise ConfigurationError(f"languages: {', '.join(unknown)}: the model does not know them; remove them")
        if expected not in languages:
            raise ConfigurationError(
                f"expected: {expected!r} is not among the languages {', '.join(languages)}; add it"
            )
        if not 1 <= prior < math.inf:
            raise ConfigurationError(f"prior is {prior}; it must be finite, and at least 1")
        self._identifier.set_languages(list(languages))
        self._expected, self._prior = expected, prior

    def __call__(self, images: Sequence[None], captions: Sequence[list[str]]) -> list[str | None]:
        """Return the language of each image's captions; `mul` for several, None where none has a letter."""
        found = [{self.of(text) for text in texts} - {None} for texts in captions]
        return [SEVERAL if len(languages) > 1 else next(iter(languages), None) for languages in found]

    def of(self, caption: str) -> str | None:
        """Return the language of one caption, or None if it has no letter."""
        if not any(letter.isalpha() for letter in caption):
            return None
        ranked = self._identifier.rank(caption)
        likeliest, probability = ranked[0]
        return self._expected if self._prior * dict(ranked)[self._expected] >= probability else likeliest
