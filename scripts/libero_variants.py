"""LIBERO with images that are stored or turned otherwise, for ``scripts/libero_numbers.py``.

env.name=libero_variants:JpegLibero        each image has been a JPEG file
env.name=libero_variants:RotatedLibero     each image is as robosuite renders it: rotated by 180 degrees
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from envs import env_spec, make_env
from envs.base.wrapper import EnvWrapper
from envs.libero.config import LiberoConfig
from vla_rl.core.records import EnvSpec, Observation

_QUALITY = 95  # of JPEG files, as TensorFlow's encoder and the data sets of the OpenVLA papers have it


def _plain(config: Any) -> LiberoConfig:
    return LiberoConfig(**{name: getattr(config, name) for name in LiberoConfig.model_fields if name != "name"})


class _ChangedLibero(EnvWrapper):
    class Config(LiberoConfig):
        """The keys of LIBERO."""

    def __init__(self, config: Any, num_envs: int) -> None:
        super().__init__(make_env(_plain(config), num_envs))

    @staticmethod
    def env_spec(config: Any) -> EnvSpec:
        """Of LIBERO itself."""
        return env_spec(_plain(config))

    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        """See ``VectorEnv``."""
        self._env.observe(env_ids, out)
        for env_id in env_ids:
            for view in out.images[env_id]:
                view[:] = self._changed(view)

    def _changed(self, image: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class JpegLibero(_ChangedLibero):
    """See the module."""

    def _changed(self, image: np.ndarray) -> np.ndarray:
        _, data = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        seen = cv2.imdecode(data, cv2.IMREAD_COLOR)
        assert seen is not None
        return seen[..., ::-1]


class RotatedLibero(_ChangedLibero):
    """See the module."""

    def _changed(self, image: np.ndarray) -> np.ndarray:
        return image[::-1, ::-1].copy()
