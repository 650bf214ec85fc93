"""What tells of metrics names those that there are: docker/METRICS.md and the dashboard, each all of them."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tritone.metrics import FAMILIES

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "tritone.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
BY_NAME = {family.name: family for family in FAMILIES}
SERIES = {
    **{name: family for name, family in BY_NAME.items() if not family.buckets},
    **{f"{name}_{part}": family for name, family in BY_NAME.items() for part in ("bucket", "sum", "count")
       if family.buckets},
}  # fmt: skip


def families_of(expression):
    return [SERIES[name] for name in re.findall(r"\btritone_\w+", expression)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_panel_asks_for_families_that_exist_by_labels_that_they_have(expression):
    families = families_of(expression)
    assert families
    for family, condition in zip(families, re.findall(r"tritone_\w+\{([^}]*)\}", expression), strict=True):
        assert set(re.findall(r"(\w+)=", condition)) <= set(family.labels), family.name
    for words in re.findall(r"\bby \(([^)]*)\)", expression):
        for label in set(words.replace(" ", "").split(",")) - {"le"}:
            assert all(label in family.labels for family in families), label
    if any(family.kind == "COUNTER" for family in families):
        assert "rate(" in expression or "increase(" in expression


def test_the_dashboard_shows_every_family():
    shown = {family for expression in EXPRESSIONS for family in families_of(expression)}
    assert {family.name for family in FAMILIES} == {family.name for family in shown}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_has_a_title_a_unit_and_a_legend(panel):
    assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
    assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_overlap():
    places = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places)) and max(x for x, _ in places) < 24


def test_grafana_finds_its_datasource_and_the_dashboard():
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    port = compose["prometheus"]["ports"][0].rpartition(":")[2]
    assert source["url"] == f"http://prometheus:{port}"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tritone.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert all((DOCKER / place).exists() for place in mounts)


def test_prometheus_scrapes_the_service_of_compose():
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    service, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert any(published.endswith(f":{port}") for published in compose[service]["ports"])


def test_the_page_lists_every_family_with_its_kind():
    page = (DOCKER / "METRICS.md").read_text()
    rows = [row.split("|")[1:5] for row in page.splitlines() if row.startswith("| `tritone_")]
    listed = {name: (kind.strip(), labels.strip()) for names, kind, labels, _ in rows
              for name in re.findall(r"`(tritone_\w+)`", names)}  # fmt: skip
    assert listed.keys() == BY_NAME.keys()
    before = ""
    for name, (kind, labels) in listed.items():
        labels = before if labels == "the same" else labels
        before = labels
        assert kind == BY_NAME[name].kind.lower() and labels == ", ".join(BY_NAME[name].labels), name
