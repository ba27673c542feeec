"""Tries deploy/slurm.sbatch on a real Slurm: a run over two hosts meets its time limit, then another loses a host.

    .venv/bin/python scripts/try_slurm.py [--what limit] [--minutes 3] [--keep FOLDER] [KEY=VALUE ...]

The hosts are namespaces of this machine (``slurm_cluster``), and nothing of them is left. Needs Linux, root, and on
Debian ``apt-get install --no-install-recommends slurm-wlm munge iproute2``. The environment and this checkout must not
lie in /tmp or /run, which the hosts have to themselves. Two to five minutes for each part on two cores. Exit status 0:
all that is checked holds; 1: something does not.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slurm_cluster import WORK, Host, command, run_inside, start_cluster, wait_for

CODE = Path(__file__).resolve().parents[1]
EPISODES = 16  # of an iteration
# a run whose end no time limit of minutes sees
RUN: tuple[str, ...] = (
    "train.iterations=5000",
    f"train.batch_episodes={EPISODES}",
    "train.eval_every=0",
    "train.eval_start=false",
)
RUN += ("placement.env_workers=2", "placement.envs_per_worker=8")
TEMPLATE = str(CODE / "deploy/slurm.sbatch")

_began = time.monotonic()
_problems: list[str] = []


def say(text: str) -> None:
    print(f"{time.monotonic() - _began:4.0f} s  {text}", flush=True)


def check(holds: bool, what: str) -> None:
    say(f"{'holds' if holds else 'DOES NOT HOLD'}: {what}")
    if not holds:
        _problems.append(what)


class Job:
    """A submitted job, whose changes are said as they are seen."""

    def __init__(self, *arguments: str) -> None:
        self.number = int(command("sbatch", "--parsable", *arguments))
        self.run = WORK / f"work/runs/slurm-{self.number}"
        self._seen = ""
        say(f"job {self.number}: sbatch {' '.join(arguments)}")

    def state(self) -> dict[str, str]:
        found = dict(re.findall(r"(\S+?)=(\S*)", command("scontrol", "show", "job", "-o", str(self.number))))
        now = ", ".join(f"{key} {found[key]}" for key in ("JobState", "NodeList", "Restarts", "Reason"))
        if now != self._seen:
            say(f"job {self.number}: {now}")
            self._seen = now
        return found

    def records(self) -> list[dict[str, float]]:
        """The finished iterations."""
        with suppress(OSError):
            lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def newest(self) -> int:
        """The iteration of the newest checkpoint; 0 if there is none."""
        return max((int(path.name) for path in (self.run / "checkpoints").glob("[0-9]*")), default=0)

    def wait_for(self, holds: Callable[[dict[str, str]], bool], what: str) -> None:
        """Raises TimeoutError, also once the job has ended."""

        def now() -> bool:
            state = self.state()
            if not (held := holds(state)) and state["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"):
                print((WORK / f"work/vla_rl-{self.number}.log").read_text())
                raise TimeoutError(f"{what}: the job has ended before")
            return held

        wait_for(now, what, 240)


def begin(hosts: list[Host], *options: str) -> Job:
    """A run that has done two iterations."""
    job = Job("--nodes=2", "--gpus-per-node=0", *options)
    job.wait_for(lambda _: len(job.records()) >= 2, "two iterations")
    for host in hosts:
        say(f"{host.name}: {', '.join(f'{n} x {what}' for what, n in sorted(host.processes().items()))}")
    check(all(host.processes()["raylet"] for host in hosts), "Ray runs on both hosts")
    return job


def end(job: Job, hosts: list[Host]) -> None:
    """Once it was requeued, the run continues from its newest checkpoint; it is cancelled, and looked at."""
    saved = job.newest()
    before = [record for record in job.records() if record["iteration"] <= saved]
    say(f"{len(job.records())} iterations; the newest checkpoint is of iteration {saved}")
    job.wait_for(lambda now: now["JobState"] == "RUNNING", "the requeued job")
    written = (job.run / "metrics.jsonl").stat().st_mtime_ns  # a resume writes it anew
    job.wait_for(lambda _: (job.run / "metrics.jsonl").stat().st_mtime_ns != written, "the second part")
    job.wait_for(lambda _: len(job.records()) >= saved + 2, "two iterations of the second part")
    check(all(host.processes()["raylet"] for host in hosts), "Ray runs on both hosts again")
    command("scancel", str(job.number))
    job.wait_for(lambda now: now["JobState"] == "CANCELLED" and not command("squeue", "-h").strip(), "the end")
    check_records(job, before)
    check_hosts(hosts)


def try_limit(hosts: list[Host], minutes: int, overrides: list[str]) -> None:
    """Slurm looks at time limits every 30 s, so that it signals up to a minute before the 20 s that are asked for."""
    options = (f"--time={minutes}", "--signal=B:USR1@20", TEMPLATE, "tabletop", *RUN, *overrides)
    job = begin(hosts, *options, "train.checkpoint_every=100000")
    job.wait_for(lambda now: now["Restarts"] == "1" and now["JobState"] == "PENDING", "the requeue")
    check(job.newest() == len(job.records()) > 0, "the only checkpoint is that of the signal, of the last iteration")
    check_hosts(hosts)
    end(job, hosts)


def try_lost_host(hosts: list[Host], overrides: list[str]) -> None:
    """The second host is switched off, and comes back."""
    job = begin(hosts, "--time=30", TEMPLATE, "tabletop", *RUN, *overrides, "train.checkpoint_every=1")
    hosts[1].switch_off()
    say("n2 is switched off")
    job.wait_for(lambda now: now["Restarts"] == "1" and now["JobState"] == "PENDING", "the requeue")
    hosts[1] = Host("n2")
    say("n2 is back")
    end(job, hosts)


def check_records(job: Job, before: list[dict[str, float]]) -> None:
    from vla_rl.commands.chaos.training_run import adds_up, ledger

    records = job.records()
    say(f"{len(records)} iterations; ledger: {', '.join(f'{k} {v}' for k, v in ledger(records[-1]).items())}")
    numbers = [int(record["iteration"]) for record in records]
    trained = [int(record["episodes/trained"]) for record in records]
    check(records[: len(before)] == before, f"the {len(before)} iterations before the requeue are as they were")
    check(numbers == list(range(1, len(records) + 1)), "no iteration is missing or twice")
    check(all(adds_up(ledger(record)) for record in records), "the ledger adds up in every iteration")
    check(trained == [EPISODES * n for n in numbers], f"each iteration trains {EPISODES} episodes, across the requeue")
    check(job.newest() == len(records), "scancel leaves a checkpoint of the last iteration")


def check_hosts(hosts: list[Host]) -> None:
    left = {host.name: [*host.processes(), *host.shared_memory()] for host in hosts}
    check(not any(left.values()), f"the job has left neither processes nor shared memory on its hosts: {left}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="limit,host", help="limit, host, or both (default)")
    parser.add_argument("--minutes", type=int, default=3, help="the job's time limit (default: 3)")
    parser.add_argument("--keep", type=Path, help="a folder for the logs of Slurm and the run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the run")
    options = parser.parse_args()
    if not options.inside:
        return run_inside(__file__, "--inside", *sys.argv[1:])
    keep = options.keep and options.keep.resolve()
    try:
        hosts = start_cluster()
        say(f"{command('slurmd', '-V').strip()}: {command('sinfo', '-h', '-o', '%N, %c cores each, %T').strip()}")
        os.chdir(WORK / "work")
        os.environ |= {"VLA_RL_VENV": sys.prefix, "PYTHONPATH": str(CODE)}
        if "limit" in options.what:
            try_limit(hosts, options.minutes, options.overrides)
        if "host" in options.what:
            try_lost_host(hosts, options.overrides)
    except (TimeoutError, subprocess.CalledProcessError) as error:
        check(False, str(error))
    finally:
        if keep:
            shutil.copytree(WORK, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("munge"))
    return 1 if _problems else 0


if __name__ == "__main__":
    sys.exit(main())
