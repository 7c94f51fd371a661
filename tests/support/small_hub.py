"""A server on loopback that answers as the Hugging Face Hub does, as far as downloads of files need it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Files = Mapping[str, Mapping[str, bytes]]  # by repository and name


class SmallHub(ThreadingHTTPServer):
    """``files``: what it has. ``requests``: methods and paths of what it was asked, in order.

    ``cut_after``: the next whole file is broken off after this many bytes.
    """

    def __init__(self, files: Files) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests: list[str] = []
        self.cut_after: int | None = None

    @property
    def url(self) -> str:
        """Its address, for ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+|/tree/[^/]+)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        revision = "main"
        if listing is not None and listing.group(2):
            revision = listing.group(2).rpartition("/")[2]
        elif file is not None:
            revision = file.group(2)
        found = listing or file
        repo = hub.files.get(found.group(1)) if found is not None else None
        if repo is None:
            self._send(404, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b'{"error":"Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        elif listing is not None:
            self._list(listing, repo)
        elif file is not None and file.group(3) in repo:
            self._file(repo[file.group(3)], with_body)
        else:
            self._send(404, b'{"error":"Entry not found"}', {"X-Error-Code": "EntryNotFound"})

    def _list(self, listing: re.Match[str], repo: Mapping[str, bytes]) -> None:
        if "/tree/" in (listing.group(2) or ""):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in repo.items()
            ]
            self._send(200, json.dumps(tree).encode(), {})
            return
        about = {
            "id": listing.group(1),
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": name} for name in repo],
        }
        self._send(200, json.dumps(about).encode(), {})

    def _file(self, data: bytes, with_body: bool) -> None:
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        status, first = 200, 0
        if begin is not None and with_body:
            status, first = 206, int(begin.group(1))
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = self.server.cut_after if with_body else None
        if cut is not None:
            self.server.cut_after = None
            self.close_connection = True
        self._send(status, data[first:], headers, with_body, cut)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        with_body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])


@contextmanager
def small_hub(files: Files) -> Iterator[SmallHub]:
    """Serves these files while the block runs."""
    with SmallHub(files) as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
