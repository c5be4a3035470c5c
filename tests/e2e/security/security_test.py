"""The set-ups of docs/security.md as they are written there, with real processes: each of its commands is run with other
names, ports and folders. And bad callers of the programs themselves. Waiting is polling with a deadline."""

import http.client
import http.server
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from waiting import poll  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
BIN = None
SPEC = """\
name: {name}
engine:
  model: {{family: gpt2, layers: 1, hidden: 32, heads: 2, vocab: 256, sequence_length: 32}}
  data: {{train: [{{path: {data}}}]}}
  training: {{steps: {steps}, global_batch: 4, micro_batch: 4, precision: fp32, optimizer: {{adamw: {{lr: 1.0e-3}}}}}}
resources: {{device: cpu, ranks: {ranks}}}
checkpoint: {{path: {directory}/checkpoints/{name}, every_steps: {every}}}
"""


def blocks():
    """{tag: commands} of the page: "<!-- own: issue -->" stands above a block."""
    text = (ROOT / "docs/security.md").read_text()
    found = re.findall(r"^<!-- (\w+: \w+) -->\n```(?:sh|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(found)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class SetUp(unittest.TestCase):
    """One coordinator in a directory of its own, for which the page's names stand."""

    used = set()

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-security-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.port = free_port()
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        self.environment["PATH"] = f"{BIN}:{self.environment['PATH']}"
        self.environment["HOME"] = str(self.directory)
        self.running = []
        self.metrics = {}  # addresses, by tag
        self.addCleanup(self.stop)

    def stop(self):
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running:
            process.wait(60)
            process.stdout.close()

    def words(self, tag):
        """The block with this test's names for those of the page."""
        self.used.add(tag)
        text = blocks()[tag]
        for page, own in (("head.example.org", "localhost"), ("gpu-1.example.org", "localhost"),
                          (":9070", ":0"), (":9071", ":0"), ("0.0.0.0", "127.0.0.1"), ("7600", str(self.port)),
                          ("/var/lib/", f"{self.directory}/var-"), ("/etc/muster", f"{self.directory}/etc"),
                          ("muster-worker --", "muster-worker --slots 2 --gpus none --stop-ranks-on-exit --")):
            text = text.replace(page, own)
        return text

    def sh(self, tag, check=True, **variables):
        ran = subprocess.run(["bash", "-euc", self.words(tag)], cwd=self.directory, text=True, capture_output=True,
                             env={**self.environment, **variables})
        if check:
            self.assertEqual(ran.returncode, 0, f"{tag}\n{ran.stdout}\n{ran.stderr}")
        return ran

    def start(self, tag, name="gpu-1"):
        """Starts the block's program, and waits for the line that says it is ready."""
        log = open(self.directory / f"{tag.replace(': ', '-')}.log", "a", encoding="utf-8")
        process = subprocess.Popen(["bash", "-euc", "exec " + self.words(tag).replace("--name gpu-1", f"--name {name}")],
                                   cwd=self.directory, env=self.environment, text=True, stdout=subprocess.PIPE,
                                   stderr=log)
        self.running.append(process)
        log.close()
        line = process.stdout.readline()
        self.assertTrue(line, (self.directory / f"{tag.replace(': ', '-')}.log").read_text())
        self.metrics[tag] = json.loads(line)["metrics"]
        return process

    def certificate_days(self, tag, file):
        """How many days what the flag of a started program names is still good, by its metric."""
        with urllib.request.urlopen(f"http://{self.metrics[tag]}/metrics", timeout=60) as reply:
            found = re.search(rf'_certificate_not_after_timestamp_seconds{{file="{file}"}} (\S+)', reply.read().decode())
        return (float(found.group(1)) - time.time()) / 86400 if found else None

    def muster(self, *arguments, user=None, token=None, ca="pki/ca.crt", check=True, pki="pki"):
        command = ["muster", "--coordinator", f"localhost:{self.port}", *map(str, arguments)]
        if ca:
            command += ["--tls-ca", ca]
        if user:
            command += ["--tls-cert", f"{pki}/{user}.crt", "--tls-key", f"{pki}/{user}.key"]
        environment = {**self.environment, **({"MUSTER_TOKEN": token} if token else {})}
        ran = subprocess.run(command, cwd=self.directory, text=True, capture_output=True, env=environment)
        if check:
            self.assertEqual(ran.returncode, 0, f"{arguments}: {ran.stdout}{ran.stderr}")
        return ran

    def wait_for_worker(self, name="gpu-1", user="user-alice"):
        poll(f"{name} is ready", lambda: self.muster("get", "workers", user=user, check=False).stdout,
                  lambda out: re.search(rf"^{name} +ready", out, re.MULTILINE))

    def make_job(self, name, steps, ranks=1, every=1000):
        if not (self.directory / "tokens.idx").exists():
            (self.directory / "text.txt").write_text("the dog ran over the green hill.\n" * 2000)
            self.muster("data", "tokenize", "--input", "text.txt", "--output", "tokens", "--tokenizer", "bytes")
        path = self.directory / f"{name}.yaml"
        path.write_text(SPEC.format(name=name, data=self.directory / "tokens", directory=self.directory, steps=steps,
                                    ranks=ranks, every=every))
        return path

    def audit(self, user="user-alice"):
        return json.loads(self.muster("audit", "-o", "json", user=user).stdout)

    def refused(self, ran, says, code=None, method=None):
        """The command failed for this reason; where a code is given, the audit log has it."""
        self.assertEqual(ran.returncode, 1, ran.stdout)
        self.assertIn(says, ran.stderr)
        if code is not None:
            poll(f"an entry of {method} with code {code}", self.audit,
                      lambda entries: any(e["statusCode"] == code and e["method"] == method and
                                          "127.0.0.1" in e["address"] for e in entries))


class OwnAuthority(SetUp):
    def setUp(self):
        super().setUp()
        self.sh("own: issue")
        for name in ("coordinator", "worker-gpu-1", "user-alice", "ca"):
            self.assertEqual((self.directory / f"pki/{name}.key").stat().st_mode & 0o777, 0o600)
        self.start("own: coordinator")

    def test_from_nothing_to_a_job_of_a_user_with_a_token(self):
        self.start("own: worker")
        self.wait_for_worker()
        said = self.sh("own: user").stdout
        self.assertIn("you are user bob, with submitter", said)
        self.assertRegex(said, r"gpu-1 +ready")
        listed = self.sh("own: token").stdout
        self.assertRegex(listed, r"carol +submitter@default +valid")
        self.assertIn("you are user carol, with submitter@default", self.sh("own: carol").stdout)
        token = (self.directory / "carol.token").read_text().strip()
        out = self.muster("submit", self.make_job("job", 20), "--watch", token=token).stdout
        self.assertIn("succeeded", out)
        self.assertEqual(json.loads(self.muster("get", "job", "job", "-o", "json", token=token).stdout)["owner"], "carol")
        # What it left in the audit log; the token in none of it.
        text = self.muster("audit", "-o", "json", user="user-alice").stdout
        self.assertNotIn(token.rsplit("_", 1)[1], text)
        submitted = [e for e in json.loads(text) if e["method"] == "JobService.Submit"]
        self.assertEqual([(e["who"], e["statusCode"]) for e in submitted], [("user carol", 0)])
        self.assertTrue(submitted[0]["proof"].startswith("token "))
        self.assertIn("user carol", self.muster("audit", "--since", "1h", user="user-alice").stdout)
        # And revoked.
        self.muster("admin", "token", "revoke", token.split("_")[1], user="user-alice")
        self.refused(self.muster("get", "jobs", token=token, check=False), "was revoked", 16, "JobService.ListJobs")

    def test_bad_callers_are_refused_with_the_reason_and_audited(self):
        self.muster("admin", "pki", "issue-user", "early", "--lifetime", "60s")
        self.muster("admin", "pki", "init", "--pki-dir", "other", "--host", "localhost")
        self.muster("admin", "pki", "issue-user", "alice", "--role", "admin", "--pki-dir", "other")
        listing = "JobService.ListJobs"
        self.refused(self.muster("get", "jobs", check=False), "--tls-cert", 16, listing)
        self.refused(self.muster("get", "jobs", user="user-alice", pki="other", check=False), "certificate of", 16,
                     listing)
        self.refused(self.muster("get", "jobs", token="muster_x", check=False), "malformed", 16, listing)
        self.refused(self.muster("get", "jobs", user="user-early", check=False), "has no role", 7, listing)
        self.refused(self.muster("admin", "backup", user="user-bob", check=False), "needs the role admin", 7,
                     "AdminService.Backup")
        self.refused(self.muster("audit", user="user-bob", check=False), "needs the role admin", 7,
                     "AdminService.ListAudit")
        # Who cannot prove the coordinator is the coordinator does not talk to it.
        self.refused(self.muster("get", "jobs", ca="other/ca.crt", user="user-alice", check=False), "must speak TLS")
        self.refused(self.muster("get", "jobs", ca=None, check=False), "give --tls-ca")
        self.refused(self.muster("get", "jobs", ca="pki/none.crt", check=False), "--tls-ca: cannot read")
        # Another worker's name.
        worker = self.start("own: worker", name="gpu-2")
        poll("the refusal of gpu-2", self.audit, lambda entries: any(
            e["method"] == "WorkerService.Session" and e["who"] == "worker gpu-1" and e["target"] == "gpu-2" and
            e["statusCode"] == 7 for e in entries))
        self.assertIn("--name gpu-1", (self.directory / "own-worker.log").read_text())
        self.assertIsNone(worker.poll())

    def test_certificates_and_authority_are_replaced_under_a_running_job(self):
        self.start("own: worker")
        self.wait_for_worker()
        self.muster("submit", self.make_job("long", 1_000_000, every=100_000), user="user-bob")

        def job():
            return json.loads(self.muster("get", "job", "long", "-o", "json", user="user-alice").stdout)
        before = poll("it trains", job, lambda now: now["step"] > 0)
        self.sh("own: rotate")
        text = self.words("own: authority").splitlines()
        for command in text:
            subprocess.run(["bash", "-euc", command], cwd=self.directory, env=self.environment, check=True,
                           capture_output=True)
            # The programs look again within seconds; meanwhile a caller may have to call again.
            poll("the coordinator answers", lambda: self.muster("get", "workers", user="user-alice", check=False),
                      lambda ran: ran.returncode == 0 and " ready " in ran.stdout)
        poll("it trains on", job, lambda now: now["step"] > before["step"] + 10)
        after = job()
        self.assertEqual((after["epoch"], after["attempts"], after["causes"]), (before["epoch"], 1, []))
        # The end of a certificate: bob's is revoked while alice's job list stays open.
        self.sh("own: revoke")
        start = time.monotonic()
        poll("bob is refused", lambda: self.muster("get", "jobs", user="user-bob", check=False),
                  lambda ran: ran.returncode == 1 and "revoked" in ran.stderr, seconds=10)
        print(f"\na revoked certificate was refused after {time.monotonic() - start:.1f} s", file=sys.stderr)
        self.muster("cancel", "long", user="user-alice")

    def test_a_revoked_worker_is_let_go_while_its_ranks_train_on(self):
        self.start("own: worker")
        self.wait_for_worker()
        self.muster("submit", self.make_job("long", 1_000_000, every=100_000), user="user-alice")

        def job():
            return json.loads(self.muster("get", "job", "long", "-o", "json", user="user-alice").stdout)
        before = poll("it trains", job, lambda now: now["step"] > 0)
        self.muster("admin", "pki", "revoke", "pki/worker-gpu-1.crt")
        start = time.monotonic()
        poll("the worker is refused", self.audit, lambda entries: any(
            e["method"] == "WorkerService.Session" and e["statusCode"] == 16 and "revoked" in e["message"]
            for e in entries), seconds=10)
        print(f"\na revoked worker was refused after {time.monotonic() - start:.1f} s", file=sys.stderr)
        # A new certificate under the same name, put where the old one was, brings it back by itself.
        for suffix in ("crt", "key"):
            (self.directory / f"pki/worker-gpu-1.{suffix}").rename(self.directory / f"old.{suffix}")
        self.muster("admin", "pki", "issue-worker", "gpu-1")
        self.wait_for_worker()
        after = poll("it trains on", job, lambda now: now["step"] > before["step"])
        self.assertEqual((after["epoch"], after["attempts"], after["causes"]), (before["epoch"], 1, []))


    def test_ten_thousand_connections_of_one_client_are_in_nobodys_way(self):
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        wanted = 10_000
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted + 1000:
            self.skipTest("fewer files may be open here than the connections of this test")
        self.start("own: worker")
        self.wait_for_worker()
        before = self.muster("get", "job", "none", user="user-alice", check=False)
        self.assertIn("none", before.stderr)
        start, connections, slowest = time.monotonic(), [], 0.0
        self.addCleanup(lambda: [one.close() for one in connections])
        for i in range(wanted):
            one = socket.create_connection(("127.0.0.1", self.port), timeout=60)
            connections.append(one)
            if i % 3 == 1:
                one.sendall(b"GET / HTTP/1.1\r\n\r\n" if i % 2 else os.urandom(64))
            if i % 2500 == 2499:
                called = time.monotonic()
                self.assertRegex(self.muster("get", "workers", user="user-alice").stdout, r"gpu-1 +ready")
                slowest = max(slowest, time.monotonic() - called)
        opened = time.monotonic() - start
        self.assertLess(slowest, 10)
        out = self.muster("submit", self.make_job("job", 10), "--watch", user="user-bob").stdout
        self.assertIn("succeeded", out)

        # Those that do not shake hands are closed by the coordinator, all of them.
        def closed(one):
            one.settimeout(0)
            try:
                while one.recv(4096):
                    pass
                return True
            except BlockingIOError:
                return False
            except OSError:
                return True
        left = list(connections)

        def look():
            left[:] = [one for one in left if not closed(one)]
            return len(left)
        poll("all are closed", look, lambda count: count == 0, seconds=90)
        print(f"\n{wanted} connections in {opened:.1f} s; the slowest `muster get workers` beside them took {slowest:.2f} s; "
              f"all were closed after {time.monotonic() - start:.1f} s", file=sys.stderr)
        self.assertRegex(self.muster("get", "workers", user="user-alice").stdout, r"gpu-1 +ready")

    def test_secrets_of_jobs_are_references_everywhere_but_in_the_job(self):
        secret = "v4lu3-0f-a-s3cr3t"
        secrets = self.directory / "etc/secrets"
        (secrets / "research").mkdir(parents=True)
        for name, text in (("hf-token", secret), ("research/key", "of-research-" + secret)):
            (secrets / name).write_text(text + "\n")
            (secrets / name).chmod(0o400)
        self.start("own: worker_secrets")
        self.wait_for_worker()
        job = self.directory / "job.yaml"
        job.write_text(blocks()["own: secret_spec"])
        self.used.add("own: secret_spec")
        out = self.muster("submit", job, "--watch", user="user-bob").stdout
        self.assertIn("succeeded", out)
        log = self.muster("logs", "with-secret", user="user-bob").stdout
        self.assertIn(f"{len(secret)} bytes", log)
        # Other queues' secrets, and those that there are not, are not found, and no value is told.
        job.write_text("name: not-mine\ncommand: [sh, -c, 'exit 0']\nenv: {KEY: '${secret:key}'}\n"
                       "resources: {device: cpu, ranks: 1}\n")
        self.muster("submit", job, "--watch", user="user-bob", check=False)
        told = self.muster("describe", "job", "not-mine", user="user-bob").stdout
        self.assertIn("secret key", told)
        told += out + log
        for command in (("get", "job", "with-secret", "-o", "json"), ("describe", "job", "with-secret"),
                        ("events",), ("get", "jobs", "-o", "json"), ("audit", "-o", "json")):
            told += self.muster(*command, user="user-alice").stdout
        self.assertIn("${secret:hf-token}", told)
        self.assertNotIn(secret, told)
        self.muster("admin", "backup", user="user-alice")
        self.stop()
        read = 0
        for path in self.directory.rglob("*"):
            if path.is_file() and secrets not in path.parents:
                self.assertNotIn(secret.encode(), path.read_bytes(), path)
                read += 1
        self.assertGreater(read, 20)

    def test_metrics_need_a_certificate_where_the_daemon_says_so(self):
        self.running[0].send_signal(signal.SIGTERM)
        self.running[0].wait(60)
        self.sh("own: metrics_files")
        self.start("own: metrics_coordinator")
        self.start("own: metrics_worker")
        self.wait_for_worker()
        self.muster("submit", self.make_job("watched", steps=1_000_000), user="user-bob")

        def get(address, page, user="user-prometheus"):
            context = ssl.create_default_context(cafile=self.directory / "pki/ca.crt")
            if user:
                context.load_cert_chain(self.directory / f"pki/{user}.crt", self.directory / f"pki/{user}.key")
            connection = http.client.HTTPSConnection("localhost", int(address.rsplit(":", 1)[1]), context=context, timeout=60)
            try:
                connection.request("GET", page)
                reply = connection.getresponse()
                return reply.status, reply.read().decode()
            finally:
                connection.close()

        def targets():
            status, text = get(self.metrics["own: metrics_coordinator"], "/targets")
            self.assertEqual(status, 200, text)
            return {entry["labels"]["component"]: entry for entry in json.loads(text)}

        found = poll("all are listed", targets, lambda listed: {"worker", "rank"} <= set(listed))
        for component, series in (("coordinator", "muster_coordinator_build_info"), ("worker", "muster_worker_build_info"),
                                  ("rank", "muster_rank_")):
            self.assertEqual(found[component]["labels"]["__scheme__"], "https")
            address = found[component]["targets"][0]
            status, text = get(address, "/metrics")
            self.assertEqual(status, 200, text)
            self.assertIn(series, text)
            self.assertEqual(get(address, "/metrics", user=None)[0], 403)
            with self.assertRaises((OSError, http.client.HTTPException)):
                urllib.request.urlopen(f"http://{address}/metrics", timeout=60)
        for tag in ("own: metrics_coordinator", "own: metrics_worker"):
            self.assertTrue(self.metrics[tag].startswith("https://"))
            self.assertEqual(get(self.metrics[tag], "/readyz", user=None)[0], 200)
        self.assertEqual(get(self.metrics["own: metrics_coordinator"], "/targets", user=None)[0], 403)
        status, text = get(found["worker"]["targets"][0], "/metrics")
        self.assertIn('certificate_not_after_timestamp_seconds{file="metrics-tls-cert"}', text)
        self.muster("cancel", "watched", user="user-bob")


class RotatedFiles(SetUp):
    """Certificates of another tool (openssl), in a folder that is a link to the newest version."""

    def issue(self, name, subject, extension, folder, serial):
        key, request = self.directory / f"{name}.key", self.directory / f"{name}.csr"
        version = folder.parent / f"..{folder.name}-{serial}"
        version.mkdir(parents=True)
        (self.directory / "extensions").write_text(extension)

        def openssl(*arguments):
            subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
        openssl("req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", subject)
        openssl("x509", "-req", "-in", request, "-CA", self.directory / "ca.crt", "-CAkey", self.directory / "ca.key",
                "-set_serial", serial, "-days", "1", "-extfile", self.directory / "extensions", "-out",
                version / "tls.crt")
        shutil.move(key, version / "tls.key")
        shutil.copy(self.directory / "ca.crt", version / "ca.crt")
        fresh = folder.parent / f".{folder.name}.new"
        fresh.symlink_to(version.name)
        fresh.rename(folder)

    def test_files_of_another_tool_are_read_again(self):
        if not shutil.which("openssl"):
            self.skipTest("openssl makes the certificates of this test")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", self.directory / "ca.key",
                        "-out", self.directory / "ca.crt", "-subj", "/CN=Site CA", "-days", "2"], check=True,
                       capture_output=True)
        etc = self.directory / "etc"
        server = "subjectAltName=DNS:localhost\nextendedKeyUsage=serverAuth\n"
        client = "subjectAltName=URI:spiffe://example.org/worker/gpu-1\nextendedKeyUsage=clientAuth\n"
        self.issue("head", "/CN=head", server, etc / "tls", 1)
        self.issue("worker", "/CN=node", client, etc / "worker", 2)
        self.issue("ada", "/O=ml-platform/CN=ada", "extendedKeyUsage=clientAuth\n", etc / "ada", 3)
        (etc / "access.yaml").write_text("groups:\n  ml-platform: [submitter]\n")
        self.start("files: coordinator")
        self.start("files: worker")

        def muster(*arguments, check=True):
            return self.muster(*arguments, "--tls-cert", etc / "ada/tls.crt", "--tls-key", etc / "ada/tls.key",
                               ca=etc / "ada/ca.crt", check=check)
        poll("gpu-1 is ready", lambda: muster("get", "workers", check=False).stdout, lambda out: " ready " in out)
        self.assertIn("you are user ada, with submitter", muster("version").stdout)

        def served():
            said = subprocess.run(["openssl", "s_client", "-connect", f"localhost:{self.port}", "-alpn", "h2"],
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
            shown = subprocess.run(["openssl", "x509", "-noout", "-serial"], input=said.stdout, capture_output=True,
                                   text=True)
            return shown.stdout.strip()
        self.assertEqual(served(), "serial=01")
        for tag, file, days in (("files: coordinator", "tls-cert", 1), ("files: coordinator", "tls-ca", 2),
                                ("files: worker", "tls-cert", 1), ("files: worker", "tls-ca", 2)):
            left = poll("the metric of its end", lambda: self.certificate_days(tag, file), lambda left: left)
            self.assertTrue(days - 0.1 < left <= days, f"{tag} {file}: {left} days")
        self.issue("head", "/CN=head", server, etc / "tls", 17)
        poll("the new certificate is served", served, lambda serial: serial == "serial=11")
        self.assertIn(" ready ", muster("get", "workers").stdout)
        # A role is taken away.
        (etc / "access.new").write_text("groups: {}\n")
        (etc / "access.new").rename(etc / "access.yaml")
        poll("ada has no role any more", lambda: muster("get", "jobs", check=False),
                  lambda ran: ran.returncode == 1 and "has no role" in ran.stderr, seconds=10)


class IdentityTokens(SetUp):
    skipped_blocks = ()  # beginnings of their tags

    def skip(self, why):
        IdentityTokens.skipped_blocks = ("oidc",)
        self.skipTest(why)

    def test_tokens_of_an_issuer_for_users_beside_certificates_for_workers(self):
        try:
            import jwt
            from cryptography.hazmat.primitives.asymmetric import ec, rsa
        except ImportError:
            self.skip("python3-jwt and python3-cryptography make the tokens of this test")
        rsa_key, ec_key, foreign = (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1()),
                                    rsa.generate_private_key(65537, 2048))

        def public(key, kid):
            algorithm = jwt.algorithms.RSAAlgorithm if hasattr(key, "private_numbers") and isinstance(
                key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
            if algorithm is jwt.algorithms.RSAAlgorithm:
                one = json.loads(algorithm.to_jwk(key.public_key()))
            else:
                numbers = key.public_key().public_numbers()
                text = [jwt.utils.base64url_encode(n.to_bytes(32, "big")).decode() for n in (numbers.x, numbers.y)]
                one = {"kty": "EC", "crv": "P-256", "x": text[0], "y": text[1]}
            return {**one, "kid": kid, "use": "sig"}

        def publish(*keys):
            fresh = self.directory / "jwks.new"
            fresh.write_text(json.dumps({"keys": list(keys)}))
            fresh.rename(self.directory / "jwks.json")
        publish(public(rsa_key, "one"), public(ec_key, "two"))
        (self.directory / "access.yaml").write_text(blocks()["oidc: access"])
        self.used.add("oidc: access")
        self.sh("own: issue")
        log = self.directory / "oidc-coordinator.log"
        try:
            self.start("oidc: coordinator")
        except AssertionError:
            if "no libjwt" in log.read_text():
                self.skip("this build has no libjwt")
            raise
        self.start("own: worker")
        self.wait_for_worker()
        now = int(time.time())

        def token(key=rsa_key, kid="one", algorithm="RS256", drop=(), **claims):
            body = {"iss": "https://login.example.org", "aud": "muster", "exp": now + 600, "iat": now,
                    "email": "grace@example.org", "groups": ["ml-platform", "muster:admin"], **claims}
            return jwt.encode({k: v for k, v in body.items() if k not in drop}, key, algorithm=algorithm,
                              headers={"kid": kid} if kid else None)
        (self.directory / "identity.token").write_text(token())
        said = self.sh("oidc: user").stdout
        # Roles are those of the access file; a group cannot be called admin into being one.
        self.assertIn("you are user grace@example.org, with viewer, submitter\n", said)
        self.assertIn("grace", self.muster("version", token=token(ec_key, "two", "ES256", aud=["x", "muster"])).stdout)
        out = self.muster("submit", self.make_job("job", 10), "--watch", token=token()).stdout
        self.assertIn("succeeded", out)
        plain = "eyJhbGciOiJub25lIiwia2lkIjoib25lIn0." + token().split(".")[1] + "."
        secret = json.dumps(public(rsa_key, "one"))
        tampered = token().split(".")
        tampered[1] = token(email="root@example.org").split(".")[1]
        for bad, says in (
                (plain, "algorithm 'none'"), (token(secret, algorithm="HS256"), "algorithm 'HS256'"),
                (token(kid="three"), "key 'three' is not in"), (token(kid=None), "key '' is not in"),
                (token(foreign), "signature"), (".".join(tampered), "signature"),
                (token(ec_key, "one", "ES256"), "algorithm is not that of its key"),
                (token(aud="other"), "audience"), (token(drop=["aud"]), "audience"),
                (token(iss="https://evil.example.org"), "issuer"), (token(exp=now - 120), "expired"),
                (token(drop=["exp"]), "no end"), (token(nbf=now + 300), "not valid yet"),
                (token(iat=now + 300), "not valid yet"), (token(drop=["email"]), "claim email"),
                (token(email="a b"), "claim email"), (token() + ".x", "malformed"), ("a.b.c", "malformed")):
            self.refused(self.muster("get", "jobs", token=bad, check=False), says)
        self.assertEqual(self.muster("get", "jobs", token=token(exp=now - 20), check=False).returncode, 0,
                         "within the clock skew")
        poll("refusals are audited", self.audit, lambda entries: sum(
            e["who"] == "nobody" and e["statusCode"] == 16 for e in entries) >= 15)
        # The issuer rotates its keys.
        publish(public(foreign, "three"))
        poll("the new key counts", lambda: self.muster("get", "jobs", token=token(foreign, "three"), check=False),
                  lambda ran: ran.returncode == 0, seconds=10)
        self.refused(self.muster("get", "jobs", token=token(), check=False), "key 'one' is not in")


    def test_keys_are_fetched_from_the_issuer(self):
        try:
            import jwt
            from cryptography.hazmat.primitives.asymmetric import rsa
        except ImportError:
            self.skip("python3-jwt and python3-cryptography make the tokens of this test")
        keys = {kid: rsa.generate_private_key(65537, 2048) for kid in ("one", "two")}
        served = {"status": 503, "body": b"", "asked": 0}

        def publish(*kids):
            served["body"] = json.dumps({"keys": [
                {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(keys[kid].public_key())), "kid": kid, "use": "sig"}
                for kid in kids]}).encode()
            served["status"] = 200

        class Issuer(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                served["asked"] += 1
                self.send_response(served["status"])
                self.send_header("Content-Length", str(len(served["body"])))
                self.end_headers()
                self.wfile.write(served["body"])

            def log_message(self, *_):
                pass
        server = http.server.HTTPServer(("127.0.0.1", 0), Issuer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.addCleanup(lambda: (server.shutdown(), thread.join(), server.server_close()))
        (self.directory / "access.yaml").write_text(
            blocks()["oidc: access"].replace("jwks.json", f"http://127.0.0.1:{server.server_port}/keys"))
        self.sh("own: issue")
        log = self.directory / "oidc-coordinator.log"
        self.start("oidc: coordinator")

        def token(kid):
            return jwt.encode({"iss": "https://login.example.org", "aud": "muster", "exp": int(time.time()) + 600,
                               "email": "grace@example.org"}, keys[kid], algorithm="RS256", headers={"kid": kid})

        def call(kid):
            return self.muster("get", "jobs", token=token(kid), check=False)
        if "no libcurl" in call("one").stderr or "no libjwt" in log.read_text():
            self.skip("this build has no libcurl or no libjwt")
        # An issuer that is away keeps nobody else out.
        self.refused(call("one"), "there are no keys of http://127.0.0.1", 16, "JobService.ListJobs")
        self.assertEqual(self.muster("get", "jobs", user="user-alice").returncode, 0)
        publish("one")
        poll("its keys count", lambda: call("one").returncode, lambda code: code == 0)
        # A key that is not known yet is asked for, though not at each call.
        publish("one", "two")
        asked, start, calls = served["asked"], time.monotonic(), 0
        while call("two").returncode != 0:
            calls += 1
            self.assertLess(time.monotonic() - start, 60)
        took = time.monotonic() - start
        self.assertLessEqual(served["asked"] - asked, 1 + took / 5, f"{calls} calls in {took:.1f} s")
        # What is no key set changes nothing.
        served["body"] = b"<html>login</html>"
        asked = served["asked"]
        unknown = jwt.encode({"iss": "x"}, keys["one"], algorithm="RS256", headers={"kid": "three"})
        poll("it is asked again", lambda: self.muster("get", "jobs", token=unknown, check=False) and served["asked"],
                  lambda now: now > asked)
        poll("it is in the log", log.read_text, lambda text: "no JSON Web Key Set" in text)
        self.assertEqual((call("one").returncode, call("two").returncode), (0, 0))


class Defaults(SetUp):
    def refuse(self, *command, says):
        ran = subprocess.run([str(part) for part in command], cwd=self.directory, env=self.environment, text=True,
                             capture_output=True, timeout=60)
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn(says, ran.stderr)

    def test_nothing_listens_for_other_machines_by_accident(self):
        coordinator = (BIN / "muster-coordinator", "--data-dir", self.directory / "data")
        self.refuse(*coordinator, "--listen", "0.0.0.0:0", says="--insecure")
        self.refuse(*coordinator, "--listen", "[::]:0", says="docs/security.md")
        self.refuse(*coordinator, "--listen", "127.0.0.1:0", "--tls-cert", "x.crt", says="all three")
        self.refuse(*coordinator, "--listen", "127.0.0.1:0", "--access", "x", says="--tls-cert")
        self.muster("admin", "pki", "init", "--host", "localhost")
        self.refuse(*coordinator, "--listen", "127.0.0.1:0", "--tls-cert", "pki/coordinator.crt", "--tls-key",
                    "pki/ca.key", "--tls-ca", "pki/ca.crt", says="not that of the certificate")
        self.refuse(BIN / "muster-worker", "--state-dir", self.directory / "w", "--coordinator", "localhost:1",
                    "--tls-ca", "pki/ca.crt", says="--tls-cert")
        again = self.muster("admin", "pki", "init", "--host", "localhost", check=False)
        self.assertIn("not overwritten", again.stderr)

    def test_a_daemon_obeys_no_coordinator_elsewhere_without_tls(self):
        with open(self.directory / "worker.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen([BIN / "muster-worker", "--name", "w", "--state-dir", self.directory / "w",
                                        "--gpus", "none", "--coordinator", "192.0.2.1:7600"], env=self.environment,
                                       text=True, stdout=subprocess.PIPE, stderr=log)
        self.running.append(process)
        poll("it says so", (self.directory / "worker.log").read_text, lambda text: "--insecure" in text)

    def test_a_token_is_not_sent_without_tls(self):
        ran = subprocess.run([BIN / "muster", "--coordinator", "192.0.2.1:7600", "get", "jobs"], text=True,
                             env={**self.environment, "MUSTER_TOKEN": "muster_abc"}, capture_output=True, timeout=60)
        self.assertEqual(ran.returncode, 1)
        self.assertIn("a token is not sent to 192.0.2.1:7600 without TLS", ran.stderr)


class Page(unittest.TestCase):
    def test_every_test_that_the_page_names_exists(self):
        table = (ROOT / "docs/security.md").read_text().split("## What shows it")[1]
        named = re.findall(r"`(test_\w+|[A-Z]\w+)`", table)
        self.assertGreater(len(named), 40)
        sources = "".join(path.read_text() for pattern in ("base/*.cc", "security/*.cc", "coordinator/*.cc", "worker/*.cc",
                                                           "e2e/security/*.py", "deploy/*.py", "fuzz/*.cc")
                          for path in (ROOT / "tests").glob(pattern))
        for name in named:
            self.assertRegex(sources, rf"(def {name}\(|TEST(_F)?\(\w+, {name}\))", name)

    def test_every_block_of_the_page_is_run(self):
        skipped = {tag for tag in blocks() if tag.startswith(IdentityTokens.skipped_blocks)}
        self.assertEqual(SetUp.used | skipped, set(blocks()), "blocks of docs/security.md that no test runs")


def find_jwt():
    """Starts again under the system's Python where only that has the library that makes tokens."""
    try:
        import jwt  # noqa: F401
    except ImportError:
        system = "/usr/bin/python3"
        if os.path.exists(system) and not os.environ.get("MUSTER_SECURITY_TEST"):
            os.environ["MUSTER_SECURITY_TEST"] = "1"
            os.execv(system, [system, "-B", *sys.argv])


if __name__ == "__main__":
    find_jwt()
    at = sys.argv.index("--bin")
    BIN = pathlib.Path(sys.argv[at + 1]).resolve()
    del sys.argv[at:at + 2]
    suite = unittest.TestSuite()
    names = sys.argv[1:]
    loader = unittest.TestLoader()
    if names:
        suite.addTests(loader.loadTestsFromNames(names, sys.modules[__name__]))
    else:
        for case in (OwnAuthority, RotatedFiles, IdentityTokens, Defaults, Page):
            suite.addTests(loader.loadTestsFromTestCase(case))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    sys.exit(not result.wasSuccessful())
