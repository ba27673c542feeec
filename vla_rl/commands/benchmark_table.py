"""The commands `vla-rl benchmark WHAT`; see ``vla_rl.commands.command_table``."""

from vla_rl.commands.arguments import (
    CONFIG,
    JSON,
    OVERRIDES,
    PICTURE,
    count,
    file,
    names,
    numbers,
    option,
)
from vla_rl.commands.command_table import Command

BENCHMARKS: dict[str, Command] = {
    "overlap": (
        "benchmark.overlap:overlap_command",
        "do simulator, inference and learner run at once?",
        (count("--iterations", "measured per case and mode", 6), JSON),
    ),
    "simulator": (
        "benchmark.simulator:simulator_command",
        "LIBERO on one core, compared with hf-libero and LeRobot",
        (
            option("name", choices=["libero"], help="the only one so far"),
            option("--suite", metavar="NAME", default="libero_spatial", help="its first two tasks are played"),
            count("--image-size", "pixels", 256),
            count("--chunk-size", "control steps", 8),
            count("--rounds", "rounds that each contestant plays", 5),
            JSON,
        ),
    ),
    "limit": (
        "benchmark.limit:limit_command",
        "how near a run is to what no implementation avoids here",
        (CONFIG, OVERRIDES, count("--iterations", "measured, after two that are not", 3), JSON),
    ),
    "regress": (
        "benchmark.regress:regress_command",
        "is this source tree slower than it was at a commit?",
        (
            option("commit", metavar="COMMIT", help="of this checkout, such as HEAD~5"),
            option("--figures", metavar="NAME,...", type=names, help="chunk, observe, act, update, start, first_step"),
            count("--blocks", "in which both are measured", 7),
            JSON,
        ),
    ),
    "workers": (
        "benchmark.workers:workers_command",
        "what the runtime itself costs for an episode, with many env workers, and what saturates first",
        (
            CONFIG,
            OVERRIDES,
            option("--workers", metavar="N,N,...", type=numbers, default=[1, 4, 16, 64], help="env workers"),
            count("--iterations", "measured per point", 4),
            PICTURE,
            JSON,
        ),
    ),
    "network": (
        "benchmark.network:network_command",
        "what the way over the network adds to a request for an action chunk",
        (CONFIG, OVERRIDES, count("--blocks", "in which all ways are measured", 7), JSON),
    ),
    "scaling": (
        "benchmark.scaling:scaling_command",
        "batches/s across device counts and placement modes",
        (
            CONFIG,
            OVERRIDES,
            option("--backend", choices=["real", "virtual", "simulated"], help="default: by placement.virtual"),
            option("--devices", metavar="N,N,...", type=numbers, default=[1, 2, 4, 8], help="device counts"),
            option(
                "--mode", metavar="NAME,...", default="all", help="placement modes, auto, synchronous reference; all"
            ),
            count("--iterations", "measured per point", 4),
            file("--csv", "also write the points to this file"),
            PICTURE,
            file("--json", "also write the points to this file; points that it already holds are not measured again"),
        ),
    ),
}
