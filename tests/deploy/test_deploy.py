"""The files in deploy/ agree with the server and with each other; test_tools.py asks the tools for them."""

import functools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.balanced import NGINX, REPLICAS, ROUTER
from blockdraft.cli.container import serve_words
from blockdraft.cli.main import parse
from blockdraft.engine.stats import Load, Stats
from blockdraft.launch import container
from blockdraft.server.app import make_api
from blockdraft.server.http.lifetime import FLUSH_S
from blockdraft.server.options import ServerOptions
from blockdraft.server.page.metrics import render
from tests.server.test_metrics import Info

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OPTIONS = ServerOptions()
UNIT = (DEPLOY / "systemd/blockdraft@.service").read_text()
OF_A_SCRAPER = {"instance", "job", "namespace", "pod", "le"}


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def kinds(name):
    return {one["kind"]: one for one in documents(name)}


COMPOSE, CUDA, WITH_ROUTER = (
    documents(f"compose/{name}.yaml")[0]["services"] for name in ("compose", "cuda", "router")
)
CLUSTER, ROUTER_CLUSTER = kinds("kubernetes/blockdraft.yaml"), kinds("kubernetes/router.yaml")
POD = CLUSTER["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
ALERTS = [rule for group in documents("monitoring/alerts.yml")[0]["groups"] for rule in group["rules"]]
BOARD = json.loads((DEPLOY / "monitoring/grafana.json").read_text())
(ADAPTED,) = documents("kubernetes/prometheus-adapter.yaml")[0]["rules"]["custom"]
QUERIES = {
    **{f"panel {p['id']}{t['refId']}": t["expr"] for p in BOARD["panels"] for t in p["targets"]},
    **{rule["alert"]: rule["expr"] for rule in ALERTS},
    "autoscaler": ADAPTED["seriesQuery"],
}


def command_of(unit):
    (line,) = re.findall(r"^ExecStart=(.+)$", unit.replace("\\\n", " "), re.M)
    return shlex.split(line)


def seconds(text):
    return int(re.fullmatch(r"(\d+)s?", str(text))[1])


# ---- metrics


@functools.cache
def labels_by_metric():
    """Every sample of /metrics with the names of its labels, of an engine that has answered with drafts."""
    snapshot = replace(Stats().snapshot(Load()), accepted=(1,), speedup=1.0)
    start = {"state": "ready", "phases": [{"name": "load", "seconds": 1.0}]}
    families = text_string_to_metric_families(render([snapshot], Info(), "m", start)[0].decode())
    return {sample.name: {*sample.labels} for family in families for sample in family.samples}


@pytest.mark.parametrize("name", QUERIES)
def test_boards_alerts_and_autoscaler_read_metrics_and_labels_that_exist(name):
    query, known = QUERIES[name], labels_by_metric()
    metrics = set(re.findall(r"\b(?:vllm|blockdraft):\w+", query))
    assert metrics or name == "BlockdraftDown"
    assert metrics <= known.keys()
    groups = ", ".join(re.findall(r"\bby \(([^)]*)\)", query))
    asked = {*re.findall(r"\w+", groups), *re.findall(r"[{,]\s*(\w+)\s*[=!]", query)}
    has = {"job"} if name == "BlockdraftDown" else set[str]().union(*(known[metric] for metric in metrics))
    assert asked <= has | OF_A_SCRAPER


def test_every_alert_is_tested_both_ways():
    tests = documents("../tests/deploy/alerts_test.yml")[0]["tests"]
    quiet, loud = ({one["alertname"]: one for one in test["alert_rule_test"]} for test in tests)
    assert quiet.keys() == loud.keys() == {rule["alert"] for rule in ALERTS}
    assert not any("exp_alerts" in one for one in quiet.values())
    assert all(one["exp_alerts"] for one in loud.values())


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_names():
    (metric,) = CLUSTER["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == ADAPTED["name"]["as"]


# ---- what starts the server


def test_flags_and_variables_are_those_of_the_server():
    _, *words = command_of(UNIT.replace("%i", "1"))
    assert parse(words).drain_timeout == 300
    for words, environment in (
        (SERVER["args"], {one["name"]: one.get("value", "k") for one in SERVER["env"]}),
        (COMPOSE["replica-1"]["command"], COMPOSE["replica-1"]["environment"]),
    ):
        given = {name: value or "k" for name, value in environment.items() if name != "HF_HOME"}
        assert given.keys() <= set(container.VARIABLES)
        assert parse(serve_words(container.read_container(given), words)[0]).drain_timeout == 300


def test_nobody_is_killed_while_its_answers_may_still_end():
    """The time to end is longer than what comes before SIGTERM, --drain-timeout, and sending the rest."""
    needed = 300 + FLUSH_S
    (sleep,) = (int(word) for word in SERVER["lifecycle"]["preStop"]["exec"]["command"] if word.isdecimal())
    assert POD["terminationGracePeriodSeconds"] > needed + sleep
    units = (UNIT, ROUTER.read_text())
    assert all(int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1]) > needed for unit in units)
    assert all(seconds(one["stop_grace_period"]) > needed for one in COMPOSE.values())
    assert "KillMode=mixed" in UNIT


def test_probes_ask_for_paths_of_the_server_and_the_right_ones():
    paths = {route.path for route in make_api(object(), name="m").routes}
    probes = {name: SERVER[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")}
    assert probes == {"liveness": "/live", "readiness": "/ready"}
    assert set(probes.values()) <= paths


def test_selectors_find_the_pods():
    for cluster, name in ((CLUSTER, "blockdraft"), (ROUTER_CLUSTER, "blockdraft-router")):
        labels = cluster["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert labels == {"app.kubernetes.io/name": name}
        assert labels == cluster["Deployment"]["spec"]["selector"]["matchLabels"]
        assert labels == cluster["Service"]["spec"]["selector"]
    assert CLUSTER["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "blockdraft"
    }
    assert CLUSTER["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "blockdraft"


# ---- the balancers


def test_every_file_has_the_same_replicas():
    ports = {int(address.rpartition(":")[2]) for address in REPLICAS}
    assert {int(one["environment"]["PORT"]) for name, one in COMPOSE.items() if name != "proxy"} == ports
    assert set(re.findall(r"^ +server (\S+) max_fails=0;$", NGINX.read_text(), re.M)) == set(REPLICAS)
    assert {f"http://{address}" for address in REPLICAS} <= set(command_of(ROUTER.read_text()))
    (job,) = documents("monitoring/prometheus.yml")[0]["scrape_configs"]
    assert job["static_configs"] == [{"targets": list(REPLICAS)}]
    assert CUDA.keys() == COMPOSE.keys() - {"proxy"}
    assert all(one["network_mode"] == "service:proxy" for name, one in COMPOSE.items() if name != "proxy")


def test_nginx_fits_the_limits_of_the_server():
    conf = NGINX.read_text()

    def number(name):
        return int(re.search(rf"^ +{name} (\d+)[sm]?;", conf, re.M)[1])

    assert number("client_max_body_size") << 20 == OPTIONS.max_body_bytes
    assert number("proxy_read_timeout") > OPTIONS.request_timeout_s
    assert number("keepalive_timeout") < OPTIONS.keep_alive_s
    assert number("proxy_next_upstream_tries") == len(REPLICAS)


def test_the_router_has_the_same_flags_everywhere():
    """All but the addresses, and how it finds the replicas."""
    unit = command_of(ROUTER.read_text())
    assert unit[1] == "launch"
    (pod,) = ROUTER_CLUSTER["Deployment"]["spec"]["template"]["spec"]["containers"]

    def flags(words):
        text = " ".join(map(str, words))
        found = dict(re.findall(r"--([\w-]+)((?: (?!--)\S+)*)", text))
        own = ("host", "worker-urls", "prometheus-host")
        return {n: v for n, v in found.items() if n not in own and not re.match("service-disc|selector", n)}

    assert flags(unit[2:]) == flags(WITH_ROUTER["proxy"]["command"]) == flags(pod["args"])
    assert int(flags(unit)["max-payload-size"]) == OPTIONS.max_body_bytes
    assert int(flags(unit)["request-timeout-secs"]) > OPTIONS.request_timeout_s
    versions = re.findall(r"sglang-router==([\d.]+)", ROUTER.read_text() + str(WITH_ROUTER))
    assert f"sglang-router=={versions[0]}\n" in (ROOT / "constraints.txt").read_text()
    assert len(versions) == 2
    assert len(set(versions)) == 1
