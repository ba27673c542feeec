"""Packages of vla_rl. The scripts install requirements.txt, which was tested as a whole; here stand the open ranges."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CORE = [
    "deepspeed>=0.17",
    "gymnasium>=1.1,<2",
    "h5py",
    "imageio",
    "imageio-ffmpeg",
    "jinja2",
    "lz4>=4.3,<5",
    "matplotlib",
    "msgpack",
    "numpy>=2",
    "nvidia-ml-py",
    "omegaconf>=2.3",
    "peft>=0.21",
    "pillow",
    "psutil",
    "pydantic>=2.10",
    "pyyaml",
    "pyzmq>=26,<28",  # with libsodium and CURVE in its wheels
    "ray>=2.45,<3",
    "rich>=13",
    "safetensors>=0.5",
    "simpy>=4,<5",
    "tensorboard",
    "tokenizers",
    "torch>=2.7,<3",
    "transformers>=5.18,<6",  # policies use its modules by their names, which changed before
    "websockets>=15",
]
EXTRAS = {
    # What the environments of hf-libero import. hf-libero, robosuite and bddl follow with --no-deps
    # (docs/installation.md): they declare what nothing here imports, and what is built with cmake. robosuite and MuJoCo
    # are driven below their public interfaces: other versions need a test of the physics.
    "libero": [
        "cloudpickle",
        "easydict",
        "future",
        "huggingface_hub",
        "mujoco>=3.2,<3.9",
        "networkx",
        "numba",
        "opencv-python-headless",
        "pyopengl",
        "scipy",
    ],
    # What its tasks import; mani_skill==3.0.1 and sapien==3.0.3 follow with --no-deps. Private parts of ManiSkill are
    # used to choose its devices and to draw only where asked.
    "maniskill": [
        "dacite",
        "defusedxml",
        "ipython",
        "lxml",
        "opencv-python-headless",
        "pytorch-kinematics==0.7.6",
        "requests",
        "scipy",
        "tqdm",
        "transforms3d",
        "trimesh",
    ],
    # metaworld==3.1.1 follows with --no-deps: it declares one release of MuJoCo, and runs with these
    # (docs/metaworld.md).
    "metaworld": ["mujoco>=3.2,<3.9", "pyopengl", "scipy"],
    "wandb": ["wandb"],
    # LeRobot's data sets, read and written. The package lerobot is apart: scripts/requirements_lerobot.txt.
    "lerobot": ["av>=15", "pyarrow>=21"],
    # The site of docs/; scripts/build_docs.sh installs it from requirements-docs.txt.
    "docs": ["mkdocs-material>=9.7,<10", "mkdocs>=1.6,<2", "mkdocstrings>=1,<2", "mkdocstrings-python>=2,<3"],
    "dev": [
        "hypothesis",
        "ipykernel",  # with nbclient, it runs the notebooks
        "mypy>=1.14",
        "nbclient",
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "ruff>=0.9",
        # Whose maths the tests compare with: what of theirs is not public may move in another release.
        "stable-baselines3>=2.9,<2.10",
        "torchrl>=0.14,<0.15",
    ],
}
ROOT = Path(__file__).parent
SHIPPED = ("configs", "checkpoints")


class BuildWithShipped(build_py):
    """Adds the configs and the small checkpoints, which a checkout has at its root (``vla_rl.core.shipped``)."""

    def run(self) -> None:
        super().run()
        for name in SHIPPED if not self.editable_mode else ():
            target = Path(self.build_lib, "vla_rl", "shipped", name)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / name, target)


setup(
    name="vla_rl",
    version="0.1.0",
    description="Asynchronous actor-learner reinforcement learning of vision-language-action policies",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["vla_rl*", "envs*", "algos*"]),
    package_data={
        "envs.libero.assets.placeholder": ["table.yaml"],
        "envs.libero.protocol": ["audits.json", "settled.npz"],
        "vla_rl": ["py.typed"],
        "vla_rl.observability": ["page.html", "page.css", "page.js"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    cmdclass={"build_py": BuildWithShipped},
    entry_points={"console_scripts": ["vla-rl = vla_rl.commands.cli:main"]},
)
