"""The package lerobot reads a data set, and finds what this project's reader finds. Run by scripts/check_lerobot.sh.

python scripts/check_lerobot_data.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from envs.base.demonstrations import read_demonstrations


def main(root: Path) -> None:
    data = LeRobotDataset("vla_rl/data", root=root)
    texts = [str(text) for text in data.meta.tasks.index]
    size = data.meta.features["observation.images.image"]["shape"][0]
    width = data.meta.features["observation.state"]["shape"][0]
    views = [key for key in data.meta.features if key.startswith("observation.images.")]
    ours = read_demonstrations([root], instructions=texts, views=views, image_size=size, proprio=width)
    rows = [data[i] for i in range(len(data))]
    ends = [i for i in range(len(rows)) if bool(rows[i]["next.done"])]
    assert len(ends) == data.num_episodes, f"{len(ends)} ends of {data.num_episodes} episodes"
    starts = [0, *(end + 1 for end in ends[:-1])]
    kept = [(a, b) for a, b in zip(starts, ends, strict=True) if bool(rows[b]["next.success"])]
    assert ours.num_demonstrations == len(kept), "the successful episodes"
    chosen = [rows[i] for a, b in kept for i in range(a, b + 1)]
    assert np.allclose(ours.proprio, np.stack([row["observation.state"] for row in chosen]))
    theirs = np.stack([row["action"] for row in chosen])
    assert np.allclose(ours.actions[:, :-1], theirs[:, :-1])
    assert np.allclose(1 - 2 * ours.actions[:, -1], theirs[:, -1])
    assert [texts[task] for task in ours.task] == [row["task"] for row in chosen]
    worst = 0.0
    for view, key in enumerate(views):
        for image, row in zip(ours.images[:, view], chosen, strict=True):
            shown = row[key].permute(1, 2, 0).numpy() * 255
            worst = max(worst, float(np.abs(image - shown).mean()))
    assert worst < 2.0, f"a frame differs by {worst:.1f} of 255 on average: another frame, or another decoder"
    mean = np.stack([row["action"] for row in rows]).mean(0)
    assert np.allclose(data.meta.stats["action"]["mean"], mean, atol=1e-4), "statistics"
    failures = data.num_episodes - len(kept)
    print(
        f"{root}: lerobot reads {data.num_episodes} episodes ({failures} failures), {len(data)} frames; the same here"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
