"""A real SLURM of one node, in a folder of its own: munge, controller and node daemon."""

import os
import socket
import subprocess
import time
from pathlib import Path

from tests import needs

CONF = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmctldTimeout=30
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNode:
    """Started by `start`, ended by `stop`; `environment` leads SLURM's commands to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        needs.root("a SLURM of its own")
        for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun"):
            needs.program(name)
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        folder.chmod(0o755)
        host = socket.gethostname().partition(".")[0]
        text = CONF.format(
            host=host, folder=folder, ports=_free_ports(2), cpus=len(os.sched_getaffinity(0))
        )
        (folder / "slurm.conf").write_text(text)
        self._run(
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )
        _until(lambda: (folder / "munge.socket").exists(), "munge starts")
        self._run("slurmctld", "-D", "-c")
        _until(lambda: self._says("scontrol", "ping").find("UP") > 0, "slurmctld answers")
        self._run("slurmd", "-D", "-N", host)
        _until(lambda: "idle" in self._says("sinfo", "-h", "-o", "%T"), "the node is idle")

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _run(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [needs.program(name), *arguments],
                    stdout=out,
                    stderr=out,
                    env=os.environ | self.environment,
                )
            )

    def _says(self, *command: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | self.environment
        )
        return done.stdout


def _until(holds, what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"timed out before {what}"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
