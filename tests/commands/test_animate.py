"""`vla-rl plot RUN --animate FILE`: films of the first and of the last evaluation beside the curve."""

import json
from pathlib import Path

import imageio
import numpy as np
import pytest
from PIL import Image

from tests import ROOT
from vla_rl.commands.cli import main

RED, GREEN, BLUE = (200, 40, 40), (40, 160, 40), (40, 40, 200)
LEFT, RIGHT = (12 + 128, 56 + 128), (280 + 128, 56 + 128)  # x and y of the middle of a film
CURVE = (slice(50, 250), slice(800, 940))  # rows and columns of its second half


def film(path: Path, color: tuple[int, int, int], frames: int) -> None:
    """On noise, the color. Of 32 pixels, which are shown eight times as large."""
    noise = np.random.default_rng(0).integers(0, 256, (frames, 32, 32, 3), np.uint8)
    noise[:, 8:24, 8:24] = color
    imageio.mimwrite(path, list(noise), fps=20, codec="libx264", macro_block_size=2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 9 updates with evaluations after 0, 4 and 8. What it had played up to update 12 before was lost."""
    folder = tmp_path / "run"
    (folder / "evaluations").mkdir(parents=True)
    (folder / "config.yaml").write_text("env: {name: libero}\nalgo: {name: ppo}\n")
    (folder / "metadata.json").write_text(json.dumps({"simulator": "libero", "assets": "placeholder"}))
    rates = {0: 0.25, 4: 0.5, 8: 0.75}
    lines = [
        {"iteration": i, "time/seconds": 60.0 * i, "rollout/success": 0.1 * i}
        | ({"eval/greedy_success": rates[i], "eval/greedy_low95": 0.1, "eval/greedy_high95": 0.9} if i in rates else {})
        for i in range(10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for iteration, color, frames in ((0, RED, 12), (4, BLUE, 12), (8, GREEN, 6), (12, BLUE, 12)):
        film(folder / f"evaluations/{iteration:06d}-greedy.mp4", color, frames)
    return folder


def pictures(file: Path) -> list[np.ndarray]:
    with Image.open(file) as image:
        shown = []
        for i in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(i)
            shown.append(np.asarray(image.convert("RGB")).astype(int))
    return shown


def near(pixel: np.ndarray, color: tuple[int, int, int]) -> bool:
    return bool(np.abs(pixel - color).max() < 40)


@pytest.mark.parametrize("name", ["run.webp", "run.gif"])
def test_first_and_last_films_beside_a_curve_that_grows(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run.parent / name
    assert main(["plot", str(run), "--animate", str(file)]) == 0
    size = file.stat().st_size
    assert capsys.readouterr().out == f"{file} ({size / 1000:.0f} kB)\n"
    assert size <= 400_000
    shown = pictures(file)
    assert len(shown) == 7, "12 frames at 20 a second are shown at 10, and the last one"
    assert all(near(picture[LEFT[::-1]], RED) for picture in shown)
    assert all(near(picture[RIGHT[::-1]], GREEN) for picture in shown), "the shorter film rests at its end"
    dark = [(picture[CURVE].min(axis=2) < 200).sum() for picture in shown]
    assert dark[0] == dark[1] < dark[-1], "nothing of the second half of the run at first"
    assert not (run.parent / "curves.png").exists()


def test_small_files_have_less_quality_and_fewer_frames(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, counts, sizes = run.parent / "run.webp", [], []
    for allowed in (400, 40):
        assert main(["plot", str(run), "--animate", str(file), "--kilobytes", str(allowed)]) == 0
        counts.append(len(pictures(file)))
        sizes.append(file.stat().st_size)
    assert counts[0] > counts[1]
    assert sizes[0] > 40_000 >= sizes[1]
    before = file.read_bytes()
    assert main(["plot", str(run), "--animate", str(file), "--kilobytes", "1"]) == 2
    assert "kB, and --kilobytes allows 1" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_what_cannot_be_animated_is_one_clear_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert main(["plot", *arguments]) == 2
        return capsys.readouterr().err

    file = str(run.parent / "run.webp")
    assert "--animate shows one run, and 2 are named" in error(str(run), str(run), "--animate", file)
    assert "an animation is a .webp or a .gif file" in error(str(run), "--animate", str(run.parent / "run.mp4"))
    assert "has not recorded episodes/played" in error(str(run), "--animate", file, "--x", "episodes")
    copy = ROOT / "docs/results/libero_ppo_cpu/seed0.jsonl"
    assert "has films of 0 evaluations, and two are needed" in error(str(copy), "--animate", file)
    last = run / "evaluations/000008-greedy.mp4"
    last.write_bytes(last.read_bytes()[:2000])
    assert "000008-greedy.mp4 cannot be read as a film" in error(str(run), "--animate", file)
    for iteration in (4, 8):
        (run / f"evaluations/{iteration:06d}-greedy.mp4").unlink()
    assert "has films of 1 evaluations, and two are needed" in error(str(run), "--animate", file)
    assert not Path(file).exists()
