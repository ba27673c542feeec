"""Tries deploy/slurm.sbatch on a real Slurm: a run over two hosts is stopped at its time limit, requeued and continued.

    .venv/bin/python scripts/try_slurm.py [--minutes 3] [--keep FOLDER] [KEY=VALUE ...]

slurmctld and the two hosts are namespaces of this machine: each host has its own network, name, processes, /tmp and
/dev/shm. They share the disk, on which the runs are. When this program ends, however it does, the kernel ends all
processes in there and removes the rest. Needs Linux, root, and on Debian
``apt-get install --no-install-recommends slurm-wlm munge iproute2``. The environment and this checkout must not lie in
/tmp or /run, which the hosts have to themselves. Exit status 0: all that is checked holds; 1: something does not.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CODE = Path(__file__).resolve().parents[1]
WORK = Path("/run/vla_rl")  # on a file system in memory that only the namespaces see
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "setpriv")
NAMESPACES = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
HOSTS = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
CONTROL = "10.77.0.254"
MEMORY_MIB = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20 * 0.9)
CONFIG = f"""
ClusterName=try
SlurmctldHost=control({CONTROL})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={WORK}/munge/socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
StateSaveLocation={WORK}/state
SlurmctldPidFile={WORK}/slurmctld.pid
SlurmctldLogFile={WORK}/slurmctld.log
SlurmdSpoolDir={WORK}/spool-%n
SlurmdPidFile={WORK}/slurmd-%n.pid
SlurmdLogFile={WORK}/slurmd-%n.log
NodeName=n1 NodeAddr={HOSTS["n1"]} CPUs={os.cpu_count()} RealMemory={MEMORY_MIB}
NodeName=n2 NodeAddr={HOSTS["n2"]} CPUs={os.cpu_count()} RealMemory={MEMORY_MIB}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NETWORK = f"""
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p {WORK}/munge {WORK}/state {WORK}/spool-n1 {WORK}/spool-n2 {WORK}/work
(umask 077; head -c 128 /dev/urandom >{WORK}/munge/key)
hostname control
ip link set lo up
ip link add br0 type bridge
ip addr add {CONTROL}/24 dev br0
ip link set br0 up
"""
# the host's own name is an address of its loopback interface, as on Debian
HOST = """
ip netns add {name}
ip link add {name} type veth peer name eth0 netns {name}
ip link set {name} master br0 up
ip -n {name} link set lo up
ip -n {name} addr add {address}/24 dev eth0
ip -n {name} link set eth0 up
exec ip netns exec {name} {namespaces} sh -ec '
    hostname {name}
    printf "127.0.0.1 localhost\\n127.0.1.1 {name}\\n{others}\\n" >{work}/hosts-{name}
    mount --bind {work}/hosts-{name} /etc/hosts
    mount -t tmpfs tmpfs /tmp
    mount -t tmpfs tmpfs /dev/shm
    cd /
    exec slurmd -D'
"""
EPISODES = 16  # of an iteration
# a run that no time limit of minutes sees end, whose only checkpoint is the one that a signal asks for
RUN = ("train.iterations=5000", f"train.batch_episodes={EPISODES}", "train.eval_every=0", "train.eval_start=false")
RUN += ("train.checkpoint_every=100000", "placement.env_workers=2", "placement.envs_per_worker=8")


def command(*words: str) -> str:
    """What a program says. Raises CalledProcessError if it fails."""
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout


def daemon(*words: str) -> int:
    """The process id of a program that has a log file."""
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid


# --- the cluster ----------------------------------------------------------------------------------------------------


class Host:
    """A machine with slurmd: namespaces that end with its first process."""

    def __init__(self, name: str) -> None:
        self.name = name
        others = "\\n".join(f"{address} {other}" for other, address in HOSTS.items() if other != name)
        about = {"address": HOSTS[name], "others": others, "work": WORK, "namespaces": " ".join(NAMESPACES)}
        self._pid = daemon("sh", "-ec", HOST.format(name=name, **about))

    def processes(self) -> Counter[str]:
        """The run's processes there, by their names."""
        found: list[str] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if os.readlink(folder / "ns/net") != os.readlink(f"/proc/{self._pid}/ns/net"):
                    continue
                program, *arguments = (folder / "cmdline").read_text().split("\0")
                if program.startswith("ray::"):
                    found.append(program.removeprefix("ray::").partition(".")[0])
                elif program.endswith(("/raylet", "/gcs_server")):
                    found.append(Path(program).name)
                elif arguments[0].endswith("/vla-rl"):
                    found.append("driver")
        return Counter(found)

    def shared_memory(self) -> list[str]:
        """What lies in its /dev/shm."""
        (first,) = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        return os.listdir(f"/proc/{first}/root/dev/shm")


def start_cluster() -> list[Host]:
    """munged, slurmctld and the hosts, joined by a bridge; within namespaces of their own."""
    command("sh", "-ec", NETWORK)
    (WORK / "slurm.conf").write_text(CONFIG)
    (WORK / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is used; Slurm looks for them without
    os.environ["SLURM_CONF"] = str(WORK / "slurm.conf")
    files = [f"--{what}={WORK}/munge/{what}" for what in ("socket", "pid-file", "log-file", "seed-file")]
    daemon("munged", "--foreground", f"--key-file={WORK}/munge/key", *files)
    wait_for((WORK / "munge/socket").exists, "munged", 20)
    daemon("slurmctld", "-D")
    hosts = [Host(name) for name in HOSTS]
    wait_for(lambda: command("sinfo", "-h", "-o", "%T").split() == ["idle"], "slurmctld and both slurmd", 60)
    say(f"{command('slurmd', '-V').strip()}: {command('sinfo', '-h', '-o', '%N, %c cores each, %T').strip()}")
    return hosts


# --- what is seen ---------------------------------------------------------------------------------------------------

_began = time.monotonic()
_problems: list[str] = []


def say(text: str) -> None:
    print(f"{time.monotonic() - _began:4.0f} s  {text}", flush=True)


def check(holds: bool, what: str) -> None:
    say(f"{'holds' if holds else 'DOES NOT HOLD'}: {what}")
    if not holds:
        _problems.append(what)


def wait_for(holds: Callable[[], bool], what: str, seconds: float) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.5)


class Job:
    """A submitted job, whose changes are said as they are seen."""

    def __init__(self, *arguments: str) -> None:
        said = command("sbatch", "--parsable", *arguments)
        self.number = int(said)
        self.run = WORK / f"work/runs/slurm-{self.number}"
        self.log = WORK / f"work/vla_rl-{self.number}.log"
        self._seen = ""
        say(f"job {self.number}: sbatch {' '.join(arguments)}")

    def state(self) -> dict[str, str]:
        found = dict(re.findall(r"(\S+?)=(\S*)", command("scontrol", "show", "job", "-o", str(self.number))))
        now = f"{found['JobState']}, {found['NodeList'].strip('()') or 'no nodes'}, restarts {found['Restarts']}"
        now += f", reason {found['Reason']}" if found["Reason"] != "None" else ""
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

    def wait_for(self, holds: Callable[[dict[str, str]], bool], what: str, seconds: float) -> None:
        wait_for(lambda: holds(self.state()), what, seconds)


def try_limit(hosts: list[Host], minutes: int, overrides: list[str]) -> None:
    """Start, time limit, requeue, continuation, cancellation."""
    notice = 20  # Slurm looks at time limits every 30 s, and signals up to 60 s earlier than asked
    options = ["--nodes=2", "--gpus-per-node=0", f"--time={minutes}", f"--signal=B:USR1@{notice}"]
    job = Job(*options, str(CODE / "deploy/slurm.sbatch"), "tabletop", *RUN, *overrides)
    limit = 60.0 * minutes
    job.wait_for(lambda _: len(job.records()) >= 2, "two iterations", limit)
    for host in hosts:
        say(f"{host.name}: {', '.join(f'{n} x {what}' for what, n in sorted(host.processes().items()))}")
    check(all(host.processes()["raylet"] for host in hosts), "Ray runs on both hosts")
    job.wait_for(lambda now: now["Restarts"] == "1", "the requeue", limit + 60)
    before = job.records()
    saved = sorted(path.name for path in (job.run / "checkpoints").iterdir() if path.name.isdigit())
    say(f"{len(before)} iterations; checkpoints: {', '.join(saved) or 'none'}")
    check(saved == [f"{int(before[-1]['iteration']):06d}"], "the signal's checkpoint is that of the last iteration")
    job.wait_for(lambda now: now["JobState"] == "PENDING", "the end of the first part", 60)
    report_left(hosts)
    job.wait_for(lambda _: len(job.records()) >= len(before) + 2, "two more iterations", limit)
    check(all(host.processes()["raylet"] for host in hosts), "Ray runs on both hosts again")
    command("scancel", str(job.number))
    job.wait_for(lambda now: now["JobState"] == "CANCELLED", "the end", 90)
    wait_for(lambda: not command("squeue", "-h").strip(), "the end of all steps", 60)
    check_records(job, before)
    report_left(hosts)


def check_records(job: Job, before: list[dict[str, float]]) -> None:
    from vla_rl.commands.chaos.training_run import adds_up, ledger

    records = job.records()
    say(f"{len(records)} iterations; ledger: {', '.join(f'{k} {v}' for k, v in ledger(records[-1]).items())}")
    check(records[: len(before)] == before, "iterations of the first part are as they were")
    numbers = [int(record["iteration"]) for record in records]
    check(numbers == list(range(1, len(records) + 1)), "no iteration is missing or twice")
    check(all(adds_up(ledger(record)) for record in records), "the ledger adds up in every iteration")
    trained = [int(record["episodes/trained"]) for record in records]
    check(
        trained == [EPISODES * n for n in numbers],
        f"each iteration trains {EPISODES} episodes more, across the requeue",
    )
    newest = max((path.name for path in (job.run / "checkpoints").iterdir() if path.name.isdigit()), default="none")
    check(newest == f"{len(records):06d}", "scancel leaves a checkpoint of the last iteration")


def report_left(hosts: list[Host]) -> None:
    left = {host.name: [*host.processes(), *host.shared_memory()] for host in hosts}
    check(not any(left.values()), f"the job leaves neither processes nor shared memory on its hosts {left}")


# --- namespaces -----------------------------------------------------------------------------------------------------


def outside(arguments: list[str]) -> int:
    """Start this program again in namespaces that end with it, whatever ends it."""
    problem = ""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        problem = f"missing: {', '.join(missing)}; apt-get install --no-install-recommends slurm-wlm munge iproute2"
    elif os.geteuid() != 0:
        problem = "namespaces and their network need root"
    elif hidden := [p for p in (CODE, Path(sys.prefix)) if {Path("/tmp"), Path("/run")} & set(p.parents)]:
        problem = f"{hidden[0]}: the hosts have a /tmp and a /run of their own; move it to another folder"
    if problem:
        print(problem)
        return 1
    inside = [*NAMESPACES, "--net", sys.executable, __file__, "--inside", *arguments]
    return subprocess.run(["setpriv", "--pdeathsig", "KILL", *inside], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=3, help="the job's time limit (default: 3)")
    parser.add_argument("--keep", type=Path, help="a folder for the logs of Slurm and the run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the run")
    options = parser.parse_args()
    if not options.inside:
        return outside(sys.argv[1:])
    keep = options.keep and options.keep.resolve()
    try:
        hosts = start_cluster()
        os.chdir(WORK / "work")
        os.environ |= {"VLA_RL_VENV": sys.prefix, "PYTHONPATH": str(CODE)}
        try_limit(hosts, options.minutes, options.overrides)
    except (TimeoutError, subprocess.CalledProcessError) as error:
        check(False, str(error))
    finally:
        if keep:
            shutil.copytree(WORK, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("munge"))
    return 1 if _problems else 0


if __name__ == "__main__":
    sys.exit(main())
