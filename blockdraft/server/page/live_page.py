"""The live page: static files of this package at `/` and `/page/...`.

The files are read once, at the start: a request's path is never used to open a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

FOLDER = Path(__file__).parent
INDEX = "index.html"
_OURS = {".py", ".pyc"}

# Not from `mimetypes`, which reads the machine's own tables.
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",  # LICENSE
}

# Only our own files run, and no text can become markup: Trusted Types without a policy forbid innerHTML.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    "cache-control": "no-cache",  # cached, but checked each time, as the names have no version
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
}  # AuthLimits adds the headers that all answers have


@dataclass(frozen=True, slots=True)
class File:
    """One file of the page, ready to be sent."""

    body: bytes
    content_type: str
    etag: str


def read_files() -> dict[str, File]:
    """Return the page's files, by relative path with forward slashes."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in _OURS)
    return {path.relative_to(FOLDER).as_posix(): _read(path) for path in paths}


def routes() -> list[Route | Mount]:
    """Return `/` and `/page/{file}`, for GET and HEAD. They hold no secret and need no API key."""
    files = read_files()

    async def index(request: Request) -> Response:
        return _respond(request, files, INDEX)

    async def file(request: Request) -> Response:
        return _respond(request, files, request.path_params["name"])

    return [Route("/", index), Route("/page/{name:path}", file)]


def _read(path: Path) -> File:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return File(body=body, content_type=_CONTENT_TYPES[path.suffix], etag=etag)


def _respond(request: Request, files: Mapping[str, File], name: str) -> Response:
    file = files.get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "etag": file.etag}
    if _has_etag(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers={**headers, "content-type": file.content_type})


def _has_etag(header: str, etag: str) -> bool:
    """Return whether an If-None-Match names `etag`; a proxy that compresses makes it a weak one."""
    return any(item.strip().removeprefix("W/") in (etag, "*") for item in header.split(","))
