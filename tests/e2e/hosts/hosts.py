"""A Muster cluster over the hosts of network.py: a coordinator on one, a daemon on each of the
others, driven through the CLI alone."""

import json
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cluster import Cluster  # noqa: E402


class HostsCluster(Cluster):
    """Processes on hosts. `workers`: {host: {"slots": N, "flags": [...]}}; named worker-HOST."""

    def __init__(self, binaries, network, directory, coordinator, workers, flags=()):
        super().__init__(binaries, directory / "home", cwd=directory)
        self.binaries = pathlib.Path(binaries).resolve()
        self.network = network
        self.directory = directory
        self.head = coordinator
        self.worker_options = workers
        self.coordinator_flags = list(flags)
        self.processes = {}
        self.ready = {}
        self.address = None

    def up(self):
        self.start_coordinator()
        for host in self.worker_options:
            self.start_worker(host)
        self.poll("every worker has joined", lambda: self.json("get", "workers"),
                  lambda workers: sum(w["state"] == "ready" for w in workers) ==
                  len(self.worker_options), 30)

    def _start(self, name, host, *arguments):
        self._forget(name)
        log = open(self.directory / f"{name}.log", "a")
        process = self.network[host].start(*arguments, stdout=subprocess.PIPE, stderr=log,
                                           text=True, cwd=self.directory)
        log.close()
        self.processes[name] = process
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} did not start: "
                               + (self.directory / f"{name}.log").read_text()[-2000:])
        self.ready[name] = json.loads(line)
        return self.ready[name]

    def start_coordinator(self):
        host = self.network[self.head]
        bracketed = f"[{host.address}]" if ":" in host.address else host.address
        port = self.address.rsplit(":", 1)[1] if self.address else 0
        line = self._start("coordinator", self.head, self.binaries / "muster-coordinator",
                           "--listen", f"{bracketed}:{port}", "--metrics", f"{bracketed}:0",
                           "--data-dir", self.directory / "coordinator", "--insecure", *self.coordinator_flags)
        self.address = line["address"]
        self.environment["MUSTER_COORDINATOR"] = self.address

    def start_worker(self, host, flags=None):
        options = self.worker_options[host]
        return self._start(f"worker-{host}", host, self.binaries / "muster-worker",
                           "--coordinator", options.get("coordinator", self.address),
                           "--name", f"worker-{host}", "--insecure",
                           "--state-dir", self.directory / f"state-{host}",
                           "--slots", options.get("slots", 1),
                           # The hosts of a test share the kernel and its boot id.
                           "--host-id", host,
                           *(options.get("flags", ()) if flags is None else flags))

    def kill(self, name):
        """Sends SIGKILL to one service ("coordinator", "worker-b"), but not to its ranks."""
        self._forget(name)

    def run(self, *arguments, check=True, **options):
        options.setdefault("capture_output", True)
        host = options.pop("host", self.head)
        result = subprocess.run(self.network[host].command(self.muster_binary, *arguments),
                                text=True, cwd=self.cwd, env=self.environment, **options)
        if check and result.returncode != 0:
            raise RuntimeError(f"muster {' '.join(map(str, arguments))} exited "
                               f"{result.returncode}\n{result.stdout or ''}{result.stderr or ''}")
        return result

    def _forget(self, name):
        """Ends the service by SIGKILL if it still runs."""
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()

    def down(self):
        """Ends the services; ranks end with the namespaces of their hosts."""
        for name in list(self.processes):
            self._forget(name)

    def logs(self):
        """The end of every service's log, for a failure."""
        text = ""
        for path in sorted(self.directory.glob("*.log")):
            text += f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) + "\n"
        return text

    def step_after(self, name, step, seconds):
        """Waits until the job has finished a step beyond `step`; returns the seconds that took."""
        begin = time.monotonic()
        self.poll(f"{name} goes on beyond step {step}", lambda: self.job(name),
                  lambda job: job["step"] > step, seconds)
        return time.monotonic() - begin
