"""Sources of images: which kind a path or URL is, and names that keep the keys of several sources apart.

The key of an image is the name of its source, a slash, and its path in the source. The name is the last part of the
path; of sources that share it the second gets `~2`, the third `~3`, in the order given.
"""

from diffusion.preparation.sources.base import Source
from diffusion.preparation.sources.detection import from_description, open_sources

__all__ = ["Source", "from_description", "open_sources"]
