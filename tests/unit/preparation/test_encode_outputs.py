"""Encoded data sets beyond the plain one: several resolutions, aspect ratios, text embeddings, growth, takedown."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xxhash
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion import storage
from diffusion.config.data import ImageSize, Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.encoded import EncodedManifest, check_encoded
from diffusion.datasets.loader import train_loader
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import write_json
from diffusion.formats.data_set import PreparedManifest
from diffusion.formats.shards import (
    encode_sample,
    encode_shard,
    read_index,
    read_shard,
    write_index,
)
from diffusion.models.pretrained import load_language_model
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.encoding.output import Output
from diffusion.preparation.takedown import take_down
from tests.tools.language_models import write_language_model
from tests.tools.written_data import (
    PREPARED,
    append_prepared,
    data_config,
    encoded_manifest,
    png,
    prepared_sample,
    smooth_image,
    tokenize,
    write_prepared,
    write_prepared_manifest,
)
from tests.unit.preparation.test_encode import EMPTY_IDS, build_vae, digests, read, run

MODELS = EncodingModels(
    vae=build_vae(), vae_identity="vae-0", tokenize=tokenize, tokenizer_identity="tokenizer-0", empty_ids=EMPTY_IDS
)


def text_encoder() -> CLIPTextModel:
    torch.manual_seed(3)
    config = CLIPTextConfig(
        vocab_size=128, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=5,
    )  # fmt: skip
    return CLIPTextModel(config).eval()


def grow(prepared: Path, first: int, number: int) -> None:
    """Append shards of three samples to prepared data."""
    samples = [prepared_sample("source", i) for i in range(first, first + number)]
    append_prepared(prepared / "train/32-64", samples, per_shard=3)


def erase(prepared: Path, *indices: int) -> None:
    """Remove samples of prepared data: marked, and blanked in shards of new names."""
    folder = prepared / "train/32-64"
    marks = prepared / "withdrawn.json"
    known = json.loads(marks.read_text())["train/32-64"] if marks.is_file() else []
    write_json(marks, {"train/32-64": sorted({*known, *indices})})
    entries, first = read_index(folder).shards, 0
    for number, entry in enumerate(entries):
        inside = {index - first for index in indices if first <= index < first + entry.num_samples}
        first += entry.num_samples
        if inside:
            samples = read_shard(folder, entry)
            for i in inside:
                blank = {**read(folder)[first - entry.num_samples + i], "image": b"", "captions": ["withdrawn"]}
                samples[i] = encode_sample(blank, PREPARED)
            content, entries[number] = encode_shard(samples, f"shard.{number:05}.r1.mds", entry.format)
            (folder / entries[number].raw.name).write_bytes(content)
    write_index(folder, entries)
    write_prepared_manifest(prepared)


def keys(folder: Path) -> list[str]:
    return [sample["key"] for sample in read(folder)]


def test_several_resolutions_are_those_of_one_each(tmp_path: Path) -> None:
    write_prepared(tmp_path / "prepared", {"16-32": 3, "32-64": 9})
    manifests = encode(tmp_path / "prepared", tmp_path / "out", models=MODELS, resolutions=[32, 16], batch_size=4)
    assert [manifest.resolution for manifest in manifests] == [32, 16]
    assert [manifest.counts["train"] for manifest in manifests] == [{"32-64": 9}, {"16-32": 3, "32-64": 9}]
    for side in (16, 32):
        run(tmp_path / "prepared", tmp_path / "alone" / str(side), resolution=side)
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")
    shutil.rmtree(tmp_path / "out" / "16")
    encode(tmp_path / "prepared", tmp_path / "out", models=MODELS, resolutions=[32, 16], batch_size=4)
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")
    with pytest.raises(ConfigurationError, match="--resolution 16 16: give each once"):
        encode(tmp_path / "prepared", tmp_path / "twice", models=MODELS, resolutions=[16, 16])


def test_aspect_ratio_buckets_are_encoded_at_their_size(tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    sizes = {"32x32": [(40, 36)], "24x48": [(60, 34), (64, 33)], "48x24": [(34, 60)]}
    for bucket, of_bucket in sizes.items():
        images = [png(smooth_image(i, width, height)) for i, (width, height) in enumerate(of_bucket)]
        samples = [prepared_sample(bucket, i, data=image) for i, image in enumerate(images)]
        append_prepared(prepared / "train" / bucket, samples, per_shard=8)
    (manifest,) = encode(prepared, tmp_path / "out", models=MODELS)
    assert manifest.sizes == {"32x32": [32, 32], "24x48": [24, 48], "48x24": [48, 24]}
    assert manifest.counts == {"train": {"24x48": 2, "32x32": 1, "48x24": 1}}
    assert read(tmp_path / "out/train/24x48")[0]["latent_mean"].shape == (4, 12, 24)
    fitting: dict[str, Any] = {"needs_logvar": True, "vae_identity": "vae-0"}
    check_encoded(manifest, where="out/train/24x48", size=ImageSize(24, 48), **fitting)
    with pytest.raises(DataError, match="resolution: 48 x 24 there, 24 x 48 here"):
        check_encoded(manifest, where="out/train/48x24", size=ImageSize(24, 48), **fitting)
    write_prepared(tmp_path / "odd", {"33x32": 1})
    with pytest.raises(ConfigurationError, match="33 x 32 is not a multiple of 2"):
        encode(tmp_path / "odd", tmp_path / "no", models=MODELS)
    write_prepared(tmp_path / "squares", {"32-64": 1})
    with pytest.raises(ConfigurationError, match="--resolution is missing: the images of 32-64"):
        encode(tmp_path / "squares", tmp_path / "no", models=MODELS)


def test_growth_brings_a_larger_aspect_ratio_bucket(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    for bucket, resolution in (("24x32", 28), ("32x32", 32)):
        append_prepared(prepared / "train" / bucket, [prepared_sample(bucket, i) for i in range(3)], per_shard=3)
        (manifest,) = encode(prepared, out, models=MODELS)
        assert manifest.resolution == resolution
    encode(prepared, tmp_path / "anew", models=MODELS)
    assert digests(out) == digests(tmp_path / "anew")


def test_text_embeddings(tmp_path: Path) -> None:
    write_prepared(tmp_path / "prepared", {"32-64": 5}, num_captions=3)
    encoder, out = text_encoder(), tmp_path / "out"
    models = EncodingModels(**{**vars(MODELS), "text_encoder": encoder, "text_encoder_identity": "text-0"})
    ids = [list(range(5)), [9, 8, 7, 6, 5], [1, 1, 1, 1, 1]]
    models = EncodingModels(**{**vars(models), "tokenize": lambda captions: np.array(ids[: len(captions)], np.int32)})
    (manifest,) = encode(tmp_path / "prepared", out, models=models, resolutions=[32], batch_size=4)
    with torch.no_grad():
        expected = encoder(torch.tensor(ids))[0]
    for sample in read(out / "train/32-64"):
        assert sample["text_embeddings"].dtype == np.float16
        assert sample["text_embeddings"].shape == (3, 5, 8)
        np.testing.assert_allclose(sample["text_embeddings"], expected.numpy(), rtol=2e-3, atol=2e-3)
    fitting: dict[str, Any] = {"where": "out/train/32-64", "size": ImageSize(32, 32), "needs_logvar": True}
    assert encoded_manifest(out / "train/32-64") == manifest
    check_encoded(manifest, text_encoder_identity="text-0", **fitting)
    with pytest.raises(DataError, match="text encoder: text-0 there, text-1 here"):
        check_encoded(manifest, text_encoder_identity="text-1", **fitting)
    (plain,) = encode(tmp_path / "prepared", tmp_path / "plain", models=MODELS, resolutions=[32])
    check_encoded(plain, **fitting)
    with pytest.raises(DataError, match="text encoder: no text embeddings there, text-0 here"):
        check_encoded(plain, text_encoder_identity="text-0", **fitting)
    with pytest.raises(DataError, match="code: other there"):
        check_encoded(EncodedManifest(**{**vars(plain), "code": "other"}), **fitting)
    with pytest.raises(DataError, match="text_encoder"):
        encode(tmp_path / "prepared", out, models=MODELS, resolutions=[32], batch_size=4)


@pytest.mark.parametrize("kind", ["clip", "t5"])
def test_stored_text_embeddings_are_read_with_the_caption_that_is_chosen(tmp_path: Path, kind: str) -> None:
    if kind == "clip":
        encoder = text_encoder()
    else:
        encoder = load_language_model(str(write_language_model(tmp_path / "t5", "t5")), pad_token_id=0).eval()
    write_prepared(tmp_path / "prepared", {"32-64": 8}, num_captions=3)
    ids = np.arange(15, dtype=np.int32).reshape(3, 5)
    changes = {"text_encoder": encoder, "text_encoder_identity": "text-0", "tokenize": lambda captions: ids}
    encode(
        tmp_path / "prepared", tmp_path / "out", models=EncodingModels(**{**vars(MODELS), **changes}), resolutions=[32]
    )
    with torch.no_grad():
        expected = encoder(torch.from_numpy(ids).long())[0].half()
    settings = {"representation": Representation.latents, "resolution": 32, "text_embeddings": True}
    config = data_config(tmp_path / "out" / "train", "32-64", **settings)
    batch = next(iter(train_loader(config, seed=1, tokenize=None)))
    chosen = batch[BatchKey.TOKEN_IDS][:, 0] // 5
    assert len(set(chosen.tolist())) > 1
    torch.testing.assert_close(batch[BatchKey.TEXT_EMBEDDING], expected[chosen], rtol=2e-3, atol=2e-3)
    encode(tmp_path / "prepared", tmp_path / "plain", models=MODELS, resolutions=[32])
    with pytest.raises(DataError, match=r"data\.text_embeddings"):
        train_loader(data_config(tmp_path / "plain" / "train", "32-64", **settings), seed=1, tokenize=None)


def test_what_prepared_data_grew_by_is_added(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    grow(prepared, 0, 10)
    run(prepared, out)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.rglob("*.mds")}
    assert len(before) == 4
    grow(prepared, 10, 10)
    manifest = run(prepared, out)
    assert manifest.counts == {"train": {"32-64": 20}}
    assert keys(out / "train/32-64") == keys(prepared / "train/32-64")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    run(prepared, tmp_path / "anew")
    assert digests(out) == digests(tmp_path / "anew")
    counts = [[shard.num_samples for shard in read_index(root / "train/32-64").shards] for root in (prepared, out)]
    assert counts[0] == counts[1], "shards begin where the prepared ones begin"
    shutil.rmtree(prepared)
    grow(prepared, 40, 20)
    with pytest.raises(DataError, match="train/32-64"):
        run(prepared, out)


@pytest.mark.parametrize("kind", ["rewritten", "without hashes"])
def test_other_samples_in_shards_of_the_same_size_are_other_data(tmp_path: Path, kind: str) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    image = prepared_sample("source", 0)
    samples = [image, {**image, "key": "source/1"}]
    for listed in (samples, samples[::-1]):
        shutil.rmtree(prepared, ignore_errors=True)
        append_prepared(prepared / "train/32-64", listed, per_shard=2)
        if kind == "without hashes":
            index = prepared / "train/32-64/index.json"
            content = json.loads(index.read_text())
            content["shards"][0]["raw_data"]["hashes"] = {}
            write_json(index, content)
            write_prepared_manifest(prepared)
        elif listed is not samples:
            erase(prepared, 0)
        if listed is samples:
            run(prepared, out)
            run(prepared, out)
    with pytest.raises(DataError, match="train/32-64"):
        run(prepared, out)


@pytest.mark.parametrize(("prepared", "out"), [("data", "data/train/latents"), ("data/prepared", "data")])
def test_folders_within_one_another(tmp_path: Path, prepared: str, out: str) -> None:
    grow(tmp_path / prepared, 0, 3)
    before = digests(tmp_path)
    with pytest.raises(ConfigurationError, match=out):
        run(tmp_path / prepared, tmp_path / out)
    assert digests(tmp_path) == before


def test_images_of_another_conversion_are_another_encoding(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    grow(prepared, 0, 6)
    run(prepared, out)
    grow(prepared, 6, 3)
    manifest = PreparedManifest.read(prepared)
    manifest.settings["convert_to_srgb"] = True
    manifest.write(prepared)
    before = digests(out)
    with pytest.raises(DataError, match="convert_to_srgb"):
        run(prepared, out)
    assert digests(out) == before
    content = json.loads((out / "manifest.json").read_text())
    assert content.pop("convert_to_srgb") is False
    write_json(out / "manifest.json", content)
    with pytest.raises(DataError, match="convert_to_srgb"):  # Earlier versions do not say it.
        run(prepared, out)


def test_removed_samples_keep_their_position_and_are_marked(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    grow(prepared, 0, 20)
    erase(prepared, 3)
    run(prepared, out)
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/32-64": [3]}
    assert not read(out / "train/32-64")[3]["latent_mean"].any()
    shards = digests(out / "train")
    erase(prepared, 7)
    write_json(out / "withdrawn.json", {"train/32-64": [3, 11]})
    write_json(out / "removed.json", [xxhash.xxh3_128_hexdigest(b"source/11"), xxhash.xxh3_128_hexdigest(b"source/25")])
    run(prepared, out)
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/32-64": [3, 7, 11]}
    assert digests(out / "train") == shards
    grow(prepared, 20, 10)
    erase(prepared, 22)
    run(prepared, out)
    assert keys(out / "train/32-64") == keys(prepared / "train/32-64")
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/32-64": [3, 7, 11, 22, 25]}
    latents = [sample["latent_mean"] for sample in read(out / "train/32-64")]
    assert [i for i, latent in enumerate(latents) if not latent.any()] == [3, 22, 25]
    assert not (out / "damaged.json").exists(), "what was removed is not damaged"


def run_without_end(prepared: Path, out: Path) -> None:
    """Encode all shards, as a run that is killed before it writes the indexes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "finish", lambda self, removed: None)
        run(prepared, out)


@pytest.mark.parametrize("erased", [True, False])
def test_samples_that_are_removed_during_an_encoding_are_blank(tmp_path: Path, erased: bool) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    grow(prepared, 0, 6)
    run(prepared, out)
    grow(prepared, 6, 6)
    run_without_end(prepared, out)
    take_down(str(out), ["source/2", "source/8"], erase=erased)
    run(prepared, out)
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/32-64": [2, 8]}
    samples = read(out / "train/32-64")
    assert len(samples) == 12
    blank = [i for i, sample in enumerate(samples) if not sample["latent_mean"].any()]
    assert blank == ([2, 8] if erased else [8]), "a mark leaves a sample of a finished shard as it is"


@pytest.mark.parametrize("earlier", [False, True], ids=["this version", "an earlier one"])
def test_keys_are_found_without_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    grow(prepared, 0, 12)
    run(prepared, out)
    if earlier:  # Hashes of keys are made of the shards, once.
        shutil.rmtree(out / "positions")
        take_down(str(out), ["source/7"])
    monkeypatch.setattr("diffusion.storage.read", reading := Mock(side_effect=storage.read))
    take_down(str(out), ["source/2", "source/7"])
    assert not any(call.args[0].endswith(".mds") for call in reading.call_args_list)
    take_down(str(out), [], erase=True)
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/32-64": [2, 7]}
    assert [i for i, key in enumerate(keys(out / "train/32-64")) if not key] == [2, 7]
    assert take_down(str(out), ["source/3"], erase=True).num_rewritten == 1, "what was erased is not read again"


def test_a_shard_that_is_too_large_is_cut(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    append_prepared(prepared / "train/32-64", [prepared_sample("source", i) for i in range(9)], per_shard=9)
    (whole,) = encode(prepared, tmp_path / "whole", models=MODELS, resolutions=[32], batch_size=4)
    options: dict[str, Any] = {"models": MODELS, "resolutions": [32], "batch_size": 4, "max_shard_bytes": 2**13}
    (manifest,) = encode(prepared, out, **options)
    assert manifest == whole
    assert [len(read_index(root / "train/32-64").shards) for root in (tmp_path / "whole", out)] == [1, 9]
    assert all(path.stat().st_size <= 2**13 for path in out.rglob("*.mds"))
    assert keys(out / "train/32-64") == keys(tmp_path / "whole/train/32-64")
    before = digests(out)
    encode(prepared, out, **options)
    assert digests(out) == before


def test_compressed_prepared_data(tmp_path: Path) -> None:
    samples = [prepared_sample("source", i) for i in range(6)]
    for name, compression in [("plain", None), ("compressed", "zstd:3")]:
        append_prepared(tmp_path / name / "train/32-64", samples, per_shard=4, compression=compression)
        run(tmp_path / name, tmp_path / f"out-{name}")
    assert digests(tmp_path / "out-plain" / "train") == digests(tmp_path / "out-compressed" / "train")
