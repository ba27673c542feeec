"""A Slurm cluster of two hosts, made on this machine out of namespaces: munged, slurmctld, and slurmd on each host.

Each host has its own network, name, processes, /tmp and /dev/shm. They share the disk, and ``WORK`` in memory. When the
program that has made the cluster ends, however it does, the kernel ends all processes in there and removes the rest.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
SlurmdTimeout=15
SchedulerParameters=sched_interval=5,bf_interval=5
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


def run_inside(program: str, *arguments: str) -> int:
    """Run a Python program in namespaces that end with this process, whatever ends it. Its exit status.

    Without what that needs, says so and returns 1.
    """
    problem = ""
    places = [place for place in (Path(__file__).resolve(), Path(sys.prefix)) if place.parts[1] in ("tmp", "run")]
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        problem = f"missing: {', '.join(missing)}; apt-get install --no-install-recommends slurm-wlm munge iproute2"
    elif os.geteuid() != 0:
        problem = "namespaces and their network need root"
    elif places:
        problem = f"{places[0]}: the hosts have a /tmp and a /run of their own; move it to another folder"
    if problem:
        print(problem)
        return 1
    inside = [*NAMESPACES, "--net", sys.executable, program, *arguments]
    return subprocess.run(["setpriv", "--pdeathsig", "KILL", *inside], check=False).returncode


def command(*words: str) -> str:
    """What a program says. Raises CalledProcessError if it fails."""
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout


def daemon(*words: str) -> int:
    """The process id of a program that has a log file."""
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid


def wait_for(holds: Callable[[], bool], what: str, seconds: float) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.5)


class Host:
    """A machine with slurmd: namespaces that end with its first process."""

    def __init__(self, name: str) -> None:
        self.name = name
        others = "\\n".join(f"{address} {other}" for other, address in HOSTS.items() if other != name)
        about = {"address": HOSTS[name], "others": others, "work": WORK, "namespaces": " ".join(NAMESPACES)}
        self._pid = daemon("sh", "-ec", HOST.format(name=name, **about))

    def switch_off(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        command("ip", "link", "del", self.name)
        command("ip", "netns", "del", self.name)

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
    """munged, slurmctld and the hosts, joined by a bridge. Only within ``run_inside``.

    Raises CalledProcessError or TimeoutError if one of them does not start.
    """
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
    return hosts
