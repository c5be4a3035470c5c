"""A real syslog-ng ships the logs of a real cluster, with the configurations as they are in deploy/logs, to receivers
that take what Loki and Elasticsearch take and check its form. No line is lost or comes in another form, over
a receiver that refuses for a while, a shipper that is killed, and attempts that begin meanwhile. Skipped (77)
without syslog-ng and its modules json-plugin and http."""

import argparse
import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/deploy"))
from processes import Cluster, Process, poll  # noqa: E402

BIN = None
LEVELS = {"debug", "info", "warning", "error"}
TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|\+00:00)$")


def of_loki(path, body):
    """The lines of a push; an AssertionError where Loki would refuse it, or would make too many streams."""
    assert path == "/loki/api/v1/push", path
    lines = []
    for stream in json.loads(body)["streams"]:
        assert set(stream["stream"]) == {"cluster", "component", "level"}, stream["stream"]
        assert all(value and isinstance(value, str) for value in stream["stream"].values()), stream["stream"]
        for time, line in stream["values"]:
            assert re.fullmatch(r"1\d{18}", time), time  # nanoseconds, as text
            lines.append(line)
    return lines


def of_elasticsearch(path, body):
    assert path == "/_bulk", path
    assert body.endswith("\n")
    rows = body.splitlines()
    assert len(rows) % 2 == 0, rows
    for action in rows[::2]:
        assert json.loads(action) == {"index": {"_index": "muster-test"}}, action
    return rows[1::2]


class Receiver:
    """Takes batches of lines, refuses while `refuse` is set, and keeps what was wrong with a batch."""

    def __init__(self, lines_of):
        self.lines, self.wrong, self.refused, self.refuse = [], [], 0, False
        self.lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                with outer.lock:
                    status = 503 if outer.refuse else 200
                    outer.refused += outer.refuse
                    if not outer.refuse:
                        try:
                            outer.lines += lines_of(self.path, body)
                        except (AssertionError, ValueError, KeyError) as error:
                            outer.wrong.append(f"{error!r}: {body[:300]}")
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def messages(self):
        """(component, job, epoch, rank, message) of every line."""
        with self.lock:
            rows = [json.loads(line) for line in self.lines]
        return [tuple(row.get(key) for key in ("component", "job", "epoch", "rank", "message")) for row in rows]


def on_disk(cluster):
    """The same of every line that the cluster has written."""
    def of(line, **known):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "time" in row:
                return tuple(row.get(key) for key in ("component", "job", "epoch", "rank", "message"))
        return tuple(known.get(key) for key in ("component", "job", "epoch", "rank")) + (line,)
    lines = []
    for path in (cluster.directory / "logs").glob("*.log"):
        lines += [of(line, component="unknown") for line in path.read_text().splitlines()]
    for path in (cluster.directory / "w1/attempts").glob("*/rank-*/log/*"):
        job, epoch = path.parts[-4].rsplit(".e", 1)
        rank = int(path.parts[-3].removeprefix("rank-"))
        for line in path.read_text().splitlines():
            if line:
                lines.append(of(line, component="rank", job=job, epoch=int(epoch), rank=rank))
    return lines


class Shipping(unittest.TestCase):
    def ship(self, cluster, home, name, receiver):
        directory = home / name
        directory.mkdir(exist_ok=True)
        environment = {**os.environ, "MUSTER_CONF": str(ROOT / "deploy/logs"), "MUSTER_CLUSTER": "test",
                       "MUSTER_LOGS": str(cluster.directory / "logs"), "MUSTER_STATE": str(cluster.directory / "w1"),
                       "LOKI_URL": receiver.url, "ELASTIC_URL": receiver.url}
        # Its own directory holds what it has not sent and where it stands.
        return Process(["syslog-ng", "-F", "--no-caps", "-f", ROOT / f"deploy/logs/{name}.conf",
                        "-R", directory / "persist", "-p", directory / "pid", "-c", directory / "ctl",
                        "--worker-threads", "2"], directory / "shipper.err", environment=environment)

    def test_no_line_is_lost(self):
        with tempfile.TemporaryDirectory(prefix="muster-logs-") as home, contextlib.ExitStack() as ends:
            home = pathlib.Path(home)
            cluster = ends.enter_context(Cluster(BIN, home / "cluster"))
            cluster.start_worker("w1")
            cluster.make_data()
            receivers = {"loki": Receiver(of_loki), "elasticsearch": Receiver(of_elasticsearch)}
            shippers = {name: self.ship(cluster, home, name, receiver) for name, receiver in receivers.items()}
            ends.callback(lambda: [shipper.stop() for shipper in shippers.values()])

            cluster.run("submit", cluster.spec("gpt", steps=100000))
            cluster.wait_for("gpt", "trains", lambda job: job["step"] > 50)
            for name, receiver in receivers.items():
                poll(f"{name} has lines of ranks", lambda: [m for m in receiver.messages() if m[0] == "rank"])
                receiver.refuse = True
            # Another attempt begins while nothing is taken, and one shipper is killed.
            os.kill(cluster.job("gpt")["ranks"][0]["pid"], signal.SIGKILL)
            cluster.wait_for("gpt", "trains again", lambda job: job["attempts"] == 2 and
                             job["state"] == "JOB_STATE_RUNNING")
            for name, receiver in receivers.items():
                poll(f"{name} was refused", lambda: receiver.refused)
            shippers["loki"].stop(signal.SIGKILL)
            cluster.run("cancel", "gpt")
            cluster.wait_for("gpt", "is cancelled", lambda job: job["state"] == "JOB_STATE_CANCELLED")
            for receiver in receivers.values():
                receiver.refuse = False
            shippers["loki"] = self.ship(cluster, home, "loki", receivers["loki"])

            for name, receiver in receivers.items():
                try:
                    poll(f"{name} has every line", lambda: set(on_disk(cluster)) - set(receiver.messages()),
                         lambda missing: not missing, 90)
                except AssertionError as late:
                    told = (home / f"{name}/shipper.err").read_text()[-3000:]
                    raise AssertionError(f"{late}\nthe shipper said: {told}") from late
                self.assertEqual(receiver.wrong, [], name)
                got = receiver.messages()
                self.assertEqual({m[0] for m in got} - {"unknown"}, {"coordinator", "worker", "rank"}, name)
                self.assertEqual({m[2] for m in got if m[0] == "rank"}, {1, 2}, name)
                # What ranks print is theirs by the path; no line is of anything else.
                self.assertEqual({m[1] for m in got if m[0] == "rank"}, {cluster.job("gpt")["id"]}, name)
                self.assertEqual(set(got) - set(on_disk(cluster)), set(), name)
                for line in receiver.lines:
                    row = json.loads(line)
                    self.assertLessEqual(set(row), {"time", "level", "component", "job", "epoch", "rank", "worker",
                                                    "message", "fields"}, line)
                    self.assertRegex(row["time"], TIME)
                    self.assertIn(row["level"], LEVELS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    arguments, rest = parser.parse_known_args()
    BIN = arguments.bin
    modules = subprocess.run(["syslog-ng", "--version"], capture_output=True,
                             text=True).stdout if shutil.which("syslog-ng") else ""
    if "json-plugin" not in modules or "http" not in modules:
        print("skipped: no syslog-ng with json-plugin and http")
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest])
