"""Requests through `blockdraft serve --engine vllm`: a real server, over a stand-in for vLLM."""

import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.server.proxied import CHAT, HELLO, KEY, MODEL, STREAM, events, running, texts
from tests.server.test_life import PAIR, wait_for


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with a drafter, a key, and one origin of other pages."""
    folder = tmp_path_factory.mktemp("served")
    flags = ["--draft", str(PAIR / "draft"), "--served-model-name", "m", "--engine-log", str(folder / "log")]
    flags += ["--cors-origin", "https://chat.example.com", "--json"]
    with running(folder, *flags, environment={"BLOCKDRAFT_API_KEY": KEY}) as server:
        server.folder = folder
        server.address = server.url()
        yield server


@pytest.fixture
def client(served):
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=served.address, headers=headers, timeout=30) as client:
        yield client


# ---- the start


def test_the_start_goes_through_the_phases_of_the_engines_log(served, client):
    ready = client.get("/ready")
    assert ready.status_code == 200
    states = {phase["name"]: phase["state"] for phase in ready.json()["phases"]}
    assert states == dict.fromkeys(
        ("launch", "fetch", "load", "compile", "capture", "warm", "verify"), "done"
    )
    details = {phase["name"]: phase["detail"] for phase in ready.json()["phases"]}
    assert details["load"] == "Loading weights took 0.01 seconds"
    assert details["compile"] == "KV cache size: 349,440 tokens"
    assert details["verify"] == "4 tokens, with drafts"
    assert ready.json()["warnings"] == []
    records = [json.loads(line) for line in served.process.errors]
    assert any(record["message"].startswith("capture done in") for record in records)


def test_the_engines_whole_output_is_in_its_log_but_for_the_key_between_us(served):
    log = (served.folder / "log").read_text()
    assert "Resolved architecture: LlamaForCausalLM" in log
    assert "the key is ***" in log
    assert (served.folder / "log").stat().st_mode & 0o077 == 0


# ---- what passes through


def test_a_request_and_its_answer_pass_untouched(client):
    body = b'{"image":"data:image/png;base64,' + b"A" * (5 << 20) + b'", "x":1e400,"\\u00e9":"\xc3\xa9"}'
    headers = {"x-own": "1", "x-request-id": "id-7", "content-type": "application/json; charset=utf-8"}
    answer = client.post("/v1/echo/a%2Fb%7Ec?q=%7e&q=%262", content=body, headers=headers)
    assert (answer.status_code, answer.headers["x-of-the-engine"]) == (418, "yes")
    seen = answer.json()
    assert (seen["method"], seen["path"]) == ("POST", "/v1/echo/a%2Fb%7Ec?q=%7e&q=%262")
    assert seen["body"].encode() == body
    names = {name.lower(): value for name, value in seen["headers"].items()}
    assert (names["x-own"], names["x-request-id"]) == ("1", "id-7")
    assert names["content-type"] == "application/json; charset=utf-8"
    assert answer.headers["x-request-id"] == "id-7"


@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD"])
def test_other_methods_pass_too(client, method):
    answer = client.request(method, "/v1/echo/x")
    assert answer.status_code == 418
    if method != "HEAD":
        assert answer.json()["method"] == method


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/messages?beta=true"),
        ("POST", "/v1/messages/count_tokens"),
    ],
)
def test_the_apis_of_agents_pass_too_with_either_header_for_the_key(served, method, path):
    """The stand-in has no such routes: that its answer comes back shows that the engine was asked."""
    body = {"json": {"max_tokens": 1}} if method == "POST" else {}
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    answer = httpx.request(method, served.address + path, headers=headers, **body)
    assert (answer.status_code, answer.text) == (404, "404: Not Found")
    assert httpx.request(method, served.address + path, **body).status_code == 401


def test_an_error_of_ours_has_the_shape_of_the_api(served):
    answer = httpx.post(f"{served.address}/v1/messages", json={})
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "authentication_error")


def test_what_is_between_two_of_us_stays_there(client):
    headers = {"origin": "https://chat.example.com", "cookie": "c=1", "x-hop": "1", "connection": "x-hop"}
    headers["x-api-key"] = KEY
    answer = client.get("/v1/echo/x", headers=headers)
    names = {name.lower(): value for name, value in answer.json()["headers"].items()}
    assert not {"origin", "cookie", "x-hop", "x-api-key"} & names.keys()
    assert names["authorization"] != f"Bearer {KEY}"
    assert "set-cookie" not in answer.headers
    assert answer.headers.get_list("access-control-allow-origin") == ["https://chat.example.com"]
    assert "access-control-allow-origin" not in client.get("/v1/echo/x").headers


def test_an_error_of_the_engine_is_the_clients(client):
    answer = client.post(CHAT, json={**HELLO, "max_tokens": -1})
    assert answer.status_code == 400
    assert answer.json() == {"error": {"message": "max_tokens must be at least 1", "code": 400}}


def test_a_stream_passes_event_by_event(client):
    with client.stream("POST", CHAT, json=STREAM) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.iter_lines()
        first = next(lines)  # the engine waits for us before it sends more
        client.post("/v1/release")
        found = events([first, *lines])
    assert (texts(found), found[-1]) == (["One", " two", " three", " four"], "[DONE]")


@pytest.mark.parametrize("body", [STREAM, {**HELLO, "slow": True}], ids=["stream", "whole"])
def test_a_client_that_hangs_up_ends_the_engines_work(served, client, body):
    before = client.post("/v1/release").json()["aborted"]
    if body is STREAM:
        with client.stream("POST", CHAT, json=body) as response:
            next(response.iter_lines())
    else:
        impatient = httpx.Client(headers=dict(client.headers), timeout=0.5)
        with pytest.raises(httpx.ReadTimeout):
            impatient.post(served.address + CHAT, json=body)
        impatient.close()
    wait_for(lambda: client.get("/v1/counts").json()["aborted"] == before + 1, "the engine goes on")


# ---- who may ask, and for what


def test_the_engine_knows_no_key_of_our_clients_and_shows_its_own_to_nobody(served):
    engine = Path(f"/proc/{served.pids[0]}")
    assert KEY not in engine.joinpath("environ").read_text()
    variables = dict(text.partition("=")[::2] for text in engine.joinpath("environ").read_text().split("\0"))
    assert len(variables["VLLM_API_KEY"]) > 30
    assert variables["VLLM_API_KEY"] not in engine.joinpath("cmdline").read_text()
    assert variables["VLLM_API_KEY"] not in served.process.text


def test_the_key_is_ours_and_probes_need_none(served):
    assert httpx.post(served.address + CHAT, json=HELLO).status_code == 401
    assert httpx.get(f"{served.address}/v1/models").status_code == 401
    assert {
        httpx.get(served.address + path).status_code
        for path in ("/live", "/health", "/ready", "/metrics", "/")
    } == {200}


@pytest.mark.parametrize(
    "path", ["/scale_elastic_ep", "/v1/echo/../../scale_elastic_ep", "/v1/echo/%2e%2e/x", "/docs"]
)
def test_routes_that_govern_the_engine_are_out_of_reach(served, path):
    with socket.create_connection(
        served.address.removeprefix("http://").split(":")
    ) as raw:  # httpx would tidy it
        raw.sendall(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
            "Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        status = raw.makefile("rb").readline()
    assert status.split()[1] == b"404"


def test_only_methods_of_the_api_pass(client):
    assert client.request("PATCH", "/v1/models").status_code == 405


def test_the_models_name_and_version_are_told(client):
    assert client.get("/v1/models").json()["data"][0]["id"] == "m"
    version = client.get("/version").json()
    assert (version["version"], version["engine"]) == ("0.32.0", "vllm")
    assert client.get("/server_info").json()["served_model_name"] == "m"


# ---- metrics and the page


def test_metrics_are_the_engines_and_ours(client):
    text = client.get("/metrics").text
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"}' in text
    assert 'blockdraft:ready{model_name="m"} 1.0' in text
    assert 'blockdraft:startup_phase_seconds{model_name="m",phase="load"}' in text
    client.get("/v1/echo/x")
    line = next(
        line
        for line in client.get("/metrics").text.splitlines()
        if "proxy_requests_total" in line and "418" in line
    )
    assert float(line.split()[-1]) >= 1


def test_the_live_page_is_fed_from_the_engines_metrics(client):
    client.post(CHAT, json=HELLO)
    with client.stream("GET", "/events") as response:
        lines = (line for line in response.iter_lines() if line)
        for line in lines:
            event = json.loads(line.removeprefix("data: "))
            if event["now"] is not None and event["now"]["tokens_per_step"] is not None:
                break
            if event["now"] is not None:  # it was looked at once: what comes now is seen to come
                client.post(CHAT, json=HELLO)
    engine, now = event["engine"], event["now"]
    assert (engine["engine"], engine["target"], engine["max_model_len"]) == ("vLLM 0.32.0", MODEL, 512)
    assert (engine["width"], engine["can_switch"]) == (8, False)
    assert (now["tokens_per_step"], now["acceptance"], now["lately_s"]) == (2.5, [1.0, 0.5], 10)
    assert (now["running"], now["pages_used"], now["num_pages"]) == (1, 100, 400)
    assert event["startup"]["state"] == "ready"
    assert event["history"]
