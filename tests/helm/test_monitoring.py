"""Alerts and the dashboard speak of metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from tests.helm.chart import PRESETS, ROOT, Helm, one

pytestmark = [pytest.mark.helm, pytest.mark.slow]

METRIC = re.compile(r"\bvllm_extproc_[a-z_]+\b")
DOCUMENTED = set(METRIC.findall((ROOT / "docs" / "interface.md").read_text()))
TEMPLATED = re.compile(r"\$__rate_interval|\$(namespace|pod)\b")


@pytest.fixture
def rules(helm: Helm):
    return one(helm.render(*PRESETS["everything"]), "PrometheusRule")["spec"]


@pytest.fixture
def questions(helm: Helm):
    """Every PromQL expression of the dashboard."""
    data = one(helm.render(*PRESETS["everything"]), "ConfigMap", "-dashboard")["data"]
    panels = json.loads(data["vllm-extproc.json"])["panels"]
    return [t["expr"] for panel in panels for t in panel.get("targets", [])]


@pytest.fixture
def promtool():
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not on PATH; it comes with Prometheus")
    return path


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def metrics_of(expressions):
    return {
        re.sub("_(bucket|sum|count)$", "", name)
        for expression in expressions
        for name in METRIC.findall(expression)
    }


def test_alerts_speak_of_documented_metrics(rules):
    """Each alert of at least one."""
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]

    assert all(METRIC.search(expression) for expression in expressions)
    assert metrics_of(expressions) <= DOCUMENTED


def test_alerts_of_the_sidecar_need_no_envoy(helm: Helm):
    """The gateway's Envoy takes no configuration from here."""
    found = helm.render("--set", "mode=sidecar-only,prometheusRule.enabled=true")

    names = {r["alert"] for g in one(found, "PrometheusRule")["spec"]["groups"] for r in g["rules"]}
    assert "VllmExtprocNoWorkers" in names
    assert "VllmExtprocEnvoyGone" not in names


def test_dashboard_speaks_of_documented_metrics(questions):
    """And of most of them."""
    assert metrics_of(questions) <= DOCUMENTED
    assert len(metrics_of(questions)) > 15


def test_alerts_are_valid(rules, promtool, tmp_path):
    """By Prometheus' own judgement."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rules))

    done = run(promtool, "check", "rules", str(path))

    assert done.returncode == 0, done.stdout + done.stderr


def test_questions_of_the_dashboard_are_valid(questions, promtool, tmp_path):
    """As rules, with Grafana's variables filled in."""
    path = tmp_path / "rules.yaml"
    group = {
        "name": "dashboard",
        "rules": [
            {"record": f"panel:{index}", "expr": TEMPLATED.sub("5m", question)}
            for index, question in enumerate(questions)
        ],
    }
    path.write_text(yaml.safe_dump({"groups": [group]}))

    done = run(promtool, "check", "rules", str(path))

    assert done.returncode == 0, done.stdout + done.stderr


RULE_TESTS = """
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'vllm_extproc_workers{namespace="fleet",pod="router-vllm-extproc-1-a",pool="m"}'
        values: '2x3 0x10'
      - series: 'vllm_extproc_requests_total{namespace="fleet",pod="router-vllm-extproc-1-a",code="200"}'
        values: '0+90x20'
      - series: 'vllm_extproc_requests_total{namespace="fleet",pod="router-vllm-extproc-1-a",code="503"}'
        values: '0+10x20'
      - series: 'vllm_extproc_requests_total{namespace="other",pod="router-vllm-extproc-1-a",code="200"}'
        values: '0+9000x20'
    alert_rule_test:
      - eval_time: 5m
        alertname: VllmExtprocNoWorkers
      - eval_time: 7m
        alertname: VllmExtprocNoWorkers
        exp_alerts:
          - exp_labels: {severity: critical, namespace: fleet, pool: m}
            exp_annotations:
              summary: No worker may be picked.
              description: Pool m has had no worker for 2 minutes; its requests are refused.
      - eval_time: 12m
        alertname: VllmExtprocErrors
        exp_alerts:
          - exp_labels: {severity: critical, namespace: fleet}
            exp_annotations:
              summary: Many requests fail.
              description: 10% of the answers are 5xx.
      - eval_time: 12m
        alertname: VllmExtprocAbsent
"""


def test_alerts_fire_when_they_should(rules, promtool, tmp_path):
    """No worker for two minutes; a tenth of the answers 5xx, whatever another namespace does."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "tests.yaml").write_text(RULE_TESTS)

    done = run(promtool, "test", "rules", str(tmp_path / "tests.yaml"))

    assert done.returncode == 0, done.stdout + done.stderr
