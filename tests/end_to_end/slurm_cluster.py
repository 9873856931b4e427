"""A Slurm of its own on one machine: Debian's packages slurmctld, slurmd, slurm-client and munge; root.

Daemons and jobs live in fresh mount, network and process namespaces: fixed ports and node names collide with nobody, and all of
it is gone when the namespace's first process is killed, which the kernel does should this process end in any way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.end_to_end.program import ROOT, environment
from tests.spawn import HANGS_SECONDS

PROGRAMS = "slurmctld slurmd munged sbatch scontrol unshare nsenter setpriv ip".split()
NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")

CONTROLLER = """
ClusterName=bed
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
# cred_expire is also how long a requeued job waits before it starts again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=5
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 MaxTime=UNLIMITED
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=UNLIMITED
"""
NODE = "NodeName=n{index} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=96 RealMemory=1000000 Gres=gpu:8\n"
DAEMONS = """
set -e
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
# Names are looked up only where there is an address beside 127.0.0.1.
ip address add 10.0.0.1/32 dev lo
munged --foreground --force --socket={folder}/munge.socket --key-file={folder}/munge.key --seed-file={folder}/munge.seed \
  --pid-file={folder}/munge.pid --log-file={folder}/munge.log &
while [ ! -S {folder}/munge.socket ]; do sleep 0.05; done
slurmctld -D &
for index in {indices}; do slurmd -D -N n$index & done
wait -n
"""


def lacking() -> str | None:
    """The programs or rights that a cluster needs and this machine lacks; None where it lacks nothing."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}"
    allowed = subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0
    return None if allowed else "no namespaces: needs root"


class SlurmCluster:
    """Nodes n0, n1, ... of 96 cores and eight devices that pass for GPUs; partitions `normal` and, preempting it, `urgent`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._nodes = folder, nodes
        self._configure()
        self._environment = environment({"SLURM_CONF": str(folder / "slurm.conf")})
        script = DAEMONS.format(folder=folder, indices=" ".join(map(str, range(nodes))))
        with (folder / "daemons.log").open("w") as log:
            self._namespaces = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *NAMESPACES, "bash", "-c", script],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _configure(self) -> None:
        folder, host = self._folder, socket.gethostname()
        devices = folder / "dev"
        for path in (devices, folder / "state", *(folder / f"spool.n{index}" for index in range(self._nodes))):
            path.mkdir()
        for number in range(8):
            os.mknod(devices / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        names = [f"n{index}" for index in range(self._nodes)]
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(names)}\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        nodes = [NODE.format(index=index, host=host, port=16820 + index) for index in range(self._nodes)]
        (folder / "slurm.conf").write_text(CONTROLLER.format(folder=folder, host=host) + "".join(nodes))
        gpus = [f"NodeName={name} Name=gpu File={devices}/nvidia[0-7]\n" for name in names]
        (folder / "gres.conf").write_text("AutoDetect=off\n" + "".join(gpus))

    def run(self, *command: str) -> str:
        """The output of a command such as `squeue`, run inside the cluster from the repository's root."""
        place = f"/proc/{self._namespaces.pid}/ns"
        enter = ["nsenter", f"--mount={place}/mnt", f"--net={place}/net", f"--pid={place}/pid_for_children"]
        words = [*enter, "env", f"--chdir={ROOT}", *command]
        ended = subprocess.run(words, env=self._environment, capture_output=True, text=True, timeout=HANGS_SECONDS)
        if ended.returncode != 0:
            raise subprocess.SubprocessError(f"{' '.join(command)}: {ended.stderr.strip()}")
        return ended.stdout.strip()

    def submit(self, *words: str) -> str:
        """The id of a job, from sbatch's arguments."""
        return self.run("sbatch", "--parsable", *words)

    def state(self, job: str) -> str:
        """Such as RUNNING."""
        (word,) = [word for word in self.run("scontrol", "show", "job", job).split() if word.startswith("JobState=")]
        return word.removeprefix("JobState=")

    def wait_for(self, job: str, states: Sequence[str]) -> str:
        """The first of these states that a job reaches."""
        deadline = time.monotonic() + HANGS_SECONDS
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(states)}"
            time.sleep(0.2)
        return state

    def wait_until_up(self) -> None:
        """Until every node takes jobs."""
        deadline = time.monotonic() + HANGS_SECONDS
        states: list[str] = []
        while states != ["idle"] * self._nodes:
            assert time.monotonic() < deadline and self._namespaces.poll() is None, (
                self._folder / "daemons.log"
            ).read_text()
            time.sleep(0.2)
            with contextlib.suppress(subprocess.SubprocessError):
                states = self.run("sinfo", "--noheader", "--Node", "--partition=normal", "--format=%T").split()

    def close(self) -> None:
        """End everything that runs in the cluster."""
        self._namespaces.send_signal(signal.SIGKILL)
        self._namespaces.wait()


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int) -> Iterator[SlurmCluster]:
    """A cluster that takes jobs while the `with` block runs."""
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.wait_until_up()
        yield cluster
    finally:
        cluster.close()
