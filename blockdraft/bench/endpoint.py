"""Finds out which server and model an address has, and which request fields the server understands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import aiohttp

from blockdraft.bench.records import PLAIN, Ask, Speculation
from blockdraft.bench.speculation import read_metrics
from blockdraft.bench.wire import (
    Json,
    headers,
    inside,
    one_line,
    reason,
    server_message,
    server_root,
    shown_host,
)
from blockdraft.errors import BenchError
from blockdraft.jsonl import as_object

Kind = Literal["blockdraft", "vllm", "sglang", "llama.cpp", "unknown"]
PROBE_TIMEOUT_S = 10.0  # arbitrary
_LLAMA_CPP_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # of its /props; others have no effect


@dataclass(frozen=True, slots=True)
class Switches:
    """Request fields that switch off this server's speculation and prefix caches."""

    plain: Mapping[str, object] = field(default_factory=dict)  # switch speculation off
    salt: str | None = None  # the field that gets Ask.cache_salt: prompts are cached per salt
    uncached: Mapping[str, object] = field(default_factory=dict)  # switch the cache off, for asks with a salt

    @property
    def keeps_caches_out(self) -> bool:
        """Return whether Ask.cache_salt has an effect. If not, the prompts themselves must differ."""
        return self.salt is not None or bool(self.uncached)

    def fields(self, ask: Ask) -> Json:
        found: Json = dict(self.plain) if ask.arm == PLAIN else {}
        if ask.cache_salt is not None:
            found |= self.uncached
            if self.salt is not None:
                found[self.salt] = ask.cache_salt
        return found


_SWITCHES: dict[Kind, Switches] = {
    "vllm": Switches(salt="cache_salt"),
    "sglang": Switches(salt="cache_salt"),
    "llama.cpp": Switches(uncached={"cache_prompt": False}),
    "unknown": Switches(),
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model of one server: the facts that the server reports."""

    url: str  # without /v1
    kind: Kind
    version: str | None
    model: str
    max_model_len: int | None
    switches: Switches
    is_metered: bool  # /metrics counts drafts
    is_speculative: bool | None = None  # None if unknown
    title: str | None = None  # display name; None: use `model`
    drafter: str | None = None  # the drafter's name
    drafter_kind: str | None = None  # "DFlash2", "n-grams", or the engine's own name
    drafter_hash: str | None = None
    kv_dtype: str | None = None  # the format of keys and values; only our engine reports it
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults that the server declares
    notices: tuple[str, ...] = ()  # shown with every result
    fp4_kernels: tuple[str, ...] = ()  # from the log of an engine that we started

    @property
    def can_switch(self) -> bool:
        """Return whether speculation can be switched off per request."""
        return bool(self.switches.plain)


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    server: str  # the header
    body: bytes

    def json(self) -> Json:
        """Return the JSON object of the body; empty if the body is not a JSON object."""
        return as_object(self.body) if self.status == 200 else {}

    def text(self) -> str:
        return self.body.decode("utf-8", "replace") if self.status == 200 else ""


@dataclass(frozen=True, slots=True)
class _Asker:
    """Sends GET requests to one server."""

    session: aiohttp.ClientSession
    root: str
    api_key: str | None

    async def get(self, path: str) -> _Reply:
        """Return the reply; raise BenchError if there is none."""
        try:
            async with self.session.get(self.root + path) as response:
                return _Reply(response.status, response.headers.get("server", ""), await response.read())
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self.error(reason(error, shown_host(self.root), PROBE_TIMEOUT_S)) from None

    async def find(self, path: str) -> _Reply:
        """Return the reply, or an empty reply if the request fails."""
        try:
            return await self.get(path)
        except BenchError:
            return _Reply(0, "", b"")

    def error(self, text: str) -> BenchError:
        return BenchError(one_line(text, self.api_key))


async def probe(url: str, api_key: str | None = None, model: str | None = None) -> Endpoint:
    """Find out the facts of a server; raise BenchError if it cannot be measured."""
    async with _session(api_key) as session:
        ask = _Asker(session, server_root(url), api_key)
        reply = await ask.get("/v1/models")
        card = _find_model(ask, _cards(ask, reply), model)
        props = (await ask.find("/props")).json()
        info = (await ask.find("/get_server_info")).json()
        version = (await ask.find("/version")).json()
        kind = _kind(reply, card, props, info)
        # vLLM and SGLang have these facts if our server is their proxy.
        engine = await _engine_info(ask) if kind in ("blockdraft", "vllm", "sglang") else {}
        drafter = engine.get("draft_title") or engine.get("draft") or info.get("speculative_draft_model_path")
        metrics = (await ask.find("/metrics")).text()
        is_metered = read_metrics(metrics, str(card["id"])) is not None
        return Endpoint(
            url=ask.root,
            kind=kind,
            version=_text(version, "version") or _text(info, "version") or _text(props, "build_info"),
            model=str(card["id"]),
            max_model_len=_max_model_len(card, props, info),
            switches=await _own_switches(ask) if kind == "blockdraft" else _SWITCHES[kind],
            is_metered=is_metered,
            is_speculative=_is_speculative(kind, engine, info, metrics, is_metered=is_metered),
            title=_text(engine, "target_title"),
            drafter=drafter if isinstance(drafter, str) else None,
            drafter_kind=_text(engine, "draft_kind") or _text(info, "speculative_algorithm"),
            drafter_hash=_text(engine, "draft_hash"),
            kv_dtype=_text(engine, "kv_dtype"),
            sampling=_sampling(engine, props),
            notices=_texts(engine, "notices"),
            fp4_kernels=_texts(engine, "fp4_kernels"),
        )


async def read_speculation(
    url: str, api_key: str | None = None, model: str | None = None
) -> Speculation | None:
    """Return the counts in /metrics since the server's start; None if /metrics has no counts."""
    async with _session(api_key) as session:
        reply = await _Asker(session, server_root(url), api_key).find("/metrics")
        return read_metrics(reply.text(), model)


def _session(api_key: str | None) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, headers=headers(api_key))


# ---- models


def _cards(ask: _Asker, reply: _Reply) -> list[Json]:
    host = shown_host(ask.root)
    if reply.status in (401, 403):
        said = server_message(reply.body)
        raise ask.error(f"{host} does not accept the API key (HTTP {reply.status}): {said}")
    if reply.status >= 500:
        raise ask.error(f"{host} cannot answer (HTTP {reply.status}): {server_message(reply.body)}")
    data = reply.json().get("data")
    if not isinstance(data, list):
        raise ask.error(
            f"{host} is no OpenAI-compatible server: {ask.root.rpartition('@')[2]}/v1/models answers HTTP "
            f"{reply.status} without a list of models. Check the address and the path before /v1."
        )
    cards = [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if not cards:
        raise ask.error(f"{host} serves no model: load one first.")
    return cards


def _find_model(ask: _Asker, cards: list[Json], model: str | None) -> Json:
    """Return the card of `model`. Without a name, return the card of the server's only model."""
    names = ", ".join(f"'{card['id']}'" for card in cards)
    if model is None:
        bases = [card for card in cards if not card.get("parent")]  # not vLLM's adapters
        if len(bases) == 1:
            return bases[0]
        raise ask.error(f"{shown_host(ask.root)} serves several models: name one of {names}.")
    for card in cards:
        aliases = card.get("aliases")
        if card["id"] == model or (isinstance(aliases, list) and model in aliases):
            return card
    raise ask.error(f"{shown_host(ask.root)} has no model '{model}': it serves {names}.")


# ---- the server


def _kind(reply: _Reply, card: Json, props: Json, info: Json) -> Kind:
    owner = str(card.get("owned_by")).lower().replace("llamacpp", "llama.cpp")
    for kind in get_args(Kind):
        if owner == kind and kind != "unknown":
            return cast("Kind", kind)
    if reply.server.lower().startswith("llama.cpp") or "default_generation_settings" in props:
        return "llama.cpp"
    if "tokenizer_path" in info or "mem_fraction_static" in info:
        return "sglang"
    return "unknown"


def _max_model_len(card: Json, props: Json, info: Json) -> int | None:
    places = (
        card.get("max_model_len"),
        inside(props, "default_generation_settings", "n_ctx"),
        inside(card, "meta", "n_ctx"),
        info.get("context_length"),
    )
    return next((value for value in places if isinstance(value, int)), None)


def _is_speculative(kind: Kind, engine: Json, info: Json, metrics: str, *, is_metered: bool) -> bool | None:
    if kind == "blockdraft":  # it has counters even without a drafter
        return engine["draft"] is not None if "draft" in engine else None
    if is_metered:
        return True
    if kind == "sglang" and "speculative_algorithm" in info:
        return info["speculative_algorithm"] is not None
    # vLLM has draft counters if and only if it drafts and has metrics.
    return False if kind == "vllm" and "vllm:" in metrics else None


def _texts(parent: Json, key: str) -> tuple[str, ...]:
    found = parent.get(key)
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _sampling(engine: Json, props: Json) -> dict[str, float]:
    """Return the values that a request gets if it names none: our server's, or llama.cpp's."""
    own, theirs = engine.get("sampling"), inside(props, "default_generation_settings", "params")
    found = dict(own) if isinstance(own, dict) else {}
    if isinstance(theirs, dict):
        found |= {name: theirs[name] for name in _LLAMA_CPP_SAMPLING if name in theirs}
    return {str(name): value for name, value in found.items() if isinstance(value, int | float)}


def _text(parent: Json, key: str) -> str | None:
    value = parent.get(key)
    return value if isinstance(value, str) else None


# ---- blockdraft's own server


async def _own_switches(ask: _Asker) -> Switches:
    """Return the fields that the server's OpenAPI page lists: servers refuse an unknown salt."""
    openapi = (await ask.find("/openapi.json")).json()
    found = inside(openapi, "components", "schemas", "ChatRequest", "properties")
    names = found if isinstance(found, dict) else {}
    return Switches(
        plain={"speculative": False} if "speculative" in names else {},
        salt="cache_salt" if "cache_salt" in names else None,
    )


async def _engine_info(ask: _Asker) -> Json:
    """Return the engine's facts from the first event of /events, the endless stream of the live page."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S), ask.session.get(ask.root + "/events") as response:
            if response.status != 200:
                return {}
            line = await response.content.readuntil(b"\n\n")
            response.close()
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return {}
    engine = inside(as_object(line.strip().removeprefix(b"data:")), "engine")
    return engine if isinstance(engine, dict) else {}
