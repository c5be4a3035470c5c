"""The chart over a matrix of values: linted, rendered twice the same, checked against the schemas of every Kubernetes
version that it promises, and held to rules of its own (pod security, selectors, ports, network). Runs under the Python
of ./dev test --deploy; without it skipped (77)."""

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".cache/deploy-python/bin/python"
if __name__ == "__main__" and "--bin" in sys.argv and not os.environ.get("MUSTER_CHART_TEST"):
    if not os.access(PYTHON, os.X_OK):
        print("SKIPPED: ./dev test --deploy fetches Helm's library", file=sys.stderr)
        sys.exit(77)
    os.environ["MUSTER_CHART_TEST"] = sys.argv[sys.argv.index("--bin") + 1]
    os.execv(PYTHON, [str(PYTHON), "-B", __file__])

sys.path.insert(0, str(ROOT / "tests/deploy"))
import chart  # noqa: E402
import helm_python  # noqa: E402
import kubernetes_validate  # noqa: E402
from processes import Process  # noqa: E402

BIN = pathlib.Path(os.environ.get("MUSTER_CHART_TEST") or ROOT / "build/bin")
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
GPU = {"kind": "DaemonSet", "slots": 0, "gpus": 8, "nodeSelector": {"nvidia.com/gpu.present": "true"},
       "sharedMemory": "64Gi", "resources": {"requests": {"cpu": "64"}, "limits": {"memory": "1Ti"}}}
MATRIX = {
    "defaults": {},
    "minimum": {"workers": {"cpu": None}, "networkPolicy": {"enabled": False}, "test": {"enabled": False}},
    "gpus": {"workers": {"cpu": None, "gpu": GPU}},
    "rdma on the host's network": {"workers": {"cpu": None, "gpu": {
        **GPU, "hostNetwork": True, "interface": "ib0", "env": {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN"},
        "rdma": {"enabled": True, "resources": {"rdma/hca_shared_devices_a": "1"}},
        "state": {"type": "hostPath"}, "runtimeClassName": "nvidia"}}},
    "several groups": {"workers": {"cpu": {"replicas": 0, "state": {"type": "claim"}}, "gpu": GPU,
                                   "big": {"slots": 0, "gpus": 4, "replicas": 3}}},
    "monitoring": {"monitoring": {"scrape": {"enabled": True, "labels": {"release": "prometheus"}},
                                  "rules": {"enabled": True, "labels": {"release": "prometheus"},
                                            "runbookUrl": "https://runbooks.example.org/"},
                                  "dashboards": {"enabled": True}}},
    "monitors": {"clusterId": "prod", "workers": {"cpu": {}, "gpu": GPU},
                 "monitoring": {"scrape": {"enabled": True, "kind": "Monitors", "labels": {"release": "prometheus"}}}},
    "monitors of metrics with tls": {
        "clusterId": "prod", "tls": {"metricsSecret": "metrics-tls", "metricsClients": True},
        "monitoring": {"scrape": {"enabled": True, "kind": "Monitors", "tlsSecret": "prometheus-tls"}}},
    "everything": {
        "image": {"repository": "registry.example.org/ml/muster", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}], "clusterId": "prod", "commonLabels": {"team": "ml"},
        "commonAnnotations": {"owner": "ml"},
        "coordinator": {"image": {"digest": "sha256:" + "0" * 64}, "extraArgs": ["--lost-after", "60s"],
                        "storage": {"accessMode": "ReadWriteOncePod", "storageClass": "fast", "size": "20Gi"},
                        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}, "priorityClassName": "high",
                        "nodeSelector": {"pool": "system"}, "tolerations": [{"operator": "Exists"}],
                        "patch": {"statefulSet": {"spec": {"template": {"spec": {"hostname": "head"}}}}}},
        "storage": {"volumes": {"data": {"mountPath": "/data", "existingClaim": "data", "readOnly": True},
                                "scratch": {"mountPath": "/scratch", "hostPath": "/mnt/nvme"}}},
        "workers": {"cpu": {"patch": {"workload": {"metadata": {"annotations": {"x": "y"}}}},
                            "topologySpreadConstraints": [
                                {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone",
                                 "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}]}},
        "networkPolicy": {"workerEgress": [{"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}],
                          "coordinatorEgress": [{"ports": [{"port": 4318}], "to": [
                              {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracing"}}}]}]}},
    "tls": {"tls": {"coordinatorSecret": "head-tls", "workerSecret": "worker-tls", "revocations": True,
                    "accessConfigMap": "access"}},
    "tls of metrics": {"tls": {"metricsSecret": "metrics-tls", "metricsClients": True},
                       "monitoring": {"scrape": {"enabled": True, "tlsSecret": "prometheus-tls"}}},
    "tls by cert-manager": {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}},
    "all of tls by cert-manager": {
        "tls": {"coordinatorSecret": "head-tls", "metricsClients": True, "certManager": {
            "enabled": True, "issuerRef": {"name": "vault", "kind": "ClusterIssuer"}, "dnsNames": ["head.example.org"],
            "metrics": True, "duration": "2160h", "renewBefore": "720h"}},
        "monitoring": {"scrape": {"enabled": True}}},
    "tls with a client for the test": {"tls": {"coordinatorSecret": "head-tls", "workerSecret": "worker-tls"},
                                       "test": {"clientSecret": "client-tls"}},
    "traces": {"tracing": {"endpoint": "https://otel-collector.monitoring.svc:4318", "caSecret": "otel-ca"}},
    "traces without tls to any place": {"tracing": {"endpoint": "http://[fd00::7]:4318"}, "networkPolicy": {
        "tracing": [], "coordinatorEgress": [{"to": [{"ipBlock": {"cidr": "fd00::7/128"}}], "ports": [{"port": 4318}]}]}},
    "topology": {"workerDefaults": {"labelsFromPod": {"zone": "topology.kubernetes.io/zone"}},
                 "workers": {"cpu": {"labels": {"rack": "r12", "nvlink-domain": "c3"},
                                     "labelsFromPod": {"zone": "topology.kubernetes.io/zone",
                                                       "nvlink-domain": "nvidia.com/gpu.clique"}}}},
    "secrets of jobs": {"workerDefaults": {"secrets": {"secretName": "storage-keys"}, "allowPaths": ["/checkpoints", "/data/x"]},
                        "workers": {"cpu": {}, "research": {"secrets": {"secretName": "research-keys", "items": [
                            {"key": "hf-token", "path": "research/hf-token"}]}, "allowPaths": []}}},
    "keda": {"keda": {"enabled": True}, "workerDefaults": {"scale": {"maxReplicas": 4}},
             "workers": {"cpu": {}, "gpu": {**GPU, "kind": "StatefulSet", "scale": {"minReplicas": 1, "maxReplicas": 16},
                                            "patch": {"scaledObject": {"spec": {"fallback": {
                                                "failureThreshold": 3, "replicas": 2}}}}},
                         "both": {"slots": 3, "gpus": 2}, "nodes": GPU}},
    "keda with tls": {"keda": {"enabled": True, "secret": "keda-tls", "pollingSeconds": 5, "cooldownSeconds": 60},
                      "tls": {"coordinatorSecret": "head-tls", "workerSecret": "worker-tls"}},
    "claim of the user": {"coordinator": {"storage": {"existingClaim": "old"}}},
}
# Objects of other operators have no schema here: their required parts. test_objects_of_keda looks closer at KEDA's.
OPERATOR = {"ScrapeConfig": ["httpSDConfigs"], "PrometheusRule": ["groups"], "ScaledObject": ["scaleTargetRef", "triggers"],
            "TriggerAuthentication": ["secretTargetRef"], "ServiceMonitor": ["endpoints", "selector"],
            "PodMonitor": ["podMetricsEndpoints", "selector"], "Certificate": ["secretName", "issuerRef", "usages"]}
# Fields of the Prometheus operator (github.com/prometheus-operator/prometheus-operator), of those that this chart uses: an
# endpoint has the same ones in a ServiceMonitor and a PodMonitor (Endpoint of pkg/apis/monitoring/v1/types.go,
# PodMetricsEndpoint of podmonitor_types.go), and so has their TLS (SafeTLSConfig of types.go). A relabeling is RelabelConfig
# there; those of an endpoint run after the operator's own, which set `job` and MONITOR_LABELS.
ENDPOINT = {"port", "interval", "scheme", "tlsConfig", "relabelings"}
SAFE_TLS = {"ca", "cert", "keySecret", "serverName"}
RELABELING = {"sourceLabels", "separator", "targetLabel", "regex", "modulus", "replacement", "action"}
MONITOR_LABELS = {"namespace", "pod", "container", "endpoint", "service"}
# Fields of cert-manager (github.com/cert-manager/cert-manager): CertificateSpec and what is in it of
# pkg/apis/certmanager/v1/types_certificate.go, ObjectReference of pkg/apis/meta/v1/types.go, KeyUsage of
# pkg/apis/certmanager/v1/types.go.
CERTIFICATE = {"secretName", "issuerRef", "duration", "renewBefore", "privateKey", "usages", "subject", "dnsNames", "uris"}
USAGES = {"server auth": "serverAuth", "client auth": "clientAuth"}
# Fields of KEDA 2 (github.com/kedacore/keda): of a ScaledObject's spec and of its scaleTargetRef from
# apis/keda/v1alpha1/scaledobject_types.go, of a trigger from scaletriggers_types.go and scaledobject_types.go beside it, of
# a secretTargetRef from triggerauthentication_types.go; the parameters of secrets and the metadata that KEDA itself reads
# from pkg/scalers/external_scaler.go, which hands all metadata on to the scaler.
KEDA_SPEC = {"scaleTargetRef", "pollingInterval", "initialCooldownPeriod", "cooldownPeriod", "idleReplicaCount",
             "minReplicaCount", "maxReplicaCount", "advanced", "triggers", "fallback"}
KEDA_TARGET = {"name", "apiVersion", "kind", "envSourceContainerName"}
KEDA_TRIGGER = {"type", "name", "useCachedMetrics", "metadata", "authenticationRef", "metricType"}
KEDA_SECRET_PARAMETERS = {"caCert", "tlsClientCert", "tlsClientKey"}
# What the coordinator reads (coordinator/wanted_workers.h).
SCALER_METADATA = {"workers", "device", "devicesPerWorker", "maxWorkers"}


def pod_templates(objects):
    for item in objects:
        if item["kind"] in ("StatefulSet", "DaemonSet"):
            yield item, item["spec"]["template"]
        elif item["kind"] == "Pod":
            yield item, item


def relabelled(labels, rules):
    """What Prometheus makes of a target's labels, as far as this chart's relabelings go."""
    labels = dict(labels)
    for rule in rules:
        pattern = re.compile(rule.get("regex", "(.*)"))
        if rule.get("action", "replace") == "labeldrop":
            labels = {name: value for name, value in labels.items() if not pattern.fullmatch(name)}
            continue
        match = pattern.fullmatch(";".join(labels.get(name, "") for name in rule.get("sourceLabels", [])))
        if match:
            labels[rule["targetLabel"]] = match.expand(rule.get("replacement", "$1").replace("$", "\\"))
    return {name: value for name, value in labels.items() if not name.startswith("__")}


def issue(home, certificates):
    """Fills a folder for each secret as cert-manager does with a CA issuer."""
    def openssl(*arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    key = ["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"]
    openssl(*key, home / "ca.key")
    openssl("req", "-x509", "-new", "-key", home / "ca.key", "-subj", "/CN=test", "-days", "2", "-out", home / "ca.crt")
    for spec in certificates.values():
        folder = home / spec["secretName"]
        folder.mkdir()
        names = [f"DNS:{name}" for name in spec.get("dnsNames", [])] + [f"URI:{uri}" for uri in spec.get("uris", [])]
        (folder / "extensions").write_text(
            f"subjectAltName=critical,{','.join(names)}\nextendedKeyUsage={USAGES[spec['usages'][1]]}\n"
            "keyUsage=critical,digitalSignature\nbasicConstraints=critical,CA:FALSE\n")
        openssl(*key, folder / "ec.key")
        openssl("pkcs8", "-topk8", "-nocrypt", "-in", folder / "ec.key", "-out", folder / "tls.key")
        subject = "".join(f"/O={name}" for name in spec.get("subject", {}).get("organizations", [])) or "/"
        openssl("req", "-new", "-key", folder / "tls.key", "-subj", subject, "-out", folder / "request")
        openssl("x509", "-req", "-in", folder / "request", "-CA", home / "ca.crt", "-CAkey", home / "ca.key", "-CAcreateserial",
                "-days", "1", "-extfile", folder / "extensions", "-out", folder / "tls.crt")
        shutil.copy(home / "ca.crt", folder)


class Programs:
    """Programs of rendered pods on this machine: their flags but for those given again, with secrets from folders."""

    def __init__(self, test, objects, home):
        self.test, self.objects, self.home = test, objects, home

    def command(self, name, *instead, without=(), job=None):
        spec = next(template["spec"] for item, template in pod_templates(self.objects) if item["metadata"]["name"] == name)
        container = spec["containers"][0]
        folders = {m["mountPath"]: self.home / v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v
                   for m in container["volumeMounts"] if m["name"] == v["name"]}
        words = [word for word in container["command"] if word != "supervise"]
        replaced = {flag.split("=")[0] for flag in instead} | set(without)
        for word in container["args"]:
            if word.split("=")[0] in replaced:
                continue
            for path, folder in folders.items():
                word = word.replace(f"{path}/", f"{folder}/")
            words.append(str(job) if word == "/job/job.yaml" else word)
        return [BIN / words[0], *instead, *words[1:]]

    def start(self, name, *instead, without=()):
        process = Process(self.command(name, *instead, without=without), self.home / f"{name}.log", stdout=subprocess.PIPE)
        self.test.addCleanup(process.process.stdout.close)
        self.test.addCleanup(process.stop)
        line = process.process.stdout.readline()
        self.test.assertTrue(line, process.log.read_text())
        return json.loads(line)

    def run(self, name, *instead, job):
        done = subprocess.run([*map(str, self.command(name, *instead, job=job))], capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr


class Chart(unittest.TestCase):
    def each(self):
        for name, values in MATRIX.items():
            yield name, values, chart.render(values)

    def test_lint_has_nothing_to_say(self):
        for name, values in MATRIX.items():
            report = helm_python.lint(chart.CHART, values, strict=True, namespace="muster")
            found = [m for m in report["messages"] if m["severity"] >= 2]
            self.assertEqual((found, report["errors"]), ([], []), name)

    def test_rendering_is_the_same_twice_and_for_upgrades(self):
        for name, values, objects in self.each():
            self.assertEqual(json.dumps(objects), json.dumps(chart.render(values)))
            self.assertEqual(objects, chart.render(values, upgrade=True))

    def test_objects_are_valid_in_every_version(self):
        for name, _, objects in self.each():
            for item, version in itertools.product(objects, VERSIONS):
                if item["kind"] in OPERATOR:
                    for key in OPERATOR[item["kind"]]:
                        self.assertTrue(item["spec"][key])
                else:
                    kubernetes_validate.validate(item, version, strict=True)

    def test_coordinator_and_cpu_workers_are_restricted(self):
        for name, values, objects in self.each():
            for item, template in pod_templates(objects):
                spec = template["spec"]
                rdma = any("IPC_LOCK" in c["securityContext"]["capabilities"].get("add", []) for c in spec["containers"])
                self.assertEqual(rdma, name.startswith("rdma") and item["kind"] == "DaemonSet")
                self.assertIs(spec["automountServiceAccountToken"], False)
                self.assertIs(spec["enableServiceLinks"], False)
                security = spec["securityContext"]
                self.assertEqual(security["seccompProfile"], {"type": "RuntimeDefault"})
                if not rdma:
                    self.assertIs(security["runAsNonRoot"], True)
                    self.assertGreater(security["runAsUser"], 0)
                    self.assertNotIn("hostNetwork", spec)
                for container in spec["containers"]:
                    own = container["securityContext"]
                    self.assertIs(own["allowPrivilegeEscalation"], False)
                    self.assertIs(own["readOnlyRootFilesystem"], True)
                    self.assertEqual(own["capabilities"]["drop"], ["ALL"])
                    self.assertTrue(container["resources"]["requests"] and container["resources"]["limits"])
                    self.assertRegex(container["image"], r"^[\w./-]+(:(?!latest)[\w.-]+|@sha256:[0-9a-f]{64})$")
                volumes = {volume["name"] for volume in spec.get("volumes", [])} | {
                    claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])}
                for container in spec["containers"]:
                    mounted = [mount["name"] for mount in container.get("volumeMounts", [])]
                    self.assertLessEqual(set(mounted), volumes)
                    self.assertFalse(any("subPath" in mount for mount in container.get("volumeMounts", [])))

    def test_selectors_match_and_hold_nothing_that_changes(self):
        for _, _, objects in self.each():
            for item in objects:
                if item["kind"] not in ("StatefulSet", "DaemonSet"):
                    continue
                selector = item["spec"]["selector"]["matchLabels"]
                self.assertLessEqual(selector.items(), item["spec"]["template"]["metadata"]["labels"].items())
                fixed = [selector] + [c["metadata"]["labels"] for c in item["spec"].get("volumeClaimTemplates", [])]
                for labels in fixed:
                    self.assertFalse(any("version" in key or "chart" in key for key in labels), labels)
            names = [(item["kind"], item["metadata"]["name"]) for item in objects]
            self.assertEqual(len(names), len(set(names)))

    def test_named_ports_exist(self):
        for _, _, objects in self.each():
            pods = [(template["metadata"].get("labels", {}), template["spec"]) for _, template in pod_templates(objects)]
            for item in objects:
                if item["kind"] == "Service":
                    chosen = [spec for labels, spec in pods if item["spec"]["selector"].items() <= labels.items()]
                    self.assertTrue(chosen, item["metadata"]["name"])
                    wanted = {port["targetPort"] for port in item["spec"]["ports"]}
                    have = {port["name"] for spec in chosen for c in spec["containers"] for port in c["ports"]}
                    self.assertLessEqual(wanted, have)

    def test_networks_let_through_what_has_to_pass_and_nothing_else(self):
        objects = chart.render({})
        policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
        pods = {template["metadata"]["labels"]["app.kubernetes.io/component"]: template["metadata"]["labels"]
                for _, template in pod_templates(objects)}
        pods["client"] = {"muster.dev/client": "true"}
        pods["other"] = {"app": "other"}

        def chooses(peer, pod):
            return "namespaceSelector" not in peer and peer["podSelector"]["matchLabels"].items() <= pods[pod].items()

        def allowed(source, target, port):
            def side(pod, direction, key, other):
                rules = [p for p in policies if p["podSelector"]["matchLabels"].items() <= pods[pod].items()
                         and direction in p["policyTypes"]]
                return not rules or any(
                    any(chooses(peer, other) for peer in rule.get(key, []))
                    and ("ports" not in rule or any(q["port"] == port for q in rule["ports"]))
                    for p in rules for rule in p[direction.lower()])
            return side(source, "Egress", "to", target) and side(target, "Ingress", "from", source)
        for source, target, port in (("worker", "coordinator", "grpc"), ("client", "coordinator", "grpc"),
                                     ("test", "coordinator", "grpc"), ("worker", "worker", 20000)):
            self.assertTrue(allowed(source, target, port), f"{source} must reach {target}")
        for source, target, port in (("other", "coordinator", "grpc"), ("other", "worker", 20000),
                                     ("client", "worker", 20000), ("coordinator", "worker", 20000),
                                     ("client", "coordinator", "metrics")):
            self.assertFalse(allowed(source, target, port), f"{source} must not reach {target}")
        egress = next(p for p in policies if p["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker")
        dns = [q for rule in egress["egress"] for q in rule.get("ports", []) if q["port"] == 53]
        self.assertEqual({q["protocol"] for q in dns}, {"UDP", "TCP"})

    def test_tls_is_given_to_both_ends_and_insecure_said_where_it_is_not(self):
        for values, secure in (({}, False), (MATRIX["tls"], True)):
            for item, template in pod_templates(chart.render(values)):
                if item["kind"] == "Pod":
                    continue
                container = template["spec"]["containers"][0]
                self.assertEqual("--insecure" in container["args"], not secure)
                self.assertEqual("--tls-cert=/etc/muster/tls/tls.crt" in container["args"], secure)
                mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
                self.assertEqual(mounted.get("tls"), "/etc/muster/tls" if secure else None)

    def test_labels_of_nodes_reach_the_daemon(self):
        workload = next(item for item in chart.render(MATRIX["topology"]) if item["metadata"]["name"] == "muster-worker-cpu"
                        and item["kind"] == "StatefulSet")
        container = workload["spec"]["template"]["spec"]["containers"][0]
        self.assertEqual([a for a in container["args"] if a.startswith("--label")], [
            "--label=nvlink-domain=c3", "--label=rack=r12", "--label=nvlink-domain=$(MUSTER_LABEL_NVLINK_DOMAIN)",
            "--label=zone=$(MUSTER_LABEL_ZONE)"])
        sources = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"]
                   if e["name"].startswith("MUSTER_LABEL_")}
        self.assertEqual(sources, {"MUSTER_LABEL_ZONE": "metadata.labels['topology.kubernetes.io/zone']",
                                   "MUSTER_LABEL_NVLINK_DOMAIN": "metadata.labels['nvidia.com/gpu.clique']"})

    def test_secrets_of_jobs_are_mounted_for_the_group_of_the_pod_and_paths_passed_on(self):
        found = {}
        for item, template in pod_templates(chart.render(MATRIX["secrets of jobs"])):
            spec = template["spec"]
            container = spec["containers"][0]
            volume = next((v["secret"] for v in spec.get("volumes", []) if v["name"] == "secrets"), None)
            found[item["metadata"]["name"]] = volume
            flags = [argument for argument in container.get("args", []) if argument.startswith(("--secrets", "--allow-path"))]
            mounts = [m for m in container.get("volumeMounts", []) if m["name"] == "secrets"]
            if volume is None:
                self.assertEqual((flags, mounts), ([], []))
                continue
            self.assertEqual(mounts, [{"name": "secrets", "mountPath": "/etc/muster/secrets", "readOnly": True}])
            # The daemon refuses a file that all may read.
            self.assertEqual(volume["defaultMode"], 0o440)
            self.assertEqual(flags, ["--secrets=/etc/muster/secrets"] + (
                [] if "research" in item["metadata"]["name"] else ["--allow-path=/checkpoints", "--allow-path=/data/x"]))
        self.assertEqual(found["muster-worker-cpu"]["secretName"], "storage-keys")
        self.assertEqual(found["muster-worker-research"]["items"], [{"key": "hf-token", "path": "research/hf-token"}])
        self.assertIsNone(found["muster-coordinator"])

    def test_metrics_have_tls_where_a_secret_is_named(self):
        flags = ["--metrics-tls-cert=/etc/muster/metrics-tls/tls.crt", "--metrics-tls-key=/etc/muster/metrics-tls/tls.key",
                 "--metrics-tls-ca=/etc/muster/metrics-tls/ca.crt"]
        for name, values, objects in self.each():
            tls = values.get("tls", {})
            made = tls.get("certManager", {}).get("metrics")
            secret = tls.get("metricsSecret") or ("muster-metrics-tls" if made else None)
            wanted = flags if tls.get("metricsClients") else flags[:2]
            for item, template in pod_templates(objects):
                if item["kind"] == "Pod":
                    continue
                spec = template["spec"]
                container = spec["containers"][0]
                probe = container["livenessProbe"]["httpGet"]
                volumes = [v["secret"]["secretName"] for v in spec["volumes"] if v["name"] == "metrics-tls"]
                mounts = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "metrics-tls"]
                self.assertEqual(probe["scheme"], "HTTPS" if secret else "HTTP", name)
                self.assertEqual(volumes, [secret] if secret else [], name)
                self.assertEqual(mounts, ["/etc/muster/metrics-tls"] if secret else [], name)
                self.assertEqual([a for a in container["args"] if "metrics-tls" in a], wanted if secret else [], name)
        scrape = next(item for item in chart.render(MATRIX["tls of metrics"]) if item["kind"] == "ScrapeConfig")["spec"]
        self.assertEqual(scrape["httpSDConfigs"][0]["url"], "https://muster-coordinator.muster.svc:9070/targets")
        for config in (scrape["tlsConfig"], scrape["httpSDConfigs"][0]["tlsConfig"]):
            self.assertEqual(config["serverName"], "muster-metrics")
            self.assertEqual(config["ca"]["secret"], {"name": "prometheus-tls", "key": "ca.crt"})
            self.assertEqual(config["keySecret"], {"name": "prometheus-tls", "key": "tls.key"})

    def certificates(self, name):
        objects = chart.render(MATRIX[name])
        return objects, {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "Certificate"}

    def test_certificates_are_asked_for_into_the_secrets_that_pods_mount(self):
        for name in ("tls by cert-manager", "all of tls by cert-manager"):
            objects, made = self.certificates(name)
            self.assertEqual({item["apiVersion"] for item in objects if item["kind"] == "Certificate"}, {"cert-manager.io/v1"})
            for spec in made.values():
                self.assertLessEqual(spec.keys(), CERTIFICATE)
                self.assertEqual(spec["issuerRef"].keys(), {"name", "kind", "group"})
                self.assertEqual(spec["usages"][0], "digital signature")
                self.assertIn(spec["usages"][1], USAGES)
                self.assertTrue(spec.get("dnsNames") or spec.get("uris"))
            mounted = {(item["metadata"]["name"], volume["name"]): volume["secret"]["secretName"]
                       for item, template in pod_templates(objects) for volume in template["spec"]["volumes"] if "secret" in volume}
            self.assertEqual(mounted["muster-coordinator", "tls"], made["muster-coordinator"]["secretName"])
            self.assertEqual(mounted["muster-worker-cpu", "tls"], made["muster-worker"]["secretName"])
            self.assertEqual(mounted["muster-test", "tls"], made["muster-test"]["secretName"])
            self.assertLessEqual(set(mounted.values()), {spec["secretName"] for spec in made.values()})
        _, made = self.certificates("tls by cert-manager")
        self.assertEqual({name: (spec["secretName"], spec.get("dnsNames") or spec["uris"]) for name, spec in made.items()}, {
            "muster-coordinator": ("muster-coordinator-tls", ["muster-coordinator.muster.svc"]),
            "muster-worker": ("muster-worker-tls", ["spiffe://muster/worker/*"]),
            "muster-test": ("muster-test-tls", ["spiffe://muster/user/helm-test"])})
        objects, made = self.certificates("all of tls by cert-manager")
        self.assertEqual(made.keys(), {"muster-coordinator", "muster-worker", "muster-metrics", "muster-scrape", "muster-test"})
        self.assertEqual(made["muster-coordinator"]["secretName"], "head-tls")
        self.assertEqual(made["muster-coordinator"]["dnsNames"], ["muster-coordinator.muster.svc", "head.example.org"])
        self.assertEqual(made["muster-metrics"]["dnsNames"], ["muster-metrics"])
        for spec in made.values():
            self.assertEqual((spec["issuerRef"]["kind"], spec["duration"], spec["renewBefore"]), ("ClusterIssuer", "2160h", "720h"))
        scrape = next(item for item in objects if item["kind"] == "ScrapeConfig")["spec"]["tlsConfig"]
        self.assertEqual(scrape["serverName"], "muster-metrics")
        self.assertEqual(scrape["keySecret"]["name"], made["muster-scrape"]["secretName"])

    def test_the_job_of_helm_test_has_a_certificate_where_callers_need_one(self):
        for name, secret in (("defaults", None), ("tls", False), ("tls with a client for the test", "client-tls"),
                             ("tls by cert-manager", "muster-test-tls")):
            pod = next((item for item in chart.render(MATRIX[name]) if item["kind"] == "Pod"), None)
            self.assertEqual(pod is None, secret is False, name)
            if pod:
                secrets = [v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v]
                self.assertEqual(secrets, [secret] if secret else [], name)
                flags = [a for a in pod["spec"]["containers"][0]["args"] if a.startswith("--tls")]
                self.assertEqual(len(flags), 3 if secret else 0, name)

    @unittest.skipUnless((BIN / "muster-coordinator").exists() and shutil.which("openssl"), "needs the programs and openssl")
    def test_the_programs_work_with_what_the_certificates_ask_for(self):
        """An authority of openssl stands for the issuer: the pods' own flags, then, with addresses of this machine."""
        objects, made = self.certificates("all of tls by cert-manager")
        with tempfile.TemporaryDirectory(prefix="muster-chart-") as directory:
            home = pathlib.Path(directory)
            issue(home, made)
            cluster = Programs(self, objects, home)
            coordinator = cluster.start("muster-coordinator", "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0",
                                        f"--data-dir={home}/state")
            name = f"--tls-server-name={made['muster-coordinator']['dnsNames'][0]}"
            address = f"--coordinator={coordinator['address']}"
            cluster.start("muster-worker-cpu", address, name, "--name=w0", f"--state-dir={home}/w0", "--metrics=127.0.0.1:0",
                          "--host-id=here", without=["--rank-ports"])
            subprocess.run([BIN / "muster", "data", "tokenize", "--input", ROOT / "LICENSE", "--output", home / "tokens",
                            "--documents", "file"], check=True, capture_output=True)
            job = next(item for item in objects if item["kind"] == "ConfigMap" and item["metadata"]["name"] == "muster-test")
            (home / "job.yaml").write_text(job["data"]["job.yaml"].replace("/opt/muster/share/test/tokens", f"{home}/tokens"))
            done = cluster.run("muster-test", address, name, job=home / "job.yaml")
            self.assertIn("succeeded", done)
            # What Prometheus shows is asked for, and good.
            metrics = coordinator["metrics"].removeprefix("https://")
            page = ["curl", "-sS", "--fail", "--cacert", home / "muster-scrape-tls/ca.crt", "--connect-to",
                    f"::{metrics}", "https://muster-metrics/metrics"]
            proof = ["--cert", home / "muster-scrape-tls/tls.crt", "--key", home / "muster-scrape-tls/tls.key"]
            if shutil.which("curl"):
                self.assertNotEqual(subprocess.run(page, capture_output=True).returncode, 0)
                self.assertIn("muster_coordinator_build_info", subprocess.run(page + proof, capture_output=True, text=True).stdout)

    def test_monitors_find_coordinator_and_daemons_with_the_labels_of_targets(self):
        objects = chart.render(MATRIX["monitors"])
        self.assertFalse(any(item["kind"] == "ScrapeConfig" for item in objects))
        monitors = {item["kind"]: item for item in objects if item["kind"] in ("ServiceMonitor", "PodMonitor")}
        for item in monitors.values():
            self.assertEqual(item["apiVersion"], "monitoring.coreos.com/v1")
            self.assertEqual(item["metadata"]["labels"]["release"], "prometheus")
            endpoints = item["spec"].get("endpoints") or item["spec"]["podMetricsEndpoints"]
            self.assertEqual([(e["port"], e["scheme"], e["interval"]) for e in endpoints], [("metrics", "http", "15s")])
            self.assertLessEqual(endpoints[0].keys(), ENDPOINT)
            for rule in endpoints[0]["relabelings"]:
                self.assertLessEqual(rule.keys(), RELABELING)
        chosen = monitors["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
        services = [item for item in objects if item["kind"] == "Service" and chosen <= item["metadata"]["labels"].items()]
        self.assertEqual([service["metadata"]["name"] for service in services], ["muster-coordinator"])
        self.assertIn("metrics", [port["name"] for port in services[0]["spec"]["ports"]])
        chosen = monitors["PodMonitor"]["spec"]["selector"]["matchLabels"].items()
        pods = [item["metadata"]["name"] for item, template in pod_templates(objects)
                if chosen <= template["metadata"]["labels"].items()]
        self.assertEqual(sorted(pods), ["muster-worker-cpu", "muster-worker-gpu"])
        found = {"job": "j", **{name: "x" for name in MONITOR_LABELS}, "__meta_kubernetes_pod_name": "muster-worker-0",
                 "__meta_kubernetes_pod_node_name": "node-7"}
        rules = monitors["ServiceMonitor"]["spec"]["endpoints"][0]["relabelings"]
        self.assertEqual(relabelled(found, rules), {"job": "j", "cluster": "prod", "component": "coordinator"})
        # A daemon has the name of its pod, or of its node: as --name=$(MUSTER_WORKER_NAME) says.
        rules = monitors["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["relabelings"]
        for kind, worker in (("StatefulSet", "muster-worker-0"), ("DaemonSet", "node-7")):
            self.assertEqual(relabelled({**found, "__meta_kubernetes_pod_controller_kind": kind}, rules),
                             {"job": "j", "cluster": "prod", "component": "worker", "worker": worker})
            source = next(e["valueFrom"]["fieldRef"]["fieldPath"] for item, template in pod_templates(objects)
                          if item["kind"] == kind and item["metadata"]["name"] != "muster-coordinator"
                          for e in template["spec"]["containers"][0]["env"] if e["name"] == "MUSTER_WORKER_NAME")
            self.assertEqual(source, "spec.nodeName" if kind == "DaemonSet" else "metadata.name")

    def test_monitors_speak_tls_where_metrics_do(self):
        for item in chart.render(MATRIX["monitors of metrics with tls"]):
            if item["kind"] not in ("ServiceMonitor", "PodMonitor"):
                continue
            endpoint = (item["spec"].get("endpoints") or item["spec"]["podMetricsEndpoints"])[0]
            self.assertEqual(endpoint["scheme"], "https")
            self.assertEqual(endpoint["tlsConfig"].keys(), SAFE_TLS)
            self.assertEqual(endpoint["tlsConfig"]["serverName"], "muster-metrics")
            self.assertEqual(endpoint["tlsConfig"]["ca"]["secret"], {"name": "prometheus-tls", "key": "ca.crt"})
            self.assertEqual(endpoint["tlsConfig"]["keySecret"], {"name": "prometheus-tls", "key": "tls.key"})

    def test_gpu_workers_ask_for_gpus_and_one_node_each(self):
        workload = next(item for item in chart.render(MATRIX["gpus"]) if item["kind"] == "DaemonSet")
        spec = workload["spec"]["template"]["spec"]
        container = spec["containers"][0]
        self.assertEqual(container["resources"]["limits"]["nvidia.com/gpu"], 8)
        self.assertIn("--slots=0", container["args"])
        self.assertIn("--gpus=all", container["args"])
        self.assertIn("worker-cuda", container["image"])
        self.assertIn({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, spec["tolerations"])
        self.assertTrue(spec["affinity"]["podAntiAffinity"])

    def test_false_and_zero_of_a_group_win_over_the_defaults(self):
        values = {"workerDefaults": {"hostNetwork": True}, "workers": {"cpu": {"hostNetwork": False, "replicas": 0}}}
        workload = next(item for item in chart.render(values) if item["metadata"]["name"] == "muster-worker-cpu"
                        and item["kind"] == "StatefulSet")
        self.assertEqual(workload["spec"]["replicas"], 0)
        self.assertNotIn("hostNetwork", workload["spec"]["template"]["spec"])

    def scaled(self, name):
        objects = chart.render(MATRIX[name])
        return objects, {item["metadata"]["name"]: item for item in objects if item["kind"] == "ScaledObject"}

    def test_objects_of_keda_have_its_fields_and_the_scalers(self):
        for name in ("keda", "keda with tls"):
            objects, scaled = self.scaled(name)
            sets = {item["metadata"]["name"]: item for item in objects if item["kind"] == "StatefulSet"}
            for item in scaled.values():
                self.assertEqual(item["apiVersion"], "keda.sh/v1alpha1")
                spec = item["spec"]
                self.assertLessEqual(spec.keys(), KEDA_SPEC)
                self.assertLessEqual(spec["scaleTargetRef"].keys(), KEDA_TARGET)
                self.assertEqual(spec["scaleTargetRef"]["kind"], "StatefulSet")
                self.assertLess(spec["minReplicaCount"], spec["maxReplicaCount"])
                target = sets[spec["scaleTargetRef"]["name"]]
                # KEDA scales it, and an upgrade of the release must not.
                self.assertNotIn("replicas", target["spec"])
                flags = target["spec"]["template"]["spec"]["containers"][0]["args"]
                self.assertIn(f"--coordinator={spec['triggers'][0]['metadata']['scalerAddress']}", flags)
                for trigger in spec["triggers"]:
                    self.assertLessEqual(trigger.keys(), KEDA_TRIGGER)
                    self.assertEqual((trigger["type"], trigger["metricType"]), ("external", "AverageValue"))
                    metadata = dict(trigger["metadata"])
                    self.assertEqual(metadata.pop("scalerAddress"), "muster-coordinator.muster.svc:7600")
                    self.assertEqual(metadata.keys(), SCALER_METADATA)
                    self.assertTrue(all(isinstance(value, str) for value in metadata.values()))
                    self.assertEqual(metadata["workers"], target["metadata"]["name"])
                    self.assertEqual(metadata["maxWorkers"], str(spec["maxReplicaCount"]))
                # The autoscaler that KEDA makes of it.
                for version in VERSIONS:
                    kubernetes_validate.validate({
                        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "keda"},
                        "spec": {"scaleTargetRef": spec["scaleTargetRef"], "minReplicas": max(1, spec["minReplicaCount"]),
                                 "maxReplicas": spec["maxReplicaCount"],
                                 **spec["advanced"]["horizontalPodAutoscalerConfig"]}}, version, strict=True)
        _, scaled = self.scaled("keda")
        self.assertEqual(scaled.keys(), {"muster-worker-cpu", "muster-worker-gpu", "muster-worker-both"})
        bounds = {name: (item["spec"]["minReplicaCount"], item["spec"]["maxReplicaCount"]) for name, item in scaled.items()}
        self.assertEqual(bounds, {"muster-worker-cpu": (0, 4), "muster-worker-gpu": (1, 16), "muster-worker-both": (0, 4)})
        devices = {name: [(t["metadata"]["device"], t["metadata"]["devicesPerWorker"]) for t in item["spec"]["triggers"]]
                   for name, item in scaled.items()}
        self.assertEqual(devices, {"muster-worker-cpu": [("cpu", "2")], "muster-worker-gpu": [("cuda", "8")],
                                   "muster-worker-both": [("cpu", "3"), ("cuda", "2")]})
        self.assertEqual(scaled["muster-worker-gpu"]["spec"]["fallback"], {"failureThreshold": 3, "replicas": 2})

    def test_keda_shows_a_certificate_where_the_coordinator_asks_for_one(self):
        objects, scaled = self.scaled("keda with tls")
        proof = next(item for item in objects if item["kind"] == "TriggerAuthentication")
        refs = {ref["parameter"]: (ref["name"], ref["key"]) for ref in proof["spec"]["secretTargetRef"]}
        self.assertEqual(refs, {"caCert": ("keda-tls", "ca.crt"), "tlsClientCert": ("keda-tls", "tls.crt"),
                                "tlsClientKey": ("keda-tls", "tls.key")})
        self.assertEqual(refs.keys(), KEDA_SECRET_PARAMETERS)
        for item in scaled.values():
            self.assertEqual([t["authenticationRef"]["name"] for t in item["spec"]["triggers"]], [proof["metadata"]["name"]])
        self.assertFalse(any("authenticationRef" in trigger for item in self.scaled("keda")[1].values()
                             for trigger in item["spec"]["triggers"]))

    def test_the_coordinator_dials_nobody_but_who_is_named(self):
        for name, ports in (("defaults", []), ("everything", [53, 53, 4318]), ("traces", [53, 53, 4318]),
                            ("traces without tls to any place", [53, 53, 4318])):
            policy = next(item for item in chart.render(MATRIX[name])
                          if item["kind"] == "NetworkPolicy" and item["metadata"]["name"] == "muster-coordinator")
            self.assertEqual([port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]], ports)

    def test_traces_go_to_the_collector_whose_authority_is_mounted(self):
        for name, flags in (("defaults", []), ("traces without tls to any place", ["--otlp-endpoint=http://[fd00::7]:4318"]),
                            ("traces", ["--otlp-endpoint=https://otel-collector.monitoring.svc:4318",
                                        "--otlp-ca=/etc/muster/tracing/ca.crt"])):
            spec = next(template["spec"] for item, template in pod_templates(chart.render(MATRIX[name]))
                        if item["metadata"]["name"] == "muster-coordinator")
            container = spec["containers"][0]
            self.assertEqual([a for a in container["args"] if a.startswith("--otlp")], flags)
            mounts = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tracing"]
            volumes = [v["secret"] for v in spec["volumes"] if v["name"] == "tracing"]
            self.assertEqual(mounts, ["/etc/muster/tracing"] if name == "traces" else [])
            self.assertEqual([(v["secretName"], [i["key"] for i in v["items"]]) for v in volumes],
                             [("otel-ca", ["ca.crt"])] if name == "traces" else [])

    def test_keda_is_there_and_let_in_only_where_it_is_enabled(self):
        for name, values, objects in self.each():
            enabled = values.get("keda", {}).get("enabled", False)
            self.assertEqual(any(item["kind"] == "ScaledObject" for item in objects), enabled, name)
            if not values.get("networkPolicy", {}).get("enabled", True):
                continue
            policy = next(item for item in objects if item["kind"] == "NetworkPolicy" and "coordinator" in item["metadata"]["name"])
            callers = policy["spec"]["ingress"][0]["from"]
            self.assertEqual({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}} in callers, enabled)

    def test_patches_have_the_last_word(self):
        objects = chart.render(MATRIX["everything"])
        coordinator = next(item for item in objects if item["kind"] == "StatefulSet" and "coordinator" in
                           item["metadata"]["name"])
        self.assertEqual(coordinator["spec"]["template"]["spec"]["hostname"], "head")

    def test_values_that_would_become_something_else_are_refused_by_name(self):
        for values, named in (({"clusterId": "a b"}, "clusterId"),
                              ({"monitoring": {"scrape": {"enabled": True, "kind": "Monitors"}}}, "clusterId"),
                              ({"monitoring": {"scrape": {"kind": "PodMonitor"}}}, "kind"),
                              ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
                              ({"tls": {"certManager": {"duration": "90d"}}}, "duration"),
                              ({"test": {"clientSecret": "c"}}, "test.clientSecret"),
                              ({"tracing": {"endpoint": "collector:4318"}}, "endpoint"),
                              ({"tracing": {"endpoint": "http://collector:4318", "caSecret": "ca"}}, "tracing.caSecret"),
                              ({"tls": {"metricsSecret": "m", "metricsClients": True},
                                "monitoring": {"scrape": {"enabled": True}}}, "monitoring.scrape.tlsSecret"), ({"coordinator": {"extraArgs": ["a b"]}}, "extraArgs"),
                              ({"workers": {"cpu": {"env": {"A-B": "x"}}}}, "A-B"), ({"wrong": 1}, "wrong"),
                              ({"workers": {"cpu": {"rankPorts": "any; rm"}}}, "rankPorts"),
                              ({"image": {"tag": "$(id)"}}, "tag"), ({"workers": {"cpu": {"replicas": "2"}}}, "replicas"),
                              ({"workers": {"cpu": {"allowPaths": ["/a b"]}}}, "allowPaths"),
                              ({"workers": {"cpu": {"secrets": {"secretName": "s", "items": [
                                  {"key": "k", "path": "../k"}]}}}}, "path"),
                              ({"workers": {"cpu": {"slots": 0}}}, "slots and gpus"),
                              ({"keda": {"scalerAddress": "muster"}}, "scalerAddress"),
                              ({"keda": {"enabled": True}, "tls": MATRIX["tls"]["tls"]}, "keda.secret"),
                              ({"keda": {"enabled": True, "secret": "s"}}, "keda.secret"),
                              ({"keda": {"enabled": True}, "workers": {"cpu": {"scale": {"minReplicas": 11}}}},
                               "workers.cpu.scale"),
                              ({"workers": {"cpu": {"kind": "DaemonSet", "state": {"type": "claim"}}}}, "state.type")):
            with self.assertRaises(helm_python.HelmError) as caught:
                chart.render(values)
            self.assertIn(named, str(caught.exception))

    def test_rules_of_the_chart_are_those_of_deploy_prometheus(self):
        rules = next(item for item in chart.render(MATRIX["monitoring"]) if item["kind"] == "PrometheusRule")
        text = json.dumps(rules)
        for name in re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text()):
            self.assertIn(f'"alert": "{name}"', text)
            self.assertIn(f"https://runbooks.example.org/{name}.md", text)

    def test_plain_manifest_is_that_of_the_chart(self):
        written = (ROOT / "deploy/kubernetes/muster.yaml").read_text()
        self.assertEqual(written, chart.plain(), "run ./dev manifest")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
