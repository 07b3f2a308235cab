"""Blind comparison of models by people: pairs, votes, the page of the raters, and the statistics."""
