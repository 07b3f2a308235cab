"""Names that someone who wrote another one may have meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Those of the known names that a wrong one comes near.

    Args:
        name: what was written.
        known: what is there.

    Returns:
        The name in other letter case; else the most similar one; else those that it begins or ends, as `batch_size`
        ends `global_batch_size`; else none. In the order of `known`, each once.
    """
    folded = {one: one.casefold() for one in known}
    wrong = name.casefold()
    if same := [one for one, text in folded.items() if text == wrong]:
        return same
    if similar := difflib.get_close_matches(wrong, folded.values(), n=1, cutoff=0.75):
        return [one for one, text in folded.items() if text == similar[0]]
    return [one for one, text in folded.items() if text.startswith(f"{wrong}_") or text.endswith(f"_{wrong}")]
