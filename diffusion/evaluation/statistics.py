"""Distances between two sets of features in float64: Frechet distance and squared maximum mean discrepancies.

torch-fidelity's Frechet distance agrees to 1e-8, and its MMD is that of random subsets. Here kernels are computed in
blocks, because a kernel matrix of 30,000 images has 7 GB, and CLIP-FID needs no torch-fidelity.

Shape letters: N features of one set, M of the other, D width of a feature.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Kernel = Callable[[Array, Array], Array]
"""Features [N, D] and [M, D] -> values [N, M]."""

BLOCK_ROWS = 1024
"""Rows and columns of a kernel matrix in memory at a time."""

CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
"""Bandwidth and factor of CMMD (Jayasumana et al. 2024, section 4)."""


def frechet_distance(x: Array, y: Array) -> float:
    """Squared Frechet distance of the normal distributions of two sets (Heusel et al. 2017, equation 6).

    The covariances are unbiased. The trace of the root of their product is the nuclear norm of the product of their
    roots.

    Args:
        x: features [N, D], N >= 2.
        y: features [M, D], M >= 2.
    """
    first, second = (np.cov(z, rowvar=False, dtype=np.float64) for z in (x, y))
    apart = x.mean(axis=0, dtype=np.float64) - y.mean(axis=0, dtype=np.float64)
    common = np.linalg.svd(_root(first) @ _root(second), compute_uv=False).sum()
    return float(apart @ apart + np.trace(first) + np.trace(second) - 2.0 * common)


def _root(matrix: Array) -> Array:
    """Symmetric root of a symmetric positive semi-definite matrix."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T


def kernel_distance(x: Array, y: Array) -> float:
    """KID (Binkowski et al. 2018, section 3): squared MMD with the kernel (x . y / D + 1)^3, over all pairs."""
    return squared_mmd(x, y, lambda a, b: (a @ b.T / a.shape[1] + 1.0) ** 3)


def cmmd(x: Array, y: Array) -> float:
    """CMMD (Jayasumana et al. 2024, section 4): 1000 times the squared MMD of normalised CLIP embeddings.

    The kernel is Gaussian with bandwidth 10. The estimate is unbiased (equation 3 there) and so independent of the
    number of images; the authors' program includes pairs of an image with itself, and its values are slightly larger.

    Args:
        x: features [N, D] of any length, N >= 2.
        y: features [M, D].
    """
    return CMMD_SCALE * squared_mmd(_normalised(x), _normalised(y), _gaussian)


def _gaussian(a: Array, b: Array) -> Array:
    squared = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None, :] - 2.0 * (a @ b.T)
    return np.exp(-squared.clip(min=0.0) / (2.0 * CMMD_SIGMA**2))


def squared_mmd(x: Array, y: Array, kernel: Kernel) -> float:
    """Unbiased estimate of the squared maximum mean discrepancy (Gretton et al. 2012, equation 3), over all pairs.

    Args:
        x: features [N, D], N >= 2.
        y: features [M, D], M >= 2.
        kernel: symmetric.
    """
    within = sum(_sum_of_pairs(z, kernel) / (len(z) * (len(z) - 1)) for z in (x, y))
    between = sum(kernel(rows, columns).sum() for rows in _blocks(x) for columns in _blocks(y))
    return float(within - 2.0 * between / (len(x) * len(y)))


def _sum_of_pairs(x: Array, kernel: Kernel) -> float:
    """Sum over ordered pairs of different features; each unordered pair is computed once."""
    blocks = list(_blocks(x))
    total = 0.0
    for i, rows in enumerate(blocks):
        own = kernel(rows, rows)
        total += own.sum() - np.trace(own)
        total += 2.0 * sum(kernel(rows, columns).sum() for columns in blocks[i + 1 :])
    return total


def _blocks(features: Array) -> Iterator[Array]:
    return (np.asarray(features[i : i + BLOCK_ROWS], np.float64) for i in range(0, len(features), BLOCK_ROWS))


def clip_scores(images: Array, texts: Array) -> Array:
    """CLIP score of each image and its prompt (Hessel et al. 2021, equation 1, scaled by 100 instead of 2.5).

    Args:
        images: embeddings [N, D].
        texts: embeddings [N, D].

    Returns:
        float64 [N], 0 to 100.
    """
    return 100.0 * (_normalised(images) * _normalised(texts)).sum(axis=1).clip(min=0.0)


def _normalised(features: Array) -> Array:
    exact = np.asarray(features, dtype=np.float64)
    return exact / np.linalg.norm(exact, axis=1, keepdims=True)
