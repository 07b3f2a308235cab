"""Reader of the marks of image files."""

from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

from diffusion.formats.marks import PNG_XMP

IPTC = "{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}"


def read_mark(file: Path | str) -> dict[str, str]:
    """Properties of IPTC's extension in the XMP of an image."""
    with Image.open(file) as image:
        packet = image.info["xmp"].decode()
        assert image.format != "PNG" or image.info[PNG_XMP] == packet
    tree = ElementTree.fromstring(packet)
    return {node.tag.removeprefix(IPTC): node.text or "" for node in tree.iter() if node.tag.startswith(IPTC)}
