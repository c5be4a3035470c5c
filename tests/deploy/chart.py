"""Renders and checks the chart deploy/helm/muster with Helm's own library. Runs under a Python that has
helm-python-sdk and kubernetes-validate (tests/deploy/requirements.txt)."""

import argparse
import pathlib
import sys

import helm_python
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/muster"
KIND_ORDER = ["ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap", "Service", "StatefulSet", "DaemonSet"]


def render(values=None, name="muster", namespace="muster", upgrade=False):
    """The objects, in the order of the templates; NOTES.txt is left out."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values or {})
        texts = chart.render(values or {}, name=name, namespace=namespace, is_install=not upgrade, is_upgrade=upgrade)
    objects = []
    for path in sorted(texts):
        if not path.endswith(".txt"):
            objects += [item for item in yaml.safe_load_all(texts[path]) if item]
    return objects


def plain(values=None, hooks=False):
    """One manifest for `kubectl apply`, without what only Helm runs."""
    objects = [item for item in render(values) if hooks or not is_hook(item)]
    for item in objects:
        labels = [item["metadata"]["labels"]]
        labels[0].pop("helm.sh/chart", None)
        labels[0]["app.kubernetes.io/managed-by"] = "kubectl"
    objects.sort(key=lambda item: KIND_ORDER.index(item["kind"]) if item["kind"] in KIND_ORDER else 99)
    return "# Written by `./dev manifest` from deploy/helm/muster with its default values, for clusters without Helm:\n" \
           "#   kubectl create namespace muster && kubectl apply -f deploy/kubernetes/muster.yaml\n" + \
           "".join("---\n" + yaml.safe_dump(item, sort_keys=True, default_flow_style=False, width=110)
                   for item in objects)


def is_hook(item):
    return "helm.sh/hook" in item["metadata"].get("annotations", {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", help="YAML file of values")
    parser.add_argument("--hooks", action="store_true", help="with the objects of `helm test`")
    options = parser.parse_args()
    sys.stdout.write(plain(yaml.safe_load(open(options.values)) if options.values else None, options.hooks))
