"""Debian's Slurm on this machine, for as long as a test runs: slurmctld, and a slurmd for each node, on loopback."""

import os
import pathlib
import socket
import subprocess

from processes import Process


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Slurm:
    """Nodes n0, n1, ... with so many CPUs each. `settings` are lines of slurm.conf beside those that all need. Needs root."""

    def __init__(self, home, nodes, cpus, settings):
        self.home = pathlib.Path(home)
        control, *ports = free_ports(1 + nodes)
        names = [f"n{number}" for number in range(nodes)]
        for folder in ("state", *(f"spool-{name}" for name in names)):
            (self.home / folder).mkdir()
        host = socket.gethostname()
        lines = [f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=2000 State=UNKNOWN"
                 for name, port in zip(names, ports)]
        (self.home / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={self.home}/state
SlurmdSpoolDir={self.home}/spool-%n
SlurmctldPidFile={self.home}/slurmctld.pid
SlurmdPidFile={self.home}/slurmd-%n.pid
SlurmctldLogFile={self.home}/slurmctld.log
SlurmdLogFile={self.home}/slurmd-%n.log
""" + "\n".join([*settings, *lines, f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=60 State=UP"]) + "\n")
        self.environment = {**os.environ, "SLURM_CONF": str(self.home / "slurm.conf")}
        self.environment.pop("MUSTER_COORDINATOR", None)
        self.processes = [Process(command, self.home / "out", self.environment)
                          for command in (["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", name] for name in names))]
        self.names = names

    def idle(self):
        """Whether all nodes have joined and run nothing."""
        return self("sinfo", "-h", "-o", "%T %D", check=False).split() == ["idle", str(len(self.names))]

    def close(self):
        self("scancel", "--state=RUNNING", check=False)
        self("scancel", "--state=PENDING", check=False)
        for process in reversed(self.processes):
            process.stop(seconds=10)

    def __call__(self, *arguments, check=True, **more):
        result = subprocess.run([str(a) for a in arguments], env={**self.environment, **more}, capture_output=True,
                                text=True, cwd=self.home)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(map(str, arguments))}: {result.stdout}{result.stderr}")
        return result.stdout
