"""Tools read the files in deploy/, and replicas restart behind real balancers while requests run.

`make test-all` installs what PyPI has; nginx and prometheus are packages of Debian, dclint is one of npm.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import httpx
import pytest
import yaml

from benchmarks.balanced import find_program, nginx_conf
from benchmarks.soak import CHAT
from blockdraft.machine.machine import free_port
from tests.deploy.test_deploy import ALERTS, BOARD, DEPLOY, QUERIES, REPLICAS, ROOT
from tests.server.test_life import HELLO, MODEL, PAIR, running, wait_for

pytestmark = pytest.mark.slow
COMPOSE_FILES = [("compose",), ("compose", "cuda"), ("compose", "router")]


def tool(name):
    return shutil.which(name) or pytest.skip(f"{name} is not on PATH")


def check(*words, **options):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def for_prometheus(query):
    """A panel's query with what Grafana puts into it."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".*")


# ---- Kubernetes, compose, systemd, Grafana


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
def test_kubernetes_knows_every_field(path):
    validator = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(path.read_text()):
        if "kind" in document:  # else these are values of a chart
            validator.validate(document, validator.latest_version(), strict=True)


def test_compose_knows_every_field():
    done = subprocess.run(
        [tool("dclint"), "--formatter", "json", *map(str, (DEPLOY / "compose").glob("*.yaml"))],
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert len(found) == 3
    assert not [m["message"] for file in found for m in file["messages"] if m["rule"] == "invalid-schema"]


@pytest.mark.parametrize("names", COMPOSE_FILES, ids="+".join)
def test_docker_compose_merges_the_files(names):
    if subprocess.run([tool("docker"), "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker has no compose here")
    files = [word for name in names for word in ("-f", DEPLOY / f"compose/{name}.yaml")]
    merged = yaml.safe_load(check("docker", "compose", *files, "config").stdout)["services"]
    assert merged.keys() == {"proxy", "replica-1", "replica-2"}


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").iterdir()), ids=lambda path: path.stem)
def test_systemd_takes_the_unit(path, tmp_path):
    here = re.sub(r"^(ExecStart=)\S+", rf"\g<1>{sys.executable}", path.read_text(), flags=re.M)
    (tmp_path / path.name).write_text(here)
    done = check(tool("systemd-analyze"), "verify", "--man=no", tmp_path / path.name)
    assert path.name.partition(".")[0].rstrip("@") not in done.stderr  # warnings name the unit


def test_grafana_knows_every_field_of_the_board():
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    kept = json.loads(encoder.JSONEncoder().encode(dashboard.Dashboard.from_json(BOARD)))
    assert contained(BOARD, kept)


def contained(asked, kept):
    """Whether everything that was asked for is there; other fields may have defaults."""
    if isinstance(asked, dict):
        return all(name in kept and contained(value, kept[name]) for name, value in asked.items())
    if isinstance(asked, list):
        return len(asked) == len(kept) and all(map(contained, asked, kept))
    return asked == kept


# ---- Prometheus


def test_promtool_takes_the_rules_and_each_alert_fires_on_what_it_is_for(tmp_path):
    promtool = tool("promtool")
    check(promtool, "check", "config", DEPLOY / "monitoring/prometheus.yml")
    shutil.copy(DEPLOY / "monitoring/alerts.yml", tmp_path)
    shutil.copy(ROOT / "tests/deploy/alerts_test.yml", tmp_path)
    check(promtool, "test", "rules", "alerts_test.yml", cwd=tmp_path)


@contextlib.contextmanager
def prometheus(folder, target):
    """Prometheus with our configuration, one replica and an interval of a second; yields its address."""
    program = tool("prometheus")
    text = (DEPLOY / "monitoring/prometheus.yml").read_text()
    text = text.replace(REPLICAS[0], target).replace(f', "{REPLICAS[1]}"', "").replace(": 10s", ": 1s")
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "monitoring/alerts.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command.append(f"--web.listen-address={address}")
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def test_prometheus_finds_values_for_every_panel_and_no_reason_for_an_alert(tmp_path):
    def values(url, query):
        answer = httpx.get(f"{url}/api/v1/query", params={"query": for_prometheus(query)}).json()
        assert answer["status"] == "success", answer
        return [float(one["value"][1]) for one in answer["data"]["result"]]

    draft = str(PAIR / "draft")
    with running(*MODEL, "--draft", draft, "--no-verify") as server:
        url = server.ready()
        with prometheus(tmp_path, url.removeprefix("http://")) as scraper:

            def is_scraped():
                with contextlib.suppress(httpx.TransportError):
                    return values(scraper, 'up{job="blockdraft"}') == [1.0]

            def has_all_panels():
                """Rates need two samples, between which something has happened."""
                httpx.post(url + CHAT, json=HELLO | {"max_tokens": 50}, timeout=60).raise_for_status()
                empty.clear()
                empty.extend(name for name in panels if not values(scraper, QUERIES[name]))
                return not empty

            wait_for(is_scraped, "the server is not scraped")
            # The speed-up is known once plain steps were timed, too.
            panels = [
                n for n, q in QUERIES.items() if n.startswith("panel") and "speculation_speedup" not in q
            ]
            empty = []
            wait_for(has_all_panels, empty)
            assert not [rule["alert"] for rule in ALERTS if values(scraper, rule["expr"])]
            assert values(scraper, "sum(vllm:request_success_total)")[0] > 1


# ---- balancers


def test_nginx_takes_the_configuration(tmp_path):
    program = find_program("nginx") or pytest.skip("nginx is not installed")
    ports = [int(address.rpartition(":")[2]) for address in REPLICAS]
    (tmp_path / "nginx.conf").write_text(nginx_conf(tmp_path, free_port(), ports))
    check(program, "-t", "-p", tmp_path, "-e", "stderr", "-c", tmp_path / "nginx.conf")


def test_caddy_takes_the_configuration(tmp_path):
    words = ("--adapter", "caddyfile", "--config", DEPLOY / "Caddyfile")
    check(tool("caddy"), "validate", *words, env={"HOME": str(tmp_path)})


@pytest.mark.parametrize("balancer", ["nginx", "router"])
def test_no_request_fails_while_replicas_restart_one_after_the_other(balancer, tmp_path):
    if find_program(balancer) is None:
        pytest.skip(f"{balancer} is not installed")
    flags = ["--draft", str(PAIR / "draft"), *MODEL[1:], "--max-num-seqs", "4"]
    words = ["-m", "benchmarks.rolling", "--balancer", balancer, "--json", tmp_path / "result.json"]
    check(sys.executable, *words, "--", MODEL[0], *flags, cwd=ROOT)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failed"] == 0
    assert result["requests"] > 100
    assert result["exit_codes"] == [[0], [0]]
    if balancer == "nginx":  # otherwise the restart was not noticed
        assert result["repeated_by_nginx"] > 0
