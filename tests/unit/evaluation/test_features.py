"""Feature networks, and features of a set computed in batches."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.config.training import Plugin
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.evaluation.config import (
    EvaluationConfig,
    Metric,
    NetworksConfig,
    ProtocolConfig,
    ReferenceConfig,
    ResizeFilter,
)
from diffusion.evaluation.features import Clip, extract_features, resized
from diffusion.evaluation.images import Images, image_files, list_images
from diffusion.evaluation.metrics import Metrics
from diffusion.evaluation.prompts import Prompt
from tests.tools.evaluation_toys import write_clip, write_images


def made_up_images(num: int) -> Images:
    """So many images of 8 x 8 pixels of one colour each."""
    return Images(num, lambda i: Image.new("RGB", (8, 8), (i % 256, i // 256 % 256, 7 * i % 256)))


class RandomProjection:
    """Features [B, D] that depend linearly on the colour of an image."""

    name, size = "projection", 8

    def __init__(self, width: int) -> None:
        self.matrix = torch.randn(3, width, generator=torch.Generator().manual_seed(0))

    def image_features(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float().mean(dim=(2, 3)) @ self.matrix


def extract(num: int, width: int, batch_size: int) -> np.ndarray:
    config = EvaluationConfig(output_folder="", batch_size=batch_size, num_threads=1)
    features = extract_features(RandomProjection(width), made_up_images(num), config, torch.device("cpu"), "test")
    assert features is not None
    return features


def test_features_are_in_the_order_of_the_images_for_any_batch_size():
    features = extract(300, 5, 16)
    colours = torch.tensor([made_up_images(300)[i].getpixel((0, 0)) for i in range(300)]).float()
    np.testing.assert_allclose(features, colours @ RandomProjection(5).matrix, rtol=1e-5)
    np.testing.assert_allclose(extract(300, 5, 7), features, rtol=1e-5)


def test_features_that_are_not_finite_name_their_network():
    network = RandomProjection(5)
    network.matrix[0, 0] = torch.nan
    config = EvaluationConfig(output_folder="", num_threads=1)
    with pytest.raises(ConfigurationError, match=r"projection.*not finite"):
        extract_features(network, made_up_images(3), config, torch.device("cpu"), "test")


def metrics_of(folder: Path, size: int, *metrics: Metric, cache: Path | None = None) -> Metrics:
    """Distances to images of a folder by random features of a size, by default with the folder's cache."""
    if not folder.is_dir():
        write_images(folder, 4)
    plugin = Plugin(path="diffusion.evaluation.features.RandomFeatures", arguments={"size": size})
    networks = NetworksConfig(inception_replacement=plugin)
    reference = ReferenceConfig(path=str(folder))
    protocol = ProtocolConfig(metrics=list(metrics) or [Metric.kid], reference=reference, networks=networks)
    config = EvaluationConfig(output_folder="", protocol=protocol)
    return Metrics(config=config, device=torch.device("cpu"), cache=cache or folder.with_name("cache"))


def test_a_biased_distance_of_few_images_warns(tmp_path, caplog):
    metrics = metrics_of(tmp_path / "real", 64, Metric.fid, Metric.kid)
    metrics.compute(image_files(list_images(tmp_path / "real")), None, {})
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "diffusion.evaluation.metrics"]
    assert warning.startswith("frechet_random-16 is of 4 images")


def test_features_of_a_reference_are_cached_for_each_size_of_the_input(tmp_path):
    images = image_files(list_images(write_images(tmp_path / "images", 4, seed=1)))
    alone = metrics_of(tmp_path / "real", 16, cache=tmp_path / "other").compute(images, None, {})
    metrics_of(tmp_path / "real", 32).compute(images, None, {})
    assert metrics_of(tmp_path / "real", 16).compute(images, None, {}) == alone


def test_damaged_caches_are_named_and_impossible_ones_before_the_features(tmp_path):
    images = image_files(list_images(write_images(tmp_path / "images", 4, seed=1)))
    metrics = metrics_of(tmp_path / "real", 16)
    metrics.compute(images, None, {})
    (file,) = (tmp_path / "cache").iterdir()
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content.replace(b"PK", b"KP"), bytes([content[0]]) * 400):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"\.npz is damaged"):
            metrics.compute(images, None, {})
    with pytest.raises(MachineError, match="cannot be written"):
        metrics_of(tmp_path / "real", 16, cache=file / "below")


def test_the_identity_of_clip_names_another_scaling_of_colours(tmp_path):
    folder = write_clip(tmp_path / "clip")
    usual = Clip(str(folder), "", local_files_only=True).identity
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.5] * 3}))
    other = Clip(str(folder), "", local_files_only=True).identity
    assert len(usual) == 16
    assert other.startswith(f"{usual} ")


def test_the_protocol_of_a_category_names_its_prompts(tmp_path):
    networks = NetworksConfig(clip_score=str(write_clip(tmp_path / "clip")))
    protocol = ProtocolConfig(metrics=[Metric.clip_score], networks=networks)
    config = EvaluationConfig(output_folder="", protocol=protocol)
    metrics = Metrics(config=config, device=torch.device("cpu"), cache=tmp_path)

    def protocols(*names: str) -> list:
        prompts = [Prompt(text=f"prompt {i}", category=name) for i, name in enumerate(names) for _ in range(2)]
        found = metrics.protocols({}, prompts)
        assert metrics.protocols({}, prompts[::2]) == found, "whatever the number of images"
        return [found["clip_score"], found["clip_score/A"]]

    (whole, category), (same, other) = protocols("A", "A", "B"), protocols("A", "B", "B")
    assert whole == same
    assert category != other


def test_resizing_is_antialiased_and_rounded_once():
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[:, ::2] = 255
    small = resized(Image.fromarray(pixels), 5, ResizeFilter.bilinear)
    assert small.shape == (3, 5, 5)
    assert small.dtype == np.uint8
    assert np.abs(small[:, :, 1:-1].astype(int) - 127).max() <= 1


def test_clip_sees_the_centre_square():
    class MeanColour(Clip):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.size = 8

        def image_features(self, pixels):
            return pixels.float().mean(dim=(2, 3))

    wide, tall = Image.new("RGB", (40, 20), "red"), Image.new("RGB", (21, 40), "red")
    wide.paste("blue", (4, 0, 36, 20))  # Antialiasing looks a little beyond the square.
    tall.paste("blue", (0, 4, 21, 36))
    config, images = EvaluationConfig(output_folder=""), [wide, tall]
    features = extract_features(MeanColour(), Images(2, images.__getitem__), config, torch.device("cpu"), "test")
    np.testing.assert_array_equal(features, [[0, 0, 255]] * 2)


def test_missing_weights_say_which_file_to_put_where(tmp_path):
    from diffusion.evaluation.features import Inception

    with pytest.raises(ConfigurationError, match=r"weights-inception-2015-12-05-6726825d\.pth"):
        Inception(NetworksConfig().inception)
    with pytest.raises(ConfigurationError, match=r"cmmd=.*model\.safetensors"):
        Clip(str(tmp_path), "protocol.networks.cmmd", local_files_only=True)


class Code:
    def __reduce__(self):
        return (print, ("run",))


def test_a_file_of_weights_that_would_run_code_is_rejected(tmp_path, capsys):
    from diffusion.evaluation.features import Inception

    path = tmp_path / "weights.pth"
    torch.save({"weight": Code()}, path)
    with pytest.raises(ConfigurationError, match=r"weights\.pth"):
        Inception(str(path))
    assert capsys.readouterr().out == ""


def test_inception_gives_the_features_of_torch_fidelity(tmp_path, monkeypatch):
    from torch_fidelity import feature_extractor_inceptionv3 as original

    from diffusion.evaluation.features import Inception

    network = original.FeatureExtractorInceptionV3
    with monkeypatch.context() as patched:
        patched.setattr(original, "load_state_dict_from_url", lambda *arguments, **options: {})
        patched.setattr(network, "load_state_dict", lambda *arguments, **options: None)
        random = network("random", ["2048"]).eval()
    torch.save(random.state_dict(), tmp_path / "weights.pth")
    inception = Inception(str(tmp_path / "weights.pth"))
    pixels = torch.randint(0, 256, (2, 3, inception.size, inception.size), dtype=torch.uint8)
    features = inception.image_features(pixels)
    assert features.shape == (2, 2048)
    assert torch.equal(features, random(pixels)[0])
