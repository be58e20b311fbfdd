"""The files of examples/deploy are accepted by the programs that read them, and name what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client.core import CollectorRegistry

from polar_proxy.api.service import ServiceCollector
from polar_proxy.cli.app import make_command
from polar_proxy.config import Settings
from polar_proxy.gateway.metrics import GatewayMetrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"


class CountedService:
    """A rollout service with one stage."""

    def counts(self) -> dict[str, Any]:
        names = ("inside", "waiting", "limit", "entered", "waited_seconds")
        stage = {**dict.fromkeys(names, 1), "refusals": {"engine": 1}}
        pool = dict.fromkeys(("waiting", "size", "hits", "misses", "dead", "waited_seconds"), 1)
        return {"in_flight": 1, "stages": {"running": stage}, "pool": pool}


def metrics_and_labels() -> dict[str, set[str]]:
    """Return the labels of each metric that a server exports."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(CountedService(), lambda: {"open": 1}))  # type: ignore[arg-type]
    gateway = GatewayMetrics()
    gateway.calls.labels("openai_chat", "ok").inc()
    gateway.refused.labels("400").inc()
    gateway.duration.observe(1)
    found: dict[str, set[str]] = {}
    for family in (*gateway.registry.collect(), *registry.collect()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_expression_of_the_dashboard_uses_existing_metrics_and_labels() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    known = metrics_and_labels()
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used: set[str] = set()
    for expression in expressions:
        names = set(re.findall(r"\bpolar_\w+", expression))
        assert names <= known.keys(), expression
        labels = {one.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for one in group.split(",")}
        assert labels <= set().union(*(known[name] for name in names)), expression
        used |= names
    exported = {name for name in known if not name.endswith(("_created", "_count", "_sum"))}
    assert exported - used == set(), "metrics without a panel"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="apt-get install systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "polar"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "polar.service"
    unit.write_text((DEPLOY / "polar.service").read_text().replace("/opt/polar/bin/polar", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "polar.service" in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="apt-get install nginx-light")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="apt-get install openssl")
def test_nginx_accepts_the_configuration(tmp_path: Path) -> None:
    key, certificate = tmp_path / "privkey.pem", tmp_path / "fullchain.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=polar.example.org", "-days", "1"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    site = tmp_path / "polar.conf"
    site.write_text((DEPLOY / "nginx.conf").read_text().replace("/etc/polar/tls", str(tmp_path)))
    main = tmp_path / "nginx.conf"
    main.write_text(f"pid {tmp_path}/nginx.pid;\nerror_log stderr;\nevents {{}}\nhttp {{ include {site}; }}\n")
    done = subprocess.run(["nginx", "-t", "-p", str(tmp_path), "-c", str(main)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def documents() -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one]


def test_names_of_the_kubernetes_manifest_fit_together() -> None:
    found = {(one["kind"], one["metadata"]["name"]): one for one in documents()}
    services = {name: one["spec"] for (kind, name), one in found.items() if kind == "Service"}
    workloads = [one for (kind, _), one in found.items() if kind in ("Deployment", "StatefulSet")]
    assert {one["metadata"]["name"] for one in workloads} == {"polar-gateway", "polar-worker", "postgres", "vllm"}
    for one in workloads:
        template = one["spec"]["template"]
        assert one["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        (container,) = template["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        probes = [container[name] for name in container if name.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes
        for source in container.get("envFrom", ()):
            assert ("ConfigMap", source["configMapRef"]["name"]) in found
    for spec in services.values():
        (target,) = [one for one in workloads if one["spec"]["template"]["metadata"]["labels"] == spec["selector"]]
        (container,) = target["spec"]["template"]["spec"]["containers"]
        assert {port["targetPort"] for port in spec["ports"]} <= {port["name"] for port in container["ports"]}
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert {"postgres", "vllm"} <= services.keys()
    assert "@postgres/polar" in text
    assert "http://vllm:8000" in text


def polar_arguments() -> Iterator[list[str]]:
    for one in documents():
        for container in one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            if container["image"].startswith("polar"):
                yield container["args"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    yield compose["services"]["polar"]["command"]
    unit = re.search(r"^ExecStart=\S+ (.*)$", (DEPLOY / "polar.service").read_text(), re.M)
    assert unit is not None
    yield unit[1].split()


@pytest.mark.parametrize("arguments", list(polar_arguments()), ids=" ".join)
def test_commands_have_existing_options(arguments: list[str]) -> None:
    verb, *rest = arguments
    command = make_command(verb)
    context: typer.Context = command.make_context(verb, rest, resilient_parsing=False)
    assert context.params


def test_environment_variables_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = [one for one in documents() if one["kind"] == "ConfigMap"]
    for name, value in config["data"].items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.engine.kind, settings.gateway.shared, settings.log.format) == ("vllm", True, "json")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    names = {*compose["services"]["polar"]["environment"], *config["data"]}
    fields = {f"POLAR_{name.upper()}" for name in Settings.model_fields}
    assert {name.partition("__")[0] for name in names} <= fields


def test_compose_services_and_volumes_fit_together() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert services["polar"]["depends_on"].keys() <= services.keys()
    used = {volume.partition(":")[0] for one in services.values() for volume in one["volumes"]}
    assert used == compose["volumes"].keys()
    assert all("healthcheck" in one for one in services.values())
