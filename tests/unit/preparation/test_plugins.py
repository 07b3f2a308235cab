import json
import random
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.preparation.config import CaptionerConfig, PrepareConfig, ScorerConfig
from diffusion.preparation.plugins import (
    call_plugin,
    check_plugins,
    choose_device,
    clean_score,
    load_plugin,
    merge_captions,
)
from tests.tools.vision_language_models import write_vqa

HERE = "tests.unit.preparation.test_plugins"
RED, GREEN, WHITE = (
    Image.new("RGB", size, colour) for size, colour in (((9, 4), "red"), ((4, 9), "green"), ((5, 5), "white"))
)


class Redness:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, images, captions):
        return [self.scale * image.getpixel((0, 0))[0] for image in images]


def config(**values) -> PrepareConfig:
    return from_dict(PrepareConfig, {"sources": ["a"], "out": "b", **values}, "test")


def scorer(name: str, column: str, **values) -> dict:
    return {"path": f"{HERE}.{name}", "column": column, **values}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(2), 2.0),
        (float("nan"), None),
        (float("inf"), None),
        (None, None),
        ("en", "en"),
        ("\ud800", "\\ud800"),
    ],
)
def test_results_become_numbers_texts_and_none(value, expected):
    found = clean_score(value)
    assert (found, type(found)) == (expected, type(expected))


def test_results_must_be_as_many_as_images():
    one = ScorerConfig(path="a.B", column="x")
    assert call_plugin(lambda images, captions: torch.ones(2), one, [RED, GREEN], [["a"], ["b"]]) == [1, 1]
    with pytest.raises(ConfigurationError, match=r"a\.B"):
        call_plugin(lambda images, captions: [1], one, [RED, GREEN], [["a"], ["b"]])


@pytest.mark.parametrize(
    ("mode", "merged"),
    [("missing", (["r", "new"], [1])), ("beside", (["r", "new"], [1])), ("instead", (["new"], [0]))],
)
def test_generated_captions_are_added_or_replace(mode, merged):
    captioner = config(captioner={"path": "a.B", "mode": mode}).captioner
    assert merge_captions(" new\n", ["r"], captioner) == merged
    assert merge_captions("  ", ["r"], captioner) == (["r"], [])
    captions, generated = merge_captions(["new", " ", "newer"], ["r"], captioner)
    assert [captions[i] for i in generated] == ["new", "newer"]
    with pytest.raises(ConfigurationError, match=r"captioner\.path"):
        merge_captions(7, [], captioner)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scorers": [{"path": "tests.absent.Thing", "column": "x"}]}, r"scorers\.0\.path=tests\.absent\.Thing"),
        ({"scorers": [scorer("Redness", "x", arguments={"absent": 1})]}, r"scorers\.0\.arguments"),
        ({"scorers": [scorer("Redness", "bytes")]}, r"scorers\.0\.column=bytes"),
        ({"scorers": [scorer("Redness", "Key")]}, r"scorers\.0\.column=Key"),
        ({"scorers": [scorer("Redness", "../x")]}, r"scorers\.0\.column"),
        ({"scorers": [{"path": f"{HERE}.Redness"}]}, r"scorers\.0\.column"),
        ({"scorers": [scorer("Redness", "x"), scorer("Redness", "X")]}, r"scorers\.1\.column=X"),
        ({"captioner": {"path": f"{HERE}.dict_of"}}, r"captioner\.path"),
        ({"captioner": {"arguments": {"x": 1}, "chat": {"model": "m"}}}, r"captioner\.arguments"),
    ],
)
def test_mistakes_are_found_before_any_work(values, message):
    with pytest.raises(ConfigurationError, match=message):
        check_plugins(config(**values))


def test_what_cannot_be_called_is_no_plugin():
    with pytest.raises(ConfigurationError, match=r"captioner\.path"):
        load_plugin(CaptionerConfig(path="builtins.dict"), "captioner")


# languages

ENGLISH = ["a red dog on a green meadow", "wedding cake with white roses", "an emoji of tomato", "radio", "SALE"]
OTHERS = {
    "de": ["ein roter Hund auf einer grünen Wiese", "Foto einer alten Brücke bei Nacht", "zwei Kinder im Schnee"],
    "fr": ["un chien rouge dans un pré vert", "photo d'un vieux pont la nuit", "gâteau de mariage aux roses blanches"],
    "es": ["un perro rojo en un prado verde", "foto de un puente viejo de noche", "dos niños juegan en la nieve"],
    "nl": ["een rode hond op een groen weiland", "twee kinderen spelen in de sneeuw"],
    "ru": ["красная собака на зеленом лугу"],
    "ja": ["緑の野原にいる赤い犬"],
    "zh": ["夜晚的古桥照片"],
}


@pytest.fixture(scope="module")
def language():
    from diffusion.preparation.languages import CaptionLanguage

    return CaptionLanguage()


def test_languages_of_captions(language):
    assert [language.of(caption) for caption in ENGLISH] == ["en"] * len(ENGLISH)
    for code, captions in OTHERS.items():
        assert [language.of(caption) for caption in captions] == [code] * len(captions)


def test_languages_of_images(language):
    captions = [
        ["a red dog", "a dog in the grass"],
        ["a red dog in the grass", OTHERS["ru"][0]],
        ["123 !!"],
        ["42", "a black cat"],
    ]
    assert not language.reads_images
    assert language([None] * 4, captions) == ["en", "mul", None, "en"]


def test_the_expected_language_can_be_another_or_none():
    from diffusion.preparation.languages import CaptionLanguage

    assert CaptionLanguage(prior=1).of("an emoji of tomato") != "en"
    assert CaptionLanguage(expected="nl").of("een film") == "nl"
    for arguments in ({"languages": ["en", "xx"]}, {"expected": "de", "languages": ["en"]}, {"prior": 0}):
        with pytest.raises(ConfigurationError):
            CaptionLanguage(**arguments)


@pytest.mark.emoji
def test_real_english_captions_are_english(language, data_folder):
    lines = (data_folder / "prompts/PartiPrompts.tsv").read_text(encoding="utf-8").splitlines()[1:]
    captions = [line.split("\t")[0] for line in lines]
    captions = [caption for caption in captions if len(caption.split()) >= 4]
    found = [language.of(caption) for caption in captions]
    assert found.count("en") > 0.99 * len(found)


# CLIP with a linear head


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A tiny random CLIP in a folder."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text, vision = {"vocab_size": 50, "eos_token_id": 1}, {"image_size": 32, "patch_size": 8, "projection_dim": 8}
    config = CLIPConfig(text_config=size | text, vision_config=size | vision, projection_dim=8)
    folder = tmp_path_factory.mktemp("clip")
    CLIPModel(config).save_pretrained(folder)
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor.save_pretrained(folder)
    return folder


def aesthetic(clip, head, **options):
    from diffusion.preparation.aesthetic import AestheticScore

    return AestheticScore(str(clip), str(head), device="cpu", **options)


def test_the_score_is_the_head_on_the_normalised_embedding(clip, tmp_path):
    from transformers import CLIPImageProcessor, CLIPModel

    weight, bias = torch.arange(8.0).reshape(1, 8), torch.tensor([5.0])
    save_file({"weight": weight, "bias": bias}, tmp_path / "head.safetensors")
    model, processor = CLIPModel.from_pretrained(clip), CLIPImageProcessor.from_pretrained(clip)
    noise = Image.frombytes("RGB", (50, 40), bytes(range(240)) * 25)
    images = [RED, noise, GREEN]
    with torch.no_grad():
        encoded = model.vision_model(**processor(images, return_tensors="pt"))
        features = model.visual_projection(encoded.pooler_output)
    expected = (features / features.norm(dim=-1, keepdim=True)) @ weight[0] + 5
    score = aesthetic(clip, tmp_path / "head.safetensors")
    assert score(images, [["a"]] * 3) == pytest.approx(expected.tolist(), abs=6e-4)
    assert [score([one], [["a"]])[0] for one in images] == pytest.approx(score(images, []), abs=1.1e-3)


def test_the_clip_score_is_that_of_the_caption_that_agrees_least(clip, tmp_path):
    from transformers import CLIPModel, CLIPProcessor, CLIPTokenizer

    from diffusion.preparation.agreement import ClipScore

    words = ["<|startoftext|>", "<|endoftext|>", "red</w>", "dog</w>", "d</w>", "g</w>", *"redog", "re", "do"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nr e\nre d</w>\nd o\ndo g</w>\n")
    folder = shutil.copytree(clip, tmp_path / "clip")
    CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), model_max_length=77).save_pretrained(
        folder
    )
    texts = ["red", "dog", "red dog " * 60]
    processor = CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=texts, images=[RED], return_tensors="pt", padding=True, truncation=True)
    model = CLIPModel.from_pretrained(folder)
    with torch.no_grad():
        model.logit_scale.zero_()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.5)
        if model(**inputs).logits_per_text.mean() < 0:
            model.visual_projection.weight.neg_()
        logits = model(**inputs).logits_per_text[:, 0]
    model.save_pretrained(folder)
    score = ClipScore(str(folder), device="cpu")
    single = [score([RED], [[text]])[0] for text in texts]
    assert single == pytest.approx((100 * logits.clamp(min=0)).tolist(), abs=0.02)
    assert len({*single}) > 1
    assert score([RED, GREEN, RED], [texts, [], texts[:2]]) == [min(single), None, min(single[:2])]


def test_a_head_of_several_layers(clip, tmp_path):
    torch.manual_seed(1)
    tensors = {"layers.0.weight": torch.randn(4, 8), "layers.0.bias": torch.randn(4),
               "layers.2.weight": torch.randn(3, 4), "layers.10.weight": torch.randn(1, 3)}  # fmt: skip
    save_file(tensors, tmp_path / "chain.safetensors")
    product = tensors["layers.10.weight"] @ tensors["layers.2.weight"]
    merged = {"weight": product @ tensors["layers.0.weight"], "bias": product @ tensors["layers.0.bias"]}
    save_file(merged, tmp_path / "one.safetensors")
    scores = [aesthetic(clip, tmp_path / f"{name}.safetensors")([RED, GREEN], []) for name in ("chain", "one")]
    assert scores[0] == pytest.approx(scores[1], abs=1.1e-3)
    assert scores[0][0] != scores[0][1]


def test_scores_of_a_lower_precision(clip, tmp_path):
    save_file({"weight": torch.zeros(1, 8), "bias": torch.tensor([4.5])}, tmp_path / "head.safetensors")
    assert aesthetic(clip, tmp_path / "head.safetensors", precision="bf16")([RED], [["a"]]) == [4.5]


def test_absent_and_wrong_weights_say_what_to_put_where(clip, tmp_path):
    with pytest.raises(
        DataError, match=r"clip: .*has no config.json and no .* and no model.safetensors; put CLIP there"
    ):
        aesthetic(tmp_path, tmp_path / "head.safetensors")
    with pytest.raises(DataError, match=r"head.safetensors is not a safetensors file; put .* weight \[1, 8\]"):
        aesthetic(clip, tmp_path / "head.safetensors")
    (tmp_path / "head.safetensors").write_bytes(b"garbage")
    with pytest.raises(DataError, match="is damaged"):
        aesthetic(clip, tmp_path / "head.safetensors")
    torch.save({"weight": torch.zeros(1, 8)}, tmp_path / "head.pth")
    with pytest.raises(DataError, match="not a safetensors file"):
        aesthetic(clip, tmp_path / "head.pth")
    for tensors, message in (
        ({"weight": torch.zeros(1, 768)}, "8 features come in"),
        ({"weight": torch.zeros(2, 8)}, "gives 2 numbers"),
        ({"bias": torch.zeros(1)}, "8 features come in"),
        ({"norm.scale": torch.zeros(1)}, "no weight and no bias"),
    ):
        save_file(tensors, tmp_path / "head.safetensors")
        with pytest.raises(DataError, match=message):
            aesthetic(clip, tmp_path / "head.safetensors")


def test_wrong_devices_and_precisions(clip, tmp_path):
    from diffusion.preparation.aesthetic import AestheticScore

    with pytest.raises(ConfigurationError, match="precision: 'fp8'"):
        AestheticScore(str(clip), "head", precision="fp8")
    with pytest.raises(ConfigurationError, match="'gpu!' is not a device"):
        AestheticScore(str(clip), "head", device="gpu!")
    with pytest.raises(MachineError, match="cuda:99"):
        AestheticScore(str(clip), "head", device="cuda:99")


def test_the_default_device_is_the_gpu_that_the_worker_was_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(None).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(MachineError, match="cuda"):  # It does not go on with the CPU silently.
        choose_device(None)


# image to text


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    """A tiny random BLIP in a folder, with a tokenizer of single words."""
    from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

    folder = tmp_path_factory.mktemp("blip")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[DEC]",
        "[ENC]",
        *["a", "photograph", "of", "red", "green", "dog", "cat"],
    ]
    (folder / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(3)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**size, "vocab_size": len(words), "encoder_hidden_size": 16, "bos_token_id": 5, "eos_token_id": 3,
            "sep_token_id": 3, "pad_token_id": 0}  # fmt: skip
    config = BlipConfig(text_config=text, vision_config={**size, "image_size": 32, "patch_size": 8})
    model = BlipForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)  # so that images matter
    model.save_pretrained(folder)
    processor = BlipImageProcessor(size={"height": 32, "width": 32})
    tokenizer = BertTokenizer(str(folder / "vocab.txt"), bos_token="[DEC]", additional_special_tokens=["[ENC]"])
    BlipProcessor(processor, tokenizer).save_pretrained(folder)
    return folder


def test_captions_of_a_model_are_repeatable_and_do_not_depend_on_the_batch(blip):
    from diffusion.preparation.captioners import ImageToText

    noise = [Image.frombytes("RGB", (40, 30), random.Random(seed).randbytes(3600)) for seed in range(3)]
    images = [RED, *noise, GREEN]
    captioner = ImageToText(str(blip), max_new_tokens=6, device="cpu")
    captions = captioner(images, [[]] * 5)
    assert captions == captioner(images, [[]] * 5)
    assert captions == [captioner([image], [[]])[0] for image in images]
    texts = [text for (text,) in captions]
    assert len(set(texts)) > 1
    assert all("[" not in text for text in texts)


def test_a_folder_of_transformers_4_has_the_same_captions(blip, tmp_path):
    """It has a file for the image processor only."""
    from diffusion.preparation.captioners import ImageToText

    folder = shutil.copytree(blip, tmp_path / "blip")
    whole = folder / "processor_config.json"
    image_processor = json.loads(whole.read_text())["image_processor"]
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor | {"processor_class": "BlipProcessor"}))
    whole.unlink()
    found, expected = (ImageToText(str(path), device="cpu")([RED, GREEN], [[], []]) for path in (folder, blip))
    assert found == expected


def test_a_prompt_begins_each_caption(blip):
    from diffusion.preparation.captioners import ImageToText

    captioner = ImageToText(str(blip), prompt="a photograph of", max_new_tokens=3, num_beams=2, device="cpu")
    assert all(text.startswith("a photograph of") for (text,) in captioner([RED, GREEN], [[], []]))


def test_a_chat_model_writes_a_caption_for_each_instruction(tmp_path):
    """Images of several sizes, and so prompts of several lengths, in a batch as alone."""
    from diffusion.preparation.captioners import ImageToText

    folder = write_vqa(tmp_path / "vqa", seed=1)
    captioner = ImageToText(str(folder), prompt=["Is there a star?", "How many?"], max_new_tokens=6, device="cpu")
    sizes = [(28, 28), (60, 30), (30, 60)]
    images = [Image.frombytes("RGB", size, random.Random(size[0]).randbytes(3 * size[0] * size[1])) for size in sizes]
    captions = captioner(images, [[]] * 3)
    assert [len(texts) for texts in captions] == [2, 2, 2]
    assert captions == [captioner([image], [[]])[0] for image in images]
    assert len({texts[0] for texts in captions}) > 1
    assert all(short != long for short, long in captions)
    assert not any("star?" in text or "assistant" in text for texts in captions for text in texts)


def test_a_chat_model_is_asked_with_its_template(tmp_path):
    """Its answer is a function of the last token of the prompt, which the template adds."""
    from diffusion.preparation.captioners import ImageToText

    folder = write_vqa(tmp_path / "vqa", {"two": 0.9})
    assert ImageToText(str(folder), max_new_tokens=1, device="cpu")([RED, GREEN], [[], []]) == [["two"], ["two"]]


def test_an_absent_captioner_is_told(tmp_path, blip):
    from diffusion.preparation.captioners import ImageToText

    with pytest.raises(DataError, match="put an image-to-text model there"):
        ImageToText(str(tmp_path))
    with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
        ImageToText(str(blip), max_new_tokens=0)
