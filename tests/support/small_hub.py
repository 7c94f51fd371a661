"""A server on loopback that answers as the Hugging Face Hub does, as far as downloads of files need it."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Files = Mapping[str, Mapping[str, bytes]]  # by repository and name


class SmallHub:
    """``files``: what it has. ``requests``: methods and paths of what it was asked, in order.

    ``url``: its address, for ``HF_ENDPOINT``. ``cut_after``: the next whole file is broken off after this many bytes.
    ``instead``: the status and the body with which it answers all questions about repositories.
    """

    def __init__(self, files: Files, url: str) -> None:
        self.files = files
        self.url = url
        self.requests: list[str] = []
        self.cut_after: int | None = None
        self.instead: tuple[int, bytes] | None = None
        repo = "/api/models/{owner}/{name}"
        places = {repo: self._about, f"{repo}/revision/{{revision}}": self._about}
        places[f"{repo}/tree/{{revision}}"] = self._tree
        places["/{owner}/{name}/resolve/{revision}/{file:path}"] = self._file
        self.application = Starlette(routes=[Route(path, answer) for path, answer in places.items()])

    def variables(self, home: object) -> dict[str, str]:
        """The environment of a process that downloads from here to the folder ``home``."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def _repo(self, request: Request) -> Mapping[str, bytes]:
        self.requests.append(f"{request.method} {request.url.path}")
        repo = self.files.get("{owner}/{name}".format_map(request.path_params))
        if repo is None:
            raise _refusal("RepoNotFound")
        if request.path_params.get("revision", "main") not in ("main", COMMIT):
            raise _refusal("RevisionNotFound")
        return repo

    async def _about(self, request: Request) -> Response:
        if self.instead is not None:
            return Response(self.instead[1], self.instead[0])
        siblings = [{"rfilename": name} for name in self._repo(request)]
        about = {"private": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}
        return JSONResponse({"id": "{owner}/{name}".format_map(request.path_params), "sha": COMMIT, **about})

    async def _tree(self, request: Request) -> Response:
        if self.instead is not None:
            return Response(self.instead[1], self.instead[0])
        files = self._repo(request).items()
        return JSONResponse(
            [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files
            ]
        )

    async def _file(self, request: Request) -> Response:
        data = self._repo(request).get(request.path_params["file"])
        if data is None:
            raise _refusal("EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        begin = re.match(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if begin is not None and request.method == "GET":
            headers["Content-Range"] = f"bytes {begin[1]}-{len(data) - 1}/{len(data)}"
            data = data[int(begin[1]) :]
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(len(data))}
        if request.method == "GET" and self.cut_after is not None:
            data, self.cut_after = data[: self.cut_after], None
        return Response(data, 206 if "Content-Range" in headers else 200, headers)


def _refusal(code: str) -> HTTPException:
    return HTTPException(404, code, {"X-Error-Code": code})


@contextmanager
def small_hub(files: Files) -> Iterator[SmallHub]:
    """Serve these files until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hub = SmallHub(files, "http://127.0.0.1:{1}".format(*listening.getsockname()))
        server = uvicorn.Server(uvicorn.Config(hub.application, log_config=None, log_level="critical"))
        thread = Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.should_exit = True
            thread.join()
