"""Numbers that people give in a notebook, checked."""

import math
import operator
from collections.abc import Sequence
from typing import Any


def whole_number(name: str, value: Any, *, least: int, most: float = math.inf) -> int:
    """A whole number in a range, whatever library's.

    Raises:
        ValueError: it is none, or outside of the range.
    """
    wanted = f"a whole number of {least} or more" if most == math.inf else f"a whole number in {least} .. {most}"
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} {value!r}: give {wanted}") from error
    if not least <= number <= most:
        raise ValueError(f"{name} {number}: give {wanted}")
    return number


def whole_pair(name: str, values: Any, *, least: int) -> tuple[int, int]:
    """Two whole numbers.

    Raises:
        ValueError: they are not two, not whole, or too small.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 2:
        raise ValueError(f"{name} {values!r}: give two whole numbers, of rows and of columns")
    first, second = (whole_number(name, value, least=least) for value in values)
    return first, second


def finite_number(name: str, value: Any) -> float:
    """A number that is neither infinite nor NaN.

    Raises:
        ValueError: it is not.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except TypeError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} {value!r}: give a finite number")
    return number


def image_size(height: int | None, width: int | None, *, default: int, factor: int) -> tuple[int, int]:
    """Height and width of images, in pixels.

    Args:
        height: as given; None is the default.
        width: likewise.
        default: of both.
        factor: pixels per latent position along one side.

    Raises:
        ValueError: they are no multiples of the factor.
    """
    height = default if height is None else whole_number("height", height, least=1)
    width = default if width is None else whole_number("width", width, least=1)
    if height % factor or width % factor:
        raise ValueError(f"size {height} x {width}: both must be multiples of {factor}")
    return height, width
