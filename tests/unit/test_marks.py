"""Marks of generated images: read back from the files, and signed."""

import datetime
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffusion.errors import ConfigurationError, MachineError
from diffusion.formats.marks import SOURCE_TYPE, Mark, c2pa_signer, save_marked
from tests.tools.image_marks import read_mark

FORMATS = ("PNG", "JPEG", "WEBP")
Key = ec.EllipticCurvePrivateKey
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
MARK = Mark(model="a <run> & é\0 ep0-ba4 ema", version="0123456789abcdef")


def pixels(file: io.BytesIO | Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_mark_is_read_back_and_the_pixels_stay(image_format: str, tmp_path: Path) -> None:
    options = {} if image_format == "PNG" else {"quality": 80}
    plain = io.BytesIO()
    IMAGE.save(plain, image_format, **options)
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        save_marked(IMAGE, file, MARK, image_format=image_format, **options)
    np.testing.assert_array_equal(pixels(files[0]), pixels(plain))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert read_mark(files[0]) == {
        "DigitalSourceType": SOURCE_TYPE,
        "AISystemUsed": "a <run> & é ep0-ba4 ema",
        "AISystemVersionUsed": MARK.version,
    }
    save_marked(IMAGE, files[0], Mark(model="run"), image_format=image_format)
    assert read_mark(files[0]) == {"DigitalSourceType": SOURCE_TYPE, "AISystemUsed": "run"}


def certificate(name: str, key: Key, issuer: str, issuer_key: Key) -> bytes:
    """A certificate in PEM; that of an issuer for itself is one of an authority."""
    is_authority, now = name == issuer, datetime.datetime.now(datetime.UTC)
    names = [
        x509.Name([x509.NameAttribute(kind, one) for kind in (NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME)])
        for one in (name, issuer)
    ]
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"), False,
    )  # fmt: skip
    usage |= {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
    builder = (
        x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not is_authority:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.fixture
def chain(tmp_path: Path) -> dict[str, Path]:
    """Root, certificates of a signer, its key, and another key."""
    files = {name: tmp_path / f"{name}.pem" for name in ("root", "certificates", "key", "another")}
    root, signer, another = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    files["root"].write_bytes(certificate("root", root, "root", root))
    files["certificates"].write_bytes(certificate("signer", signer, "root", root))
    for name, key in (("key", signer), ("another", another)):
        files[name].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    return files


def test_a_manifest_is_trusted_by_who_trusts_its_root(chain: dict[str, Path], tmp_path: Path) -> None:
    c2pa = pytest.importorskip("c2pa")
    sign = c2pa_signer(chain["certificates"], chain["key"])
    context = c2pa.Context.from_dict({"trust": {"trust_anchors": chain["root"].read_text()}})
    for image_format in FORMATS:
        save_marked(IMAGE, tmp_path / "plain", MARK, image_format=image_format)
        save_marked(IMAGE, tmp_path / "signed", MARK, image_format=image_format, sign=sign)
        np.testing.assert_array_equal(pixels(tmp_path / "signed"), pixels(tmp_path / "plain"))
        assert read_mark(tmp_path / "signed") == read_mark(tmp_path / "plain")
        content = io.BytesIO((tmp_path / "signed").read_bytes())
        with c2pa.Reader(f"image/{image_format.lower()}", content, context=context) as reader:
            assert reader.get_validation_state() == "Trusted"
            manifest = reader.get_active_manifest()
        (actions,) = (one["data"]["actions"] for one in manifest["assertions"] if one["label"] == "c2pa.actions.v2")
        assert [(one["action"], one["digitalSourceType"]) for one in actions] == [("c2pa.created", SOURCE_TYPE)]
        assert actions[0]["softwareAgent"] == {"name": MARK.model, "version": MARK.version}


def test_files_that_cannot_sign_are_named(chain: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("c2pa")
    wrong = {
        "another.pem cannot sign": (chain["certificates"], chain["another"]),
        "root.pem cannot be read: it is no private key": (chain["certificates"], chain["root"]),
        "absent.pem cannot be read: No such file": (tmp_path / "absent.pem", chain["key"]),
        "key.pem and .*key.pem cannot sign": (chain["key"], chain["key"]),
    }
    for message, files in wrong.items():
        with pytest.raises(ConfigurationError, match=message):
            c2pa_signer(*files)


def test_without_the_library_a_manifest_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "c2pa", None)
    with pytest.raises(MachineError, match="c2pa-python"):
        c2pa_signer(tmp_path, tmp_path)


@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp"])
def test_a_format_in_small_letters_is_marked_at_a_path_as_text(image_format: str, tmp_path: Path) -> None:
    save_marked(IMAGE, str(tmp_path / "a"), MARK, image_format=image_format)
    assert read_mark(tmp_path / "a")["DigitalSourceType"] == SOURCE_TYPE


@pytest.mark.parametrize("image_format", ["TIFF", "GIF", "JPG"])
def test_a_format_without_marks_is_refused(image_format: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=image_format):
        save_marked(IMAGE, tmp_path / "a", MARK, image_format=image_format)
    assert not (tmp_path / "a").exists()


def test_texts_of_several_images_stay_as_they_are(tmp_path: Path) -> None:
    info = PngInfo()
    info.add_text("prompt", "a cat")
    for name in "ab":
        save_marked(IMAGE, tmp_path / name, MARK, pnginfo=info)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
