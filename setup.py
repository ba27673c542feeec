"""Packages of vla_rl. The scripts install requirements.txt first (tested as a whole); here stand the open ranges."""

from setuptools import find_packages, setup

setup(
    name="vla_rl",
    version="0.1.0",
    description="Asynchronous actor-learner reinforcement learning of vision-language-action policies",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["vla_rl*", "envs*", "algos*"]),
    include_package_data=True,
    install_requires=["numpy", "pydantic>=2", "omegaconf", "rich", "safetensors", "tokenizers"],
    entry_points={"console_scripts": ["vla-rl = vla_rl.cli:main"]},
)
