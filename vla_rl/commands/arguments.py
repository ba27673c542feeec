"""Kinds of arguments that commands have in common: how their text is read, and how they are declared."""

import argparse
import math
from pathlib import Path
from typing import Any


def new_file(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file in a folder that exists")
    return path


def resumed_run(text: str) -> tuple[Path, int | None]:
    """``RUN`` or ``RUN@ITERATION``."""
    run, at, iteration = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    if not iteration.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: {iteration!r} is not an iteration; write RUN@ITERATION")
    return Path(run), int(iteration)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number below 1000000000")
    return int(text)


def amount(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below a million")
    return value


def share(text: str) -> float:
    """A number above 0, up to 1."""
    value = amount(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1: 0.9 are 90 %")
    return value


def numbers(text: str) -> list[int]:
    """``N,N,...``"""
    return [positive(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """``NAME,...``"""
    return text.split(",")


def option(*flags: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of ``ArgumentParser.add_argument``."""
    return flags, options


def count(name: str, use: str, default: int | None = None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An option that is a whole number above 0."""
    return option(name, metavar="N", type=positive, default=default, help=use)


def file(name: str, use: str, default: Path | None = None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An option that is a file to write."""
    return option(name, metavar="FILE", type=new_file, default=default, help=use)


CONFIG_HELP = "YAML file, or the name of a shipped one, such as libero_ppo"
CONFIG = option("config", metavar="CONFIG", type=Path, help=CONFIG_HELP)
OVERRIDES = option(
    "overrides",
    metavar="KEY=VALUE",
    nargs="*",
    help="any key of the config, such as train.iterations=2, env.tasks=[0,1] or algo=NAME",
)
JSON = file("--json", "also write the figures to this file")
PICTURE = file("--output", "draw a picture, a png file")
