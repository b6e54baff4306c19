"""A Hub of Hugging Face with one dataset, `me/rows`: what `datasets` asks for to load it, over a local socket."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

_API, _FILES, _DATA = "/api/datasets/me/rows/", "/datasets/me/rows/resolve/", "rows.jsonl"


class SmallHub:
    """Commits of the dataset by their hash, and branches and tags that point to them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.refs: dict[str, str] = {}
        self.commits: dict[str, bytes] = {}
        self.is_down = False
        """Whether it closes connections without an answer."""

    def commit(self, text: str, *refs: str) -> str:
        """Commit rows with this text, and let the branches or tags point there; the commit's hash."""
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = "".join(json.dumps({"text": f"{text} {row}"}) + "\n" for row in range(400)).encode()
        self.refs.update(dict.fromkeys(refs, sha))
        return sha

    def sha_of(self, revision: str) -> str | None:
        """The commit of a branch, tag or commit."""
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    """A Hub on a free port of this machine; programs find it by the environment variable HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path.startswith(_FILES):
                revision, _, file = path.removeprefix(_FILES).partition("/")
                self._file(hub.sha_of(revision), file)
            elif path == _API[:-1] or path.startswith(f"{_API}revision/"):
                self._json(
                    path if path.startswith(_API) else _API,
                    lambda sha: {"id": "me/rows", "sha": sha, "siblings": [{"rfilename": _DATA}]},
                )
            elif path.startswith(f"{_API}tree/"):
                self._json(path, lambda sha: [_entry(hub.commits[sha])])
            else:
                self._answer(404, b"", {})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._json(urlsplit(self.path).path, lambda sha: [_entry(hub.commits[sha])] if _DATA in asked else [])

        def _json(self, path: str, content: Callable[[str], object]) -> None:
            _, _, revision = path.removeprefix(_API).partition("/")
            sha = hub.sha_of(revision.partition("/")[0] or "main")
            if sha is None:
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                self._answer(200, json.dumps(content(sha)).encode(), {"Content-Type": "application/json"})

        def _file(self, sha: str | None, file: str) -> None:
            if sha is None or file != _DATA:
                code = "RevisionNotFound" if sha is None else "EntryNotFound"
                self._answer(404, b"", {"X-Error-Code": code, "X-Repo-Commit": sha or ""})
            else:
                content, named = hub.commits[sha], {"X-Repo-Commit": sha, "ETag": f'"{sha}"'}
                asked = self.headers.get("Range")
                if asked is None:
                    self._answer(200, content, named)
                    return
                first, last = asked.removeprefix("bytes=").split("-")
                stop = min(int(last or len(content)) + 1, len(content))
                named["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
                self._answer(206, content[int(first) : stop], named)

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            if hub.is_down:
                return
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = SmallHub(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _entry(content: bytes) -> dict[str, object]:
    return {"type": "file", "path": _DATA, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
