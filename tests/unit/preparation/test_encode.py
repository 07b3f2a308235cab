import hashlib
import json
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from streaming.base.format import reader_from_json

from diffusion.config.data import ImageSize, Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.encoded import EncodedManifest, check_encoded
from diffusion.datasets.loader import train_loader
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import Encoder, EncodingModels
from diffusion.preparation.encoding.shards import _Assembler
from tests.tools.training_runs import ROOT
from tests.tools.written_data import (
    PREPARED,
    append_prepared,
    data_config,
    encoded_manifest,
    prepared_sample,
    smooth_image,
    tokenize,
    write_mds,
    write_prepared,
    write_prepared_manifest,
)

RESOLUTION = 32
EMPTY_IDS = [0, 1, 2, 3, 4]


def build_vae(seed: int = 0) -> AutoencoderKL:
    """A VAE of two levels: 32 px -> 4 x 16 x 16."""
    torch.manual_seed(seed)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    ).eval()


def run(prepared: Path, out: Path, **options: Any) -> EncodedManifest:
    models: dict[str, Any] = {
        "vae": build_vae(),
        "vae_identity": "vae-0",
        "tokenize": tokenize,
        "tokenizer_identity": "tokenizer-0",
        "empty_ids": EMPTY_IDS,
    }
    models |= {name: options.pop(name) for name in list(options) if name in models}
    resolution = options.pop("resolution", RESOLUTION)
    defaults = {"models": EncodingModels(**models), "resolutions": [resolution], "batch_size": 4}
    return encode(prepared, out, **(defaults | options))[0]


def read(folder: Path) -> list[dict[str, Any]]:
    shards = json.loads((folder / "index.json").read_text())["shards"]
    return [sample for shard in shards for sample in reader_from_json(str(folder), None, shard)]


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    root = tmp_path / "prepared"
    write_prepared(root, {"16-32": 3, "32-64": 11, "64-up": 6}, num_captions=2)
    write_mds(root / "validation" / "32-64", PREPARED, [prepared_sample("v", i) for i in range(3)])
    write_prepared_manifest(root)
    return root


def test_encoding_keeps_layout_order_and_count(
    prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = run(prepared, tmp_path / "out")
    assert "37 of 37 captions (100.0%) take all tokens" in caplog.text
    assert manifest.counts == {"train": {"32-64": 11, "64-up": 6}, "validation": {"32-64": 3}}
    folders = {str(path.parent.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("index.json")}
    assert folders == {"train/32-64", "train/64-up", "validation/32-64"}
    samples = read(tmp_path / "out" / "train" / "32-64")
    assert [sample["key"] for sample in samples] == [f"32-64/{i}" for i in range(11)]
    vae = build_vae()
    for i, sample in enumerate(samples):
        assert set(sample) == {"latent_mean", "latent_logvar", "token_ids", "key", "placement"}
        assert sample["placement"].tolist() == [32, 40, 0, 4, 32, 32]
        pixels = torch.from_numpy(ImageTransform.square(RESOLUTION)(smooth_image(i))[None]) / 127.5 - 1
        with torch.no_grad():
            posterior = vae.encode(pixels).latent_dist
        for name, moment in [("latent_mean", posterior.mean[0]), ("latent_logvar", posterior.logvar[0])]:
            assert sample[name].dtype == np.float16
            assert sample[name].shape == (4, 16, 16)
            np.testing.assert_allclose(sample[name], moment.half().numpy(), rtol=2e-3, atol=1e-4)
        assert sample["token_ids"].dtype == np.int32
        np.testing.assert_array_equal(sample["token_ids"], tokenize([f"{i} 32-64 0", f"{i} 32-64 1"]))
    assert encoded_manifest(tmp_path / "out/train/32-64") == manifest
    assert (manifest.vae, manifest.tokenizer, manifest.empty_ids) == ("vae-0", "tokenizer-0", EMPTY_IDS)
    assert manifest.source == hashlib.sha256((prepared / "manifest.json").read_bytes()).hexdigest()
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (content["kind"], content["version"]) == ("encoded", 1)
    with pytest.raises(DataError, match=r"another version of this package \(format 99"):
        EncodedManifest.from_json(content | {"version": 99}, "data")
    with pytest.raises(DataError, match=r"is not encoded data: encode it with scripts/encode.py"):
        encoded_manifest(prepared / "train/32-64")
    assert encoded_manifest(tmp_path / "nothing" / "here" / "x") is None


def test_workers_do_not_change_a_byte_and_batch_size_rounds_only(prepared: Path, tmp_path: Path) -> None:
    run(prepared, tmp_path / "a", batch_size=4)
    run(prepared, tmp_path / "again", batch_size=4, num_workers=2)
    run(prepared, tmp_path / "b", batch_size=3)
    assert digests(tmp_path / "a") == digests(tmp_path / "again")
    for one, other in zip(read(tmp_path / "a/train/32-64"), read(tmp_path / "b/train/32-64"), strict=True):
        for name in ("latent_mean", "latent_logvar"):
            np.testing.assert_allclose(one[name], other[name], rtol=2e-3, atol=1e-4)
        assert one["key"] == other["key"]
    with pytest.raises(DataError, match="batch_size"):
        run(prepared, tmp_path / "a", batch_size=3)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_batches_that_wait_hold_few_file_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_prepared(tmp_path / "prepared/train/32-64", [prepared_sample("x", i) for i in range(24)], per_shard=24)
    add, held = _Assembler.add, []
    monkeypatch.setattr(_Assembler, "add", lambda self, batch, encoded: held.append(batch) or add(self, batch, encoded))
    before = num_descriptors()
    run(tmp_path / "prepared", tmp_path / "out", batch_size=24, num_workers=1)
    assert [len(batch.keys) for batch in held] == [24]
    assert num_descriptors() - before < 12


def test_the_same_command_continues_where_it_was_stopped(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    original, batches = Encoder.start, []

    def start(self: Encoder, *arguments: Any) -> Any:
        batches.append(arguments)
        if len(batches) > 3:
            raise KeyboardInterrupt
        return original(self, *arguments)

    run(prepared, whole)
    monkeypatch.setattr(Encoder, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run(prepared, out)
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob("index.json"))
    marks = [json.loads(path.read_text()) for path in out.glob("work.partial/shards/*.json")]
    with pytest.raises(DataError, match=r"vae"):
        run(prepared, out, vae_identity="vae-1")
    monkeypatch.setattr(Encoder, "start", original)
    finished = {path: path.stat().st_mtime_ns for path in out.rglob("*.mds")}
    run(prepared, out)
    assert digests(out) == digests(whole)
    assert 0 < sum(mark["samples"] for mark in marks) < 20
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("*.mds")}
    assert finished.items() <= kept.items(), "finished shards are not written again"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    run(prepared, out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_folder_with_something_else_is_not_touched(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(prepared)):
        run(prepared, prepared)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(DataError, match=r"notes\.txt"):
        run(prepared, tmp_path / "out")
    run(prepared, tmp_path / "encoded")
    before = digests(tmp_path / "encoded")
    with pytest.raises(DataError, match="mean_only, tokenizer"):
        run(prepared, tmp_path / "encoded", tokenizer_identity="other", mean_only=True)
    assert digests(tmp_path / "encoded") == before


def test_what_cannot_be_encoded(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--resolution 33 is not a multiple of 2"):
        run(prepared, tmp_path / "out", resolution=33)
    with pytest.raises(DataError, match=r"shorter side is 128 or more \(there are: 16-32, 32-64, 64-up\)"):
        run(prepared, tmp_path / "out", resolution=128)
    with pytest.raises(DataError, match=r"there is no manifest.json"):
        run(tmp_path / "nowhere", tmp_path / "out")
    shard = prepared / "train" / "64-up" / "shard.00000.mds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"64-up/shard.00000.mds has \d+ bytes instead of"):
        run(prepared, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shard.write_bytes(whole)
    shutil.rmtree(prepared / "train" / "32-64")
    write_mds(prepared / "train" / "32-64", PREPARED, [prepared_sample("a", 0)])
    with pytest.raises(DataError, match=r"train/32-64 is not what .*manifest.json says"):
        run(prepared, tmp_path / "out")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_images_keep_their_place(tmp_path: Path, num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    write_prepared(tmp_path / "prepared", {"32-64": 8}, bad=(1, 6))
    write_prepared(tmp_path / "whole", {"32-64": 8})
    out = tmp_path / "out"
    run(tmp_path / "prepared", out, num_workers=num_workers)
    run(tmp_path / "whole", tmp_path / "sound")
    assert json.loads((out / "damaged.json").read_text()) == {"train/32-64": [1, 6]}
    assert not (out / "withdrawn.json").exists()
    assert [
        record.getMessage() for record in caplog.records if "key '32-64/6' cannot be decoded" in record.getMessage()
    ]
    sound, samples = read(tmp_path / "sound/train/32-64"), read(out / "train/32-64")
    assert [sample["key"] for sample in samples] == [f"32-64/{i}" for i in range(8)]
    for i, sample in enumerate(samples):
        assert (i in (1, 6)) == (not sample["latent_mean"].any()) == (not sample["latent_logvar"].any())
        if i not in (1, 6):
            np.testing.assert_allclose(sample["latent_mean"], sound[i]["latent_mean"], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_too_many_damaged_images_are_an_error(tmp_path: Path, num_workers: int) -> None:
    write_prepared(tmp_path / "prepared", {"32-64": 20}, bad=tuple(range(3, 14)))
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            run(tmp_path / "prepared", tmp_path / "out", num_workers=num_workers)
        assert "11 of 20 images are damaged" in str(caught.value)
        assert "key '32-64/13' cannot be decoded" in str(caught.value)
        assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_prepared_shard_that_was_damaged_afterwards_is_not_encoded(tmp_path: Path, num_workers: int) -> None:
    prepared = write_prepared(tmp_path / "prepared", {"32-64": 12}).parent
    shard = sorted(prepared.glob("train/*/shard.*.mds"))[1]
    content = bytearray(shard.read_bytes())
    middle = content.index(b"IDAT") + 200
    content[middle : middle + 64] = bytes(64)
    shard.write_bytes(content)
    with pytest.raises(DataError, match=str(shard)):
        run(prepared, tmp_path / "out", num_workers=num_workers)


def test_latents_that_are_not_finite_are_an_error(prepared: Path, tmp_path: Path) -> None:
    vae = build_vae()
    with torch.no_grad():
        vae.quant_conv.weight.fill_(1e6)
    with pytest.raises(DataError, match="the VAE gives no finite float16 latent for '32-64/0'"):
        run(prepared, tmp_path / "out", vae=vae)


def test_latents_read_are_those_of_the_images_read(prepared: Path, tmp_path: Path) -> None:
    run(prepared, tmp_path / "out")
    batches = []
    for root, representation in [(prepared, Representation.images), (tmp_path / "out", Representation.latents)]:
        config = data_config(
            root / "train", "32-64", "64-up", resolution=RESOLUTION, representation=representation, global_batch_size=4
        )
        batches.append(list(train_loader(config, seed=1, tokenize=tokenize)))
    vae = build_vae()
    assert len(batches[0]) == len(batches[1]) > 0
    for decoded, latents in zip(*batches, strict=True):
        for key in (BatchKey.SAMPLE, BatchKey.STREAM, BatchKey.TOKEN_IDS, BatchKey.PLACEMENT):
            assert torch.equal(decoded[key], latents[key])
        with torch.no_grad():
            mean = vae.encode(decoded[BatchKey.IMAGE] / 127.5 - 1).latent_dist.mean
        torch.testing.assert_close(latents[BatchKey.LATENT_MEAN], mean.half(), rtol=2e-3, atol=1e-4)


def test_means_only_and_encoded_data_that_does_not_fit_a_run(prepared: Path, tmp_path: Path) -> None:
    manifest = run(prepared, tmp_path / "out", mean_only=True)
    assert manifest.mean_only
    assert set(read(tmp_path / "out/train/64-up")[0]) == {"latent_mean", "token_ids", "key", "placement"}
    fitting: dict[str, Any] = {
        "where": "data", "size": ImageSize(RESOLUTION, RESOLUTION), "needs_logvar": False,
        "vae_identity": "vae-0", "tokenizer_identity": "tokenizer-0",
    }  # fmt: skip
    check_encoded(manifest, **fitting)
    for change, message in [
        ({"vae_identity": "vae-1"}, "VAE: vae-0 there, vae-1 here"),
        ({"tokenizer_identity": "t"}, "tokenizer: tokenizer-0 there, t here"),
        ({"size": ImageSize(64, 64)}, "resolution: 32 there, 64 here"),
        ({"size": ImageSize(32, 64)}, "resolution: 32 there, 32 x 64 here"),
        ({"needs_logvar": True}, "only the means are there, and objective.posterior is sample"),
    ]:
        with pytest.raises(DataError, match=f"data was not encoded for this run. .*{message}.*scripts/encode.py"):
            check_encoded(manifest, **(fitting | change))
    with pytest.raises(DataError, match="transform: other there"):
        check_encoded(replace(manifest, transform="other"), **fitting)
    config = data_config(
        tmp_path / "out/train", "32-64", resolution=64, representation=Representation.latents, global_batch_size=4
    )
    with pytest.raises(DataError, match="resolution: 32 there, 64 here"):
        train_loader(config, seed=1, tokenize=None)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (["--architecture", "stable_diffusion_2"], ConfigurationError, "stable_diffusion_2 would encode with random"),
        (["--architecture", "stable_diffusion_xl"], ConfigurationError, "add --pretrained FOLDER, or --vae FOLDER"),
        (
            ["--architecture", "stable_diffusion_2", "--vae", "FOLDER", "--text-embeddings"],
            ConfigurationError,
            "random weights: add --pretrained FOLDER$",
        ),
        (["--architecture", "tiny", "--device", "foo"], MachineError, "--device foo"),
        (["--architecture", "tiny", "--device", "mps"], MachineError, "--device mps"),
        (["--architecture", "tiny", "--vae", ""], ConfigurationError, "vae is empty"),
        (["--architecture", "tiny", "--batch-size", "0"], ConfigurationError, "argument --batch-size: 0"),
        (["--architecture", "tiny", "--workers", "-1"], ConfigurationError, "argument --workers: -1"),
        (["--architecture", "tiny"], DataError, "prepared is not a data set"),
    ],
)
def test_what_cannot_encode_is_told_before_anything_is_loaded(
    options: list[str], kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusion.models.load_frozen_parts", None)
    with pytest.raises(kind, match=message):
        command(str(tmp_path / "prepared"), str(tmp_path / "out"), *options, monkeypatch=monkeypatch)


def test_an_output_that_cannot_be_written_to(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="/proc/zzz"):
        run(prepared, Path("/proc/zzz"))
    monkeypatch.setattr("diffusion.models.load_frozen_parts", None)
    for out, kind in (("/proc/zzz", MachineError), (str(prepared / "train"), ConfigurationError)):
        with pytest.raises(kind, match=out):
            command(str(prepared), out, "--architecture", "tiny", monkeypatch=monkeypatch)


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command in this process."""
    monkeypatch.setattr(sys, "argv", ["encode.py", *arguments, "--resolution", "32"])
    runpy.run_path(str(ROOT / "scripts" / "encode.py"))["main"]()


def test_the_command(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes; the result of the command is shown in tests/integration/test_encode_ranks.py."""
    (tmp_path / "run.yaml").write_text("model: {architecture: tiny, frozen_seed: -3, text_encoder: {chunks: 0}}\n")
    with pytest.raises(ConfigurationError, match=r"(?s)model\.text_encoder\.chunks is 0.*model\.frozen_seed is -3"):
        command(str(prepared), str(tmp_path / "out"), "--config", str(tmp_path / "run.yaml"), monkeypatch=monkeypatch)
    with pytest.raises(ConfigurationError, match="choose the model: --config YAML, or --architecture"):
        command(str(prepared), str(tmp_path / "out"), monkeypatch=monkeypatch)
