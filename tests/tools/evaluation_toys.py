"""A small CLIP model, a toy checkpoint, images and configurations for the tests of evaluations."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.tools.training_runs import TrainingServer

CLIP_SIZE = 32


def write_clip(folder: Path, seed: int = 0) -> Path:
    """Write a CLIP model with random weights, its tokenizer and its processor, in the layout of transformers."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    from diffusion.config.model import Architecture
    from diffusion.models.architectures import with_seed
    from diffusion.models.tokenizers import build_tokenizer

    tokenizer = build_tokenizer(Architecture.tiny)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**sizes, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 24}
    vision = {**sizes, "image_size": CLIP_SIZE, "patch_size": 16}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    with_seed(seed, lambda: CLIPModel(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": CLIP_SIZE}).save_pretrained(folder)
    return folder


def write_images(folder: Path, num: int, seed: int = 0, size: int = 40) -> Path:
    """Write images of smooth random colours."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for i in range(num):
        coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((size + i % 3, size)).save(folder / f"{i:03d}.png")
    return folder


def write_prompts(path: Path, prompts: list[str]) -> Path:
    """Write a list of prompts."""
    path.write_text("".join(f"{prompt}\n" for prompt in prompts))
    return path


def write_drawbench(path: Path, prompts: dict[str, list[str]]) -> Path:
    """Write prompts by category in the format of DrawBench."""
    rows = [f'"{prompt}",{category}\n' for category, listed in prompts.items() for prompt in listed]
    path.write_text("Prompts,Category\n" + "".join(rows))
    return path


def write_questions(folder: Path) -> Path:
    """Write `dpg_bench.csv` and `geneval2_data.jsonl` with two prompts each."""
    columns = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    rows = [
        'one,a red star,,1,0,,,"entity - whole (star)",Is there a star?',
        'one,a red star,,2,1,,,"attribute - color (star, red)",Is the star red?',
        'two,two blue stars,,1,0,,,"entity - whole (stars)",Are there stars?',
    ]
    (folder / "dpg_bench.csv").write_text("\n".join([f"{columns}question_natural_language", *rows]))
    count, there, red = ["How many stars?", "two"], ["Are there any stars?", "Yes"], ["Is the star red?", "Yes"]
    items = [
        {"prompt": "two stars", "atom_count": 2, "vqa_list": [count, there], "skills": ["count", "object"]},
        {"prompt": "a red star", "atom_count": 3, "vqa_list": [there, red], "skills": ["object", "attribute"]},
    ]
    (folder / "geneval2_data.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


def overrides(root: Path, output: Path, *more: str) -> list[str]:
    """For `tests/tools/toy_evaluation.yaml`, with what `write_all` wrote."""
    return [
        f"output_folder={output}",
        f"protocol.prompts.path={root / 'prompts.txt'}",
        f"protocol.reference.path={root / 'reference'}",
        *(f"protocol.networks.{name}={root / 'clip'}" for name in ("clip_fid", "clip_score", "cmmd")),
        *more,
    ]


def write_all(root: Path) -> Path:
    """Write what an evaluation needs besides a model."""
    write_clip(root / "clip")
    write_images(root / "reference", 11)
    write_prompts(root / "prompts.txt", [f"a {colour} star" for colour in ("red", "green", "blue", "cyan", "black")])
    return root


def evaluate_on(server: TrainingServer, num_ranks: int, arguments: list[str]) -> None:
    """Run `evaluate.py` on so many ranks; it must succeed."""
    server.command(num_ranks, ["evaluate.py", "tests/tools/toy_evaluation.yaml", *arguments])


def numbers(output: Path) -> dict[str, dict[str, float]]:
    """Values by the name of the result's file and their own."""
    return {
        path.stem: {name: entry["value"] for name, entry in json.loads(path.read_text())["numbers"].items()}
        for path in sorted((output / "results").glob("*.json"))
    }
