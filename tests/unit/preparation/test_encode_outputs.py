"""Encoded data sets beyond the plain one: several resolutions, aspect ratios, text embeddings, growth, withdrawal."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.config.data import ImageSize, Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.encoded import EncodedManifest, check_encoded, read_encoded_manifest
from diffusion.datasets.loader import train_loader
from diffusion.datasets.mds import read_index, read_shards
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import BucketsConfig
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from tests.tools.preparing import prepare
from diffusion.preparation.withdrawal import withdraw
from diffusion.preparation.withdrawal_erase import erase
from tests.tools.image_files import noise, write_folder
from tests.tools.written_data import data_config, tokenize, write_prepared
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


def grow(source: Path, out: Path, first: int, number: int) -> None:
    """Prepare a folder with so many images more."""
    source.mkdir(exist_ok=True)
    for i in range(first, first + number):
        (source / f"{i:03}.png").write_bytes(noise(40, 36, i))
        (source / f"{i:03}.txt").write_text(f"number {i}")
    prepare([source], out, edges=[16, 34], shard_bytes=2**15, num_workers=1, partition_size=5)


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
    (tmp_path / "source").mkdir()
    for i, (width, height) in enumerate([(40, 36), (60, 34), (34, 60), (64, 33)]):
        (tmp_path / "source" / f"{i}.png").write_bytes(noise(width, height, i))
        (tmp_path / "source" / f"{i}.txt").write_text("x")
    prepared = tmp_path / "prepared"
    prepare([tmp_path / "source"], prepared, buckets=BucketsConfig(sizes=["32x32", "24x48", "48x24"]), num_workers=1)
    (manifest,) = encode(prepared, tmp_path / "out", models=MODELS)
    assert manifest.sizes == {"32x32": [32, 32], "24x48": [24, 48], "48x24": [48, 24]}
    assert manifest.counts == {"train": {"48x24": 1, "32x32": 1, "24x48": 2}}
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
    assert read_encoded_manifest(str(out / "train/32-64")) == manifest
    check_encoded(manifest, text_encoder_identity="text-0", **fitting)
    with pytest.raises(DataError, match="text encoder: text-0 there, text-1 here"):
        check_encoded(manifest, text_encoder_identity="text-1", **fitting)
    (plain,) = encode(tmp_path / "prepared", tmp_path / "plain", models=MODELS, resolutions=[32])
    check_encoded(plain, **fitting)
    with pytest.raises(DataError, match="text encoder: no text embeddings there, text-0 here"):
        check_encoded(plain, text_encoder_identity="text-0", **fitting)
    with pytest.raises(DataError, match="code: other there"):
        check_encoded(EncodedManifest(**{**vars(plain), "code": "other"}), **fitting)
    with pytest.raises(DataError, match=r"holds another encoding \(text_encoder differ\)"):
        encode(tmp_path / "prepared", out, models=MODELS, resolutions=[32], batch_size=4)


def test_sizes_and_crops_are_those_of_training_from_images(tmp_path: Path) -> None:
    write_prepared(tmp_path / "prepared", {"32-64": 9})
    encode(tmp_path / "prepared", tmp_path / "out", models=MODELS, resolutions=[32])
    found = []
    for place, kind in (("prepared", Representation.images), ("out", Representation.latents)):
        config = data_config(tmp_path / place / "train", "32-64", representation=kind, resolution=32)
        with_tokens = tokenize if kind is Representation.images else None
        batch = next(iter(train_loader(config, seed=1, tokenize=with_tokens, rank_batch_size=8)))
        found.append(batch[BatchKey.PLACEMENT])
    assert found[0].tolist() == [[32, 40, 0, 4, 32, 32]] * 8
    assert torch.equal(*found)


def test_stored_text_embeddings_are_read_with_the_caption_that_is_chosen(tmp_path: Path) -> None:
    write_prepared(tmp_path / "prepared", {"32-64": 8}, num_captions=3)
    ids = np.arange(15, dtype=np.int32).reshape(3, 5)
    changes = {"text_encoder": text_encoder(), "text_encoder_identity": "text-0", "tokenize": lambda captions: ids}
    encode(
        tmp_path / "prepared", tmp_path / "out", models=EncodingModels(**{**vars(MODELS), **changes}), resolutions=[32]
    )
    with torch.no_grad():
        expected = text_encoder()(torch.from_numpy(ids).long())[0].half()
    settings = {"representation": Representation.latents, "resolution": 32, "text_embeddings": True}
    config = data_config(tmp_path / "out" / "train", "32-64", **settings)
    batch = next(iter(train_loader(config, seed=1, tokenize=None, rank_batch_size=8)))
    chosen = batch[BatchKey.TOKEN_IDS][:, 0] // 5
    assert len(set(chosen.tolist())) > 1
    torch.testing.assert_close(batch[BatchKey.TEXT_EMBEDDING], expected[chosen], rtol=2e-3, atol=2e-3)
    encode(tmp_path / "prepared", tmp_path / "plain", models=MODELS, resolutions=[32])
    with pytest.raises(DataError, match=r"data\.text_embeddings"):
        train_loader(
            data_config(tmp_path / "plain" / "train", "32-64", **settings), seed=1, tokenize=None, rank_batch_size=8
        )


def test_what_prepared_data_grew_by_is_added(tmp_path: Path) -> None:
    source, prepared, out = tmp_path / "source", tmp_path / "prepared", tmp_path / "out"
    grow(source, prepared, 0, 20)
    run(prepared, out)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.rglob("*.mds")}
    assert len(before) > 1
    grow(source, prepared, 20, 20)
    manifest = run(prepared, out)
    assert manifest.counts == {"train": {"34-up": 40}}
    assert keys(out / "train/34-up") == keys(prepared / "train/34-up")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    run(prepared, tmp_path / "anew")
    assert digests(out) == digests(tmp_path / "anew")
    counts = [[shard["samples"] for shard in read_shards(root / "train/34-up")] for root in (prepared, out)]
    assert counts[0] == counts[1], "shards begin where the prepared ones begin"
    shutil.rmtree(prepared)
    grow(source, prepared, 40, 20)
    with pytest.raises(DataError, match="was encoded from other data than"):
        run(prepared, out)


def test_withdrawn_samples_keep_their_place_and_are_marked(tmp_path: Path) -> None:
    source, prepared, out = tmp_path / "source", tmp_path / "prepared", tmp_path / "out"
    grow(source, prepared, 0, 20)
    order = keys(prepared / "train/34-up")
    withdraw(prepared, {order[3]})
    run(prepared, out)
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/34-up": [3]}
    assert not read(out / "train/34-up")[3]["latent_mean"].any()
    withdraw(prepared, {order[7]})
    withdraw(out, {order[11], "source/025.png"})
    erase(prepared)
    shards = digests(out / "train")
    run(prepared, out)
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/34-up": [3, 7, 11]}
    assert digests(out / "train") == shards
    grow(source, prepared, 20, 10)
    withdraw(prepared, {"source/022.png"})
    erase(prepared)
    run(prepared, out)
    order = keys(out / "train/34-up")
    assert order == keys(prepared / "train/34-up")
    wanted = sorted([3, 7, 11, order.index("source/022.png"), order.index("source/025.png")])
    assert json.loads((out / "withdrawn.json").read_text()) == {"train/34-up": wanted}
    latents = [sample["latent_mean"] for sample in read(out / "train/34-up")]
    assert [i for i, latent in enumerate(latents) if not latent.any()] == [i for i in wanted if i not in (7, 11)]
    assert not (out / "damaged.json").exists(), "what was erased is not damaged"
    assert erase(out) > 0
    grow(source, prepared, 30, 3)
    run(prepared, out)
    assert keys(out / "train/34-up")[:30] == order
    assert read_index(out / "train/34-up").num_samples == 33


def test_a_shard_that_is_too_large_is_cut(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", 9, side=40)
    prepare([tmp_path / "source"], tmp_path / "prepared", edges=[32], num_workers=1)
    (whole,) = encode(tmp_path / "prepared", tmp_path / "whole", models=MODELS, resolutions=[32], batch_size=4)
    out = tmp_path / "out"
    options: dict[str, Any] = {"models": MODELS, "resolutions": [32], "batch_size": 4, "max_shard_bytes": 2**13}
    (manifest,) = encode(tmp_path / "prepared", out, **options)
    assert manifest == whole
    assert [read_index(root / "train/32-up").num_shards for root in (tmp_path / "whole", out)] == [1, 9]
    assert all(path.stat().st_size <= 2**13 for path in out.rglob("*.mds"))
    assert keys(out / "train/32-up") == keys(tmp_path / "whole/train/32-up")
    before = digests(out)
    encode(tmp_path / "prepared", out, **options)
    assert digests(out) == before


def test_compressed_prepared_data(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", 6, side=40)
    for name, compression in [("plain", None), ("compressed", "zstd:3")]:
        prepare([tmp_path / "source"], tmp_path / name, edges=[32], num_workers=1, compression=compression)
        run(tmp_path / name, tmp_path / f"out-{name}")
    assert digests(tmp_path / "out-plain" / "train") == digests(tmp_path / "out-compressed" / "train")
