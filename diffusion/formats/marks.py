"""Marks of generated images: XMP by IPTC's vocabulary, and signed C2PA manifests."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffusion.errors import ConfigurationError, MachineError

SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
"""IPTC's term for images that a trained model generated."""

PNG_XMP = "XML:com.adobe.xmp"
"""Keyword of XMP in PNG."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Origin of a generated image."""

    model: str
    """Name of the model."""

    version: str = ""
    """Hash of its weights (`pretrained.weights_identity`), if known."""

    @property
    def xmp(self) -> str:
        """XMP packet with DigitalSourceType, AISystemUsed and AISystemVersionUsed of IPTC 2025.1; it has no date."""
        values = {"DigitalSourceType": SOURCE_TYPE, "AISystemUsed": self.model, "AISystemVersionUsed": self.version}
        texts = {name: escape("".join(filter(str.isprintable, value))) for name, value in values.items() if value}
        elements = "".join(f"<Iptc4xmpExt:{name}>{text}</Iptc4xmpExt:{name}>" for name, text in texts.items())
        return (
            '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
            '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
            f'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/">{elements}</rdf:Description></rdf:RDF>'
            '</x:xmpmeta><?xpacket end="w"?>'
        )


Sign = Callable[[bytes, str, Mark], bytes]
"""Returns the bytes of an image file, given with its format, with a signed manifest."""


def save_marked(
    image: Image.Image,
    path: str | Path,
    mark: Mark,
    *,
    image_format: str = "PNG",
    sign: Sign | None = None,
    **options: Any,
) -> None:
    """Write a generated image with its mark as PNG, JPEG or WEBP, with options of Pillow's writer.

    The pixels are those of a file without a mark. Unless it is signed, the file depends on the arguments only.

    Raises:
        ValueError: it is another format, which would have no mark.
    """
    if (image_format := image_format.upper()) not in ("PNG", "JPEG", "WEBP"):
        raise ValueError(f"image_format {image_format}: choose PNG, JPEG or WEBP")
    if image_format == "PNG":
        options["pnginfo"] = info = copy.deepcopy(options.get("pnginfo")) or PngInfo()
        info.add_itxt(PNG_XMP, mark.xmp)
    else:
        options["xmp"] = mark.xmp.encode()
    content = io.BytesIO()
    image.save(content, image_format, **options)
    Path(path).write_bytes(sign(content.getvalue(), image_format, mark) if sign else content.getvalue())


def c2pa_signer(certificates: Path, key: Path) -> Sign:
    """Build the signer of C2PA manifests, which say what the mark says.

    Args:
        certificates: PEM file of the certificate of the key and those above it, without the root.
        key: PEM file of a private key without a password: EC, Ed25519 or RSA.

    Raises:
        ConfigurationError: a file cannot be read, or the certificate is not the key's or not for signing.
        MachineError: c2pa-python is not installed.
    """
    try:
        import c2pa
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            load_pem_private_key,
        )
    except ImportError as error:
        raise MachineError("manifests need the package c2pa-python; uv pip install -e '.[c2pa]'") from error
    try:
        loaded, chain = load_pem_private_key(key.read_bytes(), None), certificates.read_bytes()
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "it is no private key in PEM without a password"
        raise ConfigurationError(f"{getattr(error, 'filename', None) or key} cannot be read: {reason}") from error
    if isinstance(loaded, ec.EllipticCurvePrivateKey):
        algorithm = {256: "es256", 384: "es384"}.get(loaded.key_size, "es512")
    else:
        algorithm = "ed25519" if isinstance(loaded, ed25519.Ed25519PrivateKey) else "ps256"
    context = c2pa.Context.from_dict({"builder": {"thumbnail": {"enabled": False}}})

    def sign(content: bytes, image_format: str, mark: Mark) -> bytes:
        agent = {"name": mark.model, **({"version": mark.version} if mark.version else {})}
        created = {"action": "c2pa.created", "digitalSourceType": SOURCE_TYPE, "softwareAgent": agent}
        assertion = {"label": "c2pa.actions.v2", "data": {"actions": [created]}, "created": True}
        manifest = {"claim_generator_info": [{"name": "diffusion"}], "assertions": [assertion]}
        signed = io.BytesIO()
        with c2pa.Builder(manifest, context=context) as builder:
            builder.sign(signer, f"image/{image_format.lower()}", io.BytesIO(content), signed)
        return signed.getvalue()

    try:
        secret = loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        signer = c2pa.Signer.from_info(c2pa.C2paSignerInfo(algorithm, chain, secret, None))
        content = io.BytesIO()
        Image.new("RGB", (1, 1)).save(content, "PNG")
        sign(content.getvalue(), "PNG", Mark(model="test"))
    except c2pa.C2paError as error:
        raise ConfigurationError(f"{certificates} and {key} cannot sign: {error}") from error
    return sign
