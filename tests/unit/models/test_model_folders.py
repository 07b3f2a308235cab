"""Folders of strangers: no code or kernel of theirs is run, they lead nowhere else, and weights are float32."""

import builtins
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.config.model import Architecture, ModelConfig, TextEncoderConfig
from diffusion.errors import ConfigurationError
from diffusion.evaluation.features import Clip
from diffusion.evaluation.generate import PipelineGenerator
from diffusion.evaluation.hpsv3 import RewardModel
from diffusion.evaluation.object_checks import ZeroShotDetector
from diffusion.evaluation.vqa import VisionLanguageModel
from diffusion.models.ingredients.alignment import load_image_encoder
from diffusion.models.pretrained import load_frozen_parts, load_pretrained, module_identity, read_vae
from diffusion.models.prompt_encoder import PromptEncoder, write_prompt_encoder
from diffusion.models.text_encoders import load_language_tokenizer
from diffusion.preparation.aesthetic import AestheticScore
from diffusion.preparation.captioners import ImageToText
from tests.tools.evaluation_toys import write_clip
from tests.tools.image_encoders import write_image_encoder
from tests.tools.language_models import write_language_model
from tests.tools.pipelines import write_model
from tests.tools.vision_language_models import write_reward, write_vqa
from tests.unit.evaluation.test_object_checks import write_detector
from tests.unit.models.test_pretrained import build

CPU = torch.device("cpu")
HUB_NAME = "someone/clip"


def write_pipeline(folder: Path, architecture: Architecture = Architecture.tiny) -> None:
    write_model(build(architecture), folder)
    write_prompt_encoder(folder, ModelConfig(architecture=architecture))


def frozen_parts(folder: Path, architecture: Architecture = Architecture.tiny) -> list[nn.Module]:
    parts = load_frozen_parts(ModelConfig(architecture=architecture, pretrained=str(folder), local_files_only=True))
    return [parts.text_encoder, parts.vae]


def language_model(folder: Path) -> list[nn.Module]:
    config = ModelConfig(architecture=Architecture.tiny, text_encoder=TextEncoderConfig(path=str(folder)))
    return [load_frozen_parts(config).text_encoder]


def evaluated_pipeline(folder: Path) -> list[nn.Module]:
    shutil.rmtree(folder / "text_adapter")
    pipeline = PipelineGenerator(folder, CPU).pipeline
    return [part for part in pipeline.components.values() if isinstance(part, nn.Module)]


def write_scorer(folder: Path) -> None:
    write_clip(folder)
    change(folder / "config.json", **{"vision_config/projection_dim": 8})


def aesthetic_score(folder: Path) -> list[nn.Module]:
    save_file({"weight": torch.ones(1, 8)}, folder.parent / "head.safetensors")
    return [AestheticScore(str(folder), str(folder.parent / "head.safetensors"), device="cpu")._clip]


def cached_clip(folder: Path) -> list[nn.Module]:
    """Files in the local cache of the hub."""
    repository = folder.parent / f"models--{HUB_NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder.parent))
        patch.setattr(transformers.utils.hub, "TRANSFORMERS_CACHE", str(folder.parent), raising=False)
        return [Clip(HUB_NAME, "clip", local_files_only=True)._model]


LOADERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], list[nn.Module]], str]] = {
    "text encoder": (write_pipeline, frozen_parts, "text_encoder/config.json"),
    "second text encoder": (
        lambda folder: write_pipeline(folder, Architecture.tiny_xl),
        lambda folder: frozen_parts(folder, Architecture.tiny_xl),
        "text_encoder_2/config.json",
    ),
    "VAE": (write_pipeline, lambda folder: [load_vae(folder)], "vae/config.json"),
    "prompt encoder": (
        write_pipeline,
        lambda folder: [PromptEncoder(folder)._text_encoder],
        "text_encoder/config.json",
    ),
    "pipeline": (write_pipeline, evaluated_pipeline, "text_encoder/config.json"),
    "language model": (lambda folder: write_language_model(folder, "t5gemma"), language_model, "config.json"),
    "image encoder": (write_image_encoder, lambda folder: [load_image_encoder(str(folder))], "config.json"),
    "CLIP": (write_clip, lambda folder: [Clip(str(folder), "clip", local_files_only=True)._model], "config.json"),
    "cached CLIP": (write_clip, cached_clip, "config.json"),
    "detector": (
        lambda folder: write_detector(folder, "owlvit"),
        lambda folder: [ZeroShotDetector(str(folder), 0.1, CPU)._model],
        "config.json",
    ),
    "aesthetic score": (write_scorer, aesthetic_score, "config.json"),
    "captioner": (write_vqa, lambda folder: [ImageToText(str(folder), device="cpu")._model], "config.json"),
    "questions": (write_vqa, lambda folder: [VisionLanguageModel(str(folder), CPU)._model], "config.json"),
    "reward": (write_reward, lambda folder: [RewardModel(str(folder), CPU)._model], "config.json"),
}
"""Writer of a folder, loader of its modules, and a configuration in it."""


def load_vae(folder: Path) -> nn.Module:
    vae: Any = build(Architecture.tiny).vae
    vae.load_state_dict(read_vae(str(folder), vae), assign=True)
    return vae


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("written")

    def write(loader: str) -> Path:
        if not (root / loader).exists():
            LOADERS[loader][0](root / loader)
        return root / loader

    return write


@pytest.fixture
def copied(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Write the folder of a loader, to be changed."""
    return lambda loader: Path(shutil.copytree(written(loader), tmp_path / "folder"))


def change(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; `a/b` is b in a."""
    content = json.loads(path.read_text()) if path.exists() else {}
    for key, value in values.items():
        *outer, last = key.split("/")
        inner = content
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
    path.write_text(json.dumps(content))


KERNEL = "someone/kernel"
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "someone/other"}
KEYS: list[tuple[str, Any]] = [
    ("_attn_implementation_internal", KERNEL),
    ("_attn_implementation", KERNEL),
    ("attn_implementation", "flash_attention_2"),
    ("attn_implementation", {"text_config": "eager"}),
    ("text_config/_attn_implementation_internal", "eager"),
    ("vision_config/attn_implementation", "flex_attention"),
    ("layers/0/_attn_implementation", "eager"),
    ("_experts_implementation_internal", "batched_mm"),
    ("experts_implementation", "sonicmoe"),
    ("quantization_config", {"quant_method": "fp8"}),
    ("text_config/quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ("fusion_config", {"patch_embeddings": True}),
    ("configuration_files", ["config.5.0.0.json"]),
    ("transformers_weights", "adapter_model.bin"),
]


@pytest.mark.parametrize(
    ("loader", "key", "value"),
    [*(("pipeline", *entry) for entry in KEYS), *((loader, *KEYS[0]) for loader in LOADERS if loader != "pipeline")],
)
def test_a_configuration_that_selects_functions_or_leads_elsewhere_is_refused(loader, key, value, copied):
    folder = copied(loader)
    _, load, file = LOADERS[loader]
    change(folder / file, **{key: value})
    with pytest.raises(ConfigurationError, match=rf"{re.escape(file)}: {key.split('/')[-1]} is "):
        load(folder)


@pytest.mark.parametrize("loader", LOADERS)
def test_an_adapter_beside_the_weights_is_refused(loader, copied):
    folder = copied(loader)
    _, load, file = LOADERS[loader]
    adapter = (folder / file).with_name("adapter_config.json")
    change(adapter, **ADAPTER)
    with pytest.raises(ConfigurationError, match=re.escape(f"{adapter.name}: ")):
        load(folder)


@pytest.mark.parametrize("loader", ["captioner", "questions", "reward"])
def test_an_audio_tokenizer_of_another_folder_is_refused(loader, copied):
    folder = copied(loader)
    other = {"audio_tokenizer_class": "CLIPTextModel", "audio_tokenizer_name_or_path": str(folder)}
    change(folder / "processor_config.json", audio_tokenizer=other)
    with pytest.raises(ConfigurationError, match=r"processor_config\.json: audio_tokenizer_name_or_path is "):
        LOADERS[loader][1](folder)


@pytest.mark.parametrize("key", ["_attn_implementation", "quantization_config"])
def test_a_pipeline_in_a_pipeline_is_looked_at(key, copied):
    folder = copied("pipeline")
    shutil.copytree(folder, folder / "safety_checker")
    index = json.loads((folder / "model_index.json").read_text())
    change(folder / "model_index.json", safety_checker=["diffusers", index["_class_name"]])
    change(folder / "safety_checker" / "text_encoder" / "config.json", **{key: {"": "eager"}})
    with pytest.raises(ConfigurationError, match=rf"safety_checker/text_encoder/config\.json: {key} is "):
        evaluated_pipeline(folder)


CODE = "from pathlib import Path\nPath('{proof}').touch()\n"
MAPS = {
    "config.json": {"AutoConfig": "code.Code", "AutoModelForImageTextToText": "code.Code"},
    "tokenizer_config.json": {"AutoTokenizer": ["code.Code", "code.Code"]},
    "processor_config.json": {"AutoProcessor": "code.Code"},
    "preprocessor_config.json": {"AutoImageProcessor": "code.Code"},
}


@pytest.mark.parametrize("loader", ["captioner", "detector"])
def test_nobody_is_asked_whether_to_run_the_code_of_an_unknown_model(loader, copied, tmp_path, monkeypatch):
    folder = copied(loader)
    proof = tmp_path / "proof"
    (folder / "code.py").write_text(CODE.format(proof=proof))
    for file, names in MAPS.items():
        change(folder / file, auto_map=names)
    change(folder / "config.json", model_type="unknown")
    monkeypatch.setattr(builtins, "input", lambda *prompt: "y")
    with pytest.raises(ConfigurationError, match=re.escape(str(folder))):
        LOADERS[loader][1](folder)
    assert not proof.exists()


@pytest.mark.parametrize("loader", ["text encoder", "pipeline", "CLIP", "cached CLIP", "detector"])
def test_a_released_folder_with_a_map_of_code_is_loaded_without_it_in_float32(loader, copied, tmp_path):
    folder = copied(loader)
    _, load, file = LOADERS[loader]
    proof = tmp_path / "proof"
    (folder / "code.py").write_text(CODE.format(proof=proof))
    unused = {"_attn_implementation": None, "_attn_implementation_autoset": True, "quantization_config": None}
    names = {"AutoConfig": "code.Code", "AutoModel": "code.Code"}
    change(folder / file, auto_map=names, transformers_weights="model.safetensors", torch_dtype="bfloat16", **unused)
    change(folder / file, dtype=None)
    for module in load(folder):
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert not proof.exists()


def test_a_local_folder_asks_nothing_of_the_hub(copied, monkeypatch):
    folder = copied("image encoder")
    model = {"model_type": "timm_wrapper", "architecture": "hf-hub:someone/else", "patch_size": 4, "num_classes": 0}
    (folder / "config.json").write_text(json.dumps(model))
    asked = []

    def look_up(host, *rest, **options):
        asked.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigurationError, match="timm_wrapper"):
        load_image_encoder(str(folder))
    assert asked == []
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_tokenizer_s_class_that_is_none_is_an_error(copied):
    folder = copied("language model")
    for name in ("RagTokenizer", "pipeline"):
        change(folder / "tokenizer_config.json", tokenizer_class=name)
        with pytest.raises(ConfigurationError, match=re.escape(f"model.text_encoder.path={folder}")):
            load_language_tokenizer(str(folder), 16)


@pytest.mark.parametrize("loader", ["CLIP", "captioner", "questions", "reward", "prompt encoder"])
def test_a_folder_without_a_tokenizer_is_an_error(loader, copied):
    folder = copied(loader)
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        for path in folder.rglob(name):
            path.unlink()
    with pytest.raises(ConfigurationError, match="vocabulary"):
        LOADERS[loader][1](folder)


# Precision


def cast(folder: Path, stored: torch.dtype, values: torch.dtype) -> None:
    """Round all weights to the values of one type, and store them and their configurations as another."""
    for path in folder.rglob("*.safetensors"):
        tensors = {name: tensor.to(values).to(stored) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    for path in folder.rglob("config.json"):
        if "model_type" in (config := json.loads(path.read_text())):
            nested = [name for name, value in config.items() if isinstance(value, dict) and "dtype" in value]
            name = str(stored).removeprefix("torch.")
            change(path, dtype=None, torch_dtype=name, **{f"{one}/dtype": name for one in nested})


@pytest.mark.parametrize(
    ("loader", "dtype"),
    [
        *((name, torch.bfloat16) for name in LOADERS if name not in ("questions", "reward")),
        ("pipeline", torch.float16),
    ],
)
def test_weights_stored_in_a_lower_precision_are_loaded_as_float32(loader, dtype, written, tmp_path):
    """Questions and reward are computed in the precision of the file, a part of the protocol."""
    load = LOADERS[loader][1]
    identities = []
    for stored in (dtype, torch.float32):
        folder = Path(shutil.copytree(written(loader), tmp_path / str(stored) / "folder"))
        cast(folder, stored, dtype)
        modules = load(folder)
        tensors = [tensor for module in modules for tensor in module.state_dict().values()]
        assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
        identities.append([module_identity(module) for module in modules])
    assert identities[0] == identities[1]


def test_the_identity_of_a_half_precision_text_encoder_is_that_of_transformers_4(tmp_path):
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    more = {"num_attention_heads": 1, "max_position_embeddings": 4, "projection_dim": 4}
    module = CLIPTextModel(CLIPTextConfig(**sizes, **more))
    for tensor in module.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor))
    module.half().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert module_identity(load_pretrained(CLIPTextModel, str(tmp_path), local_files_only=True)) == "6b6d9b6aa875f1ad"


def test_an_export_without_an_encoding_of_its_own_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no text_adapter/"):
        PromptEncoder(tmp_path)
