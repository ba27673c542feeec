"""Films: pixels that stay as they are, and captions that say what happens."""

from dataclasses import replace
from pathlib import Path

import imageio
import numpy as np
import pytest

from tests.runtime_fakes import SPEC, result
from vla_rl.core.errors import UserError
from vla_rl.core.records import EpisodeResult
from vla_rl.observability.embedded import Shown
from vla_rl.observability.films import film_frames, film_seconds, write_film
from vla_rl.observability.success_rate import Evaluation
from vla_rl.replay.schedule import evaluation_episodes

HELD = 30  # frames with the verdict: 1.5 s at 20 a second
GREEN, RED = (24, 105, 57), (163, 40, 32)


def episodes(*shapes: tuple[int, int], steps: int = 3, values: bool = True) -> list[EpisodeResult]:
    """Of random frames; the second one fails."""
    rng = np.random.default_rng(0)
    return [
        replace(
            result(episode),
            frames=tuple(rng.integers(0, 256, (*shape, 3), np.uint8) for _ in range(steps)),
            values=tuple(0.25 * i for i in range(steps)) if values else (),
            steps=steps,
        )
        for shape, episode in zip(shapes, evaluation_episodes(0, len(shapes), 2, 10, seed=0, record=9), strict=True)
    ]


@pytest.mark.parametrize(
    ("shape", "factor"), [((100, 100), 3), ((255, 300), 2), ((256, 256), 1), ((480, 640), 1), ((85, 91), 4)]
)
def test_each_pixel_becomes_a_square_of_a_film_that_is_large_enough(shape: tuple[int, int], factor: int) -> None:
    (one,) = episodes(shape)
    frames = list(film_frames([one], SPEC))
    assert len(frames) == 3 + HELD == round(film_seconds(one, SPEC) * SPEC.fps)
    height, width = factor * shape[0], factor * shape[1]
    assert min(height, width) >= 256
    for frame, original in zip(frames, one.frames, strict=False):
        assert frame.shape[0] % 2 == frame.shape[1] % 2 == 0, "H.264 has colors for pairs of pixels"
        assert frame.shape[0] > height + 40
        shown = frame[len(frame) - (height + height % 2) :][:height, :width].reshape(
            shape[0], factor, shape[1], factor, 3
        )
        assert (shown == original[:, None, :, None]).all()


def test_captions_tell_step_value_and_at_the_end_the_verdict() -> None:
    success, failure = episodes((128, 128), (128, 128))
    frames = [frame[:-256] for frame in film_frames([success, failure], SPEC)]
    colors = [{color for color in (GREEN, RED) if (frame == color).all(axis=-1).any()} for frame in frames]
    assert colors == [set(), set(), *[{GREEN}] * (1 + HELD), set(), set(), *[{RED}] * (1 + HELD)]
    assert not np.array_equal(frames[0], frames[1]), "the step"
    silent = [frame[:-256] for frame in film_frames(episodes((128, 128), values=False), SPEC)]
    changed = np.flatnonzero((silent[0] != frames[0]).any(axis=(0, 2)))
    assert len(changed)
    assert changed.min() > 128, "the value stands on the right"
    assert (frames[2] == frames[3]).all(), "the last frame stays"


def test_a_long_instruction_stays_inside() -> None:
    spec = replace(SPEC, instructions=("put the white mug on the left plate " * 9, "x" * 200))
    ((one, other), background) = episodes((128, 128), (128, 128)), (20, 22, 26)
    for one_film in ([one], [other], [one, other]):
        caption = next(iter(film_frames(one_film, spec)))[:-256]
        assert (caption[:, -4:] == background).all()
        assert (caption != background).any()
    assert {frame.shape for frame in film_frames([one, other], spec)} == {(256 + len(caption), 256, 3)}


def test_a_film_can_be_played_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    write_film(path, episodes((64, 64), (64, 64)), replace(SPEC, fps=10))
    with imageio.get_reader(path) as film:
        about = film.get_meta_data()
        assert film.count_frames() == 2 * (3 + 15)
    assert (about["codec"], about["fps"], about["size"][0]) == ("h264", 10.0, 256)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="same size"):
        write_film(path, episodes((64, 64), (32, 64)), SPEC)
    assert [file.name for file in tmp_path.iterdir()] == ["film.mp4"], "nothing is left"
    assert path.read_bytes() == before, "a film is whole, or as it was"


def test_an_evaluation_writes_its_film(tmp_path: Path) -> None:
    evaluation = Evaluation(SPEC, True, tuple(episodes((64, 64), (64, 64))))
    shown = evaluation.film(tmp_path / "film.mp4")
    assert shown == Shown(tmp_path / "film.mp4", "do it: success; do that: failure: time limit")
    assert [row["from_s"] for row in evaluation.record()["filmed"]] == [0.0, 1.65]
    assert Path(shown).is_file()
    markup = shown._repr_html_()
    assert markup.startswith('<video controls muted playsinline aria-label="do it: success; do that: ')
    assert 'src="data:video/mp4;base64,AAAA' in markup
    with pytest.raises(UserError, match=r"no episode of the evaluation has frames: .* record=3 or failures=3"):
        replace(evaluation, results=()).film(tmp_path / "film.mp4")
