"""A hub in a thread: just enough of its HTTP API for huggingface_hub, with every mishap on request.

``requests`` records what was asked, as ``GET /path``; a repository says what it holds at which commit, and how it
answers.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIRST, SECOND = "1" * 40, "2" * 40  # commits
# A checkpoint, as far as the hub and its cache know one.
NAME = "mlx-community/NemotronLabs-VoiceChat-11B-4bit"
CONFIG = json.dumps({"model_type": "nemotron_voicechat", "quantization": {"bits": 4, "group_size": 64}}).encode()
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 60_000 for n in (1, 2)}
INDEX = json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(SHARDS)}}).encode()


@dataclass
class Repository:
    """Files by commit. ``answer`` refuses every request, ``file_answer`` those for files: a status and its headers."""

    commits: dict[str, dict[str, bytes]]
    main: str = FIRST
    moves_to: str | None = None  # once it has been asked where main is
    answer: tuple[int, dict[str, str]] | None = None
    file_answer: tuple[int, dict[str, str]] | None = None
    drops: dict[str, int] = field(default_factory=dict)  # file -> how often the connection is lost half way
    then_fails: bool = False  # with 500, after that
    stalls: str | None = None  # the file that is never sent whole
    silent: bool = False  # nothing is ever answered
    body: bytes | None = None  # instead of the repository's description
    large_files_elsewhere: bool = False  # weights come from another host, as Git LFS has them


class FakeHub:
    """The server. ``stalled`` is set when a transfer stalls, ``release`` ends it."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.stalled, self.release = threading.Event(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def other_url(self) -> str:
        """The same server under another name."""
        return f"http://localhost:{self.server.server_port}"

    def asked(self) -> list[str]:
        """What was asked since the last time."""
        asked, self.requests = self.requests, []
        return asked


@contextmanager
def running() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def large_etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.route()

    def do_GET(self) -> None:
        self.route()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: ``requests`` has it."""

    def route(self) -> None:
        path = self.path.split("?")[0]
        wanted_range = f" {self.headers['Range']}" if "Range" in self.headers else ""
        self.hub.requests.append(f"{self.command} {path}{wanted_range}")
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/(?:resolve|elsewhere)/([^/]+)/(.+)", path)
        found = about or file
        repository = self.hub.repositories.get(found[1]) if found else None
        if repository is None:
            self.reply(404, {"X-Error-Code": "RepoNotFound"} if found else {})
        elif repository.silent:
            self.close_connection = self.hub.release.wait(20)
        elif repository.answer is not None:
            self.reply(*repository.answer)
        elif about:
            self.describe(about[1], repository)
        elif file and repository.large_files_elsewhere and file[3].endswith("tensors") and "/resolve/" in path:
            self.send_elsewhere(path, repository.commits[file[2]][file[3]], file[2])
        elif file:
            self.give(repository, file[2], file[3])

    def describe(self, name: str, repository: Repository) -> None:
        files = repository.commits[repository.main]
        siblings: list[dict[str, Any]] = []
        for file, content in sorted(files.items()):
            siblings.append({"rfilename": file, "size": len(content), "blobId": etag(content)})
            if repository.large_files_elsewhere and file.endswith("tensors"):
                large = {"sha256": large_etag(content), "size": len(content), "pointerSize": 130}
                siblings[-1] |= {"blobId": "0" * 40, "lfs": large}
        described = {"id": name, "sha": repository.main, "siblings": siblings}
        self.reply(200, {"Content-Type": "application/json"}, repository.body or json.dumps(described).encode())
        repository.main = repository.moves_to or repository.main

    def give(self, repository: Repository, commit: str, file: str) -> None:
        content = repository.commits.get(commit, {}).get(file)
        if repository.file_answer is not None:
            self.reply(*repository.file_answer)
        elif content is None:
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        elif self.command == "GET" and repository.drops.get(file):
            repository.drops[file] -= 1
            self.send_half(content, commit)
        elif self.command == "GET" and file == repository.stalls:
            self.send_half(content, commit, wait=True)
        elif self.command == "GET" and file in repository.drops and repository.then_fails:
            self.reply(500, {})
        else:
            self.send_whole(content, commit)

    def send_elsewhere(self, path: str, content: bytes, commit: str) -> None:
        location = self.hub.other_url + path.replace("/resolve/", "/elsewhere/")
        linked = {"X-Linked-Etag": f'"{large_etag(content)}"', "X-Linked-Size": str(len(content))}
        self.reply(302, {"Location": location, "X-Repo-Commit": commit, **linked})

    def send_whole(self, content: bytes, commit: str) -> None:
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start is None:
            self.reply(200, headers, content)
        else:
            headers["Content-Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
            self.reply(206, headers, content[int(start[1]) :])

    def send_half(self, content: bytes, commit: str, wait: bool = False) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("ETag", f'"{etag(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        if wait:
            self.hub.stalled.set()
            self.hub.release.wait(20)

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"X-HF-Warning": f"{self.path}; you are not logged in", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
