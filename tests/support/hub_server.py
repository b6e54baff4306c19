"""The part of the Hub's API that uploads use, in memory and over a local socket: repositories, branches, LFS, commits.

Programs find it by HF_ENDPOINT, this process by `using`. hf_xet is off: its storage is not part of this API.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_marked0write0token"
"""The only token that may write."""
OWNER = "me"
_LFS = (".safetensors", ".bin", ".pt")
_MODEL = re.compile(r"/api/models/(?P<name>[\w.-]+/[\w.-]+)(/(?P<what>\w+)(/(?P<rest>.+))?)?")


@dataclass
class Commit:
    """A commit, with all files of the repository."""

    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Fault:
    """What happens to the next requests that fit, before they have an effect."""

    fits: Callable[[str, str], bool]
    """Of a method and a path."""
    answer: int | None
    """A status; None closes the connection."""
    times: int
    seen: int = 0


@dataclass
class HubServer:
    """Repositories by name, and their commits by branch, oldest first."""

    url: str
    repositories: dict[str, dict[str, list[Commit]]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    """The content of LFS files by sha256."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path, in order."""
    faults: list[Fault] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    arrived: Event = field(default_factory=Event)
    """Whether a request is being held."""
    released: Event = field(default_factory=Event)
    held: Callable[[str, str], bool] | None = None

    def commits(self, name: str = "me/model", branch: str = "main") -> list[Commit]:
        """Those of uploads: without the first one, which creates a repository."""
        return self.repositories[name][branch][1:]

    def messages(self, name: str = "me/model", branch: str = "main") -> list[str]:
        """Of `commits`."""
        return [one.message for one in self.commits(name, branch)]

    def files(self, name: str = "me/model", branch: str = "main") -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.repositories[name][branch][-1].files

    def download(self, directory: Path, name: str = "me/model", branch: str = "main") -> Path:
        """Download the repository with the real client."""
        from huggingface_hub import snapshot_download

        place = snapshot_download(name, revision=branch, local_dir=directory, endpoint=self.url, token=TOKEN)
        return Path(place)

    def fail(self, part: str, answer: int | None, times: int = 1000) -> Fault:
        """Answer requests whose path contains `part` with a status, or with None not at all, so many times."""
        fault = Fault(lambda method, path: part in path, answer, times)
        self.faults.append(fault)
        return fault

    def hold(self, part: str) -> None:
        """Hold the next request whose path contains `part` until `released` is set; then it goes on."""
        self.arrived.clear()
        self.released.clear()
        self.held = lambda method, path: part in path


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A Hub on a free port of this machine."""

    class Handler(_Handler):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Handler.hub = HubServer(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Handler.hub
        finally:
            Handler.hub.released.set()
            server.shutdown()
            thread.join()


@contextmanager
def using(hub: HubServer, token: str | None = TOKEN) -> Iterator[None]:
    """Let `huggingface_hub` in this process use it."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)  # of its own client
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        if token is not None:
            patch.setenv("HF_TOKEN", token)
        yield


def environment(hub: HubServer, token: str | None = TOKEN) -> dict[str, str]:
    """What lets `huggingface_hub` of another process use it."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "TRANSFORMERS_OFFLINE": "0"}
    return own if token is None else {**own, "HF_TOKEN": token}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        with hub.lock:
            hub.requests.append((self.command, path))
            fault = next((one for one in hub.faults if one.seen < one.times and one.fits(self.command, path)), None)
            if fault is not None:
                fault.seen += 1
            held = hub.held is not None and hub.held(self.command, path)
            if held:
                hub.held = None
        if held:
            hub.arrived.set()
            hub.released.wait(60)
        if fault is not None and fault.answer is None:
            self.close_connection = True
            return
        if fault is not None and fault.answer is not None:
            self._answer(fault.answer, {"error": "planted failure"}, {})
            return
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."}, {})
            return
        with hub.lock:
            status, content, headers = self._handle(path, body)
        self._answer(status, content, headers)

    def _handle(self, path: str, body: bytes) -> tuple[int, object, dict[str, str]]:
        hub = self.hub
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {}, {}
        if path.startswith("/lfs/"):
            sha = path.removeprefix("/lfs/")
            if hashlib.sha256(body).hexdigest() != sha:
                return 400, {"error": "the content is not what was announced"}, {}
            hub.objects[sha] = body
            return 200, {}, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._object(one) for one in json.loads(body)["objects"]]}, {}
        if "/resolve/" in path:
            name, _, rest = path.strip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            return self._file(name, revision, file)
        match = _MODEL.fullmatch(path)
        if match is None:
            return 404, {}, {}
        if match["name"] not in hub.repositories:
            return 404, {}, {"X-Error-Code": "RepoNotFound"}
        return self._of_model(match["name"], match["what"], match["rest"] or "main", body)

    def _of_model(self, name: str, what: str | None, rest: str, body: bytes) -> tuple[int, object, dict[str, str]]:
        branches = self.hub.repositories[name]
        if what == "branch":
            if rest in branches:
                return 409, {}, {}
            branches[rest] = branches["main"][:1]
            return 201, {}, {}
        revision = rest.partition("/")[0]
        found = self._commit_of(name, revision)
        if found is None:
            return 404, {}, {"X-Error-Code": "RevisionNotFound"}
        if what == "preupload":
            asked = [one["path"] for one in json.loads(body)["files"]]
            return 200, {"files": [_preupload(path, found.files.get(path)) for path in asked]}, {}
        if what == "tree":
            return 200, [_entry(path, content) for path, content in found.files.items()], {}
        if what == "commit":
            return self._commit(name, revision, [json.loads(line) for line in body.splitlines()])
        listed = [{"rfilename": path} for path in found.files]
        return 200, {"id": name, "sha": found.oid, "siblings": listed, "private": name in self.hub.private}, {}

    def _commit_of(self, name: str, revision: str) -> Commit | None:
        branches = self.hub.repositories[name]
        everything = [commit for commits in branches.values() for commit in commits]
        return branches[revision][-1] if revision in branches else _first(everything, revision)

    def _create(self, asked: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        if name in self.hub.repositories:
            return 409, {"url": f"{self.hub.url}/{name}"}, {}
        self.hub.repositories[name] = {"main": [Commit(_oid(name), "initial commit", {".gitattributes": b""})]}
        if asked.get("visibility") == "private":
            self.hub.private.add(name)
        return 200, {"url": f"{self.hub.url}/{name}"}, {}

    def _object(self, asked: dict[str, object]) -> dict[str, object]:
        if asked["oid"] in self.hub.objects:
            return asked
        signed = f"{self.hub.url}/lfs/{asked['oid']}?X-Amz-Signature=marked-signature"
        return {**asked, "actions": {"upload": {"href": signed, "header": {}}}}

    def _commit(
        self, name: str, branch: str, lines: list[dict[str, dict[str, str]]]
    ) -> tuple[int, object, dict[str, str]]:
        commits = self.hub.repositories[name][branch]
        files = dict(commits[-1].files)
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        message = lines[0]["value"]["summary"]
        commits.append(Commit(_oid(f"{name} {branch} {len(commits)} {message}"), message, files))
        url = f"{self.hub.url}/{name}/commit/{commits[-1].oid}"
        return 200, {"commitUrl": url, "commitOid": commits[-1].oid, "pullRequestUrl": None}, {}

    def _file(self, name: str, revision: str, file: str) -> tuple[int, object, dict[str, str]]:
        commit = self._commit_of(name, revision)
        if commit is None or file not in commit.files:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        content = commit.files[file]
        return 200, content, {"X-Repo-Commit": commit.oid, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}

    def _answer(self, status: int, content: object, headers: dict[str, str]) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the client was killed
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _first(commits: list[Commit], oid: str) -> Commit | None:
    return next((one for one in commits if one.oid == oid), None)


def _oid(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def _preupload(path: str, content: bytes | None) -> dict[str, object]:
    mode = "lfs" if path.endswith(_LFS) else "regular"
    there = {} if content is None else {"oid": _remote_oid(path, content)}
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, **there}


def _remote_oid(path: str, content: bytes) -> str:
    if path.endswith(_LFS):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    found: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _remote_oid(path, content)}
    if path.endswith(_LFS):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return found
