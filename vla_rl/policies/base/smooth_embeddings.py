"""Starting values for embeddings of ordered things: neighbours begin alike, so what is learned at one helps both."""

import math

import torch
from torch import Tensor

_GRID_WAVES = 4  # per axis, in the encoding of a patch's position


def grid_embeddings(side: int, width: int) -> Tensor:
    """[side * side, width]: embeddings of a square grid's patches, row by row; random, standard deviation 1."""
    line = torch.linspace(-1, 1, side)
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    code = torch.cat([waves(axis.flatten(), _GRID_WAVES) for axis in (rows, columns)], dim=1)
    return embed(code - code.mean(0), width)


def waves(place: Tensor, count: int) -> Tensor:
    """[n] -> [n, 2 count]: sines and cosines with 1/2, 2/2, ... periods in [-1, 1]; amplitudes fall with frequency."""
    order = torch.arange(1, count + 1)
    phase = math.pi / 2 * place.unsqueeze(1) * order
    return torch.cat([phase.sin() / order, phase.cos() / order], dim=1)


def embed(code: Tensor, width: int) -> Tensor:
    """[n, features] -> [n, width] by a random map that keeps angles if it is wide enough; standard deviation 1."""
    directions = torch.linalg.qr(torch.randn(max(width, code.shape[1]), code.shape[1])).Q[:width]
    embedded = code @ directions.T
    return embedded / embedded.std()
