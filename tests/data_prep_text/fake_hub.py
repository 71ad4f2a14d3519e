"""A data hub on the loopback interface: lists and serves the files of one folder per data set."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse


def commit(revision: str) -> str:
    """The commit a revision stands for, here a hash of its name."""
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """root/<owner>/<name>/<revision with / as _>/ holds a set's files; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def do_GET(self) -> None:
            parts = urlparse(self.path).path.strip("/").split("/")
            if parts[:2] == ["api", "datasets"]:
                self.answer_api(parts[2:])
            elif parts[0] == "datasets" and parts[3] == "resolve":
                self.send_file(self.folder(parts[1:3], parts[4]), "/".join(map(unquote, parts[5:])))
            else:
                self.send(404, b"{}")

        def folder(self, name: list[str], revision: str) -> Path:
            known = {p.name: p for p in root.joinpath(*name).glob("*")}
            known |= {commit(key): p for key, p in known.items()}
            return known.get(unquote(revision).replace("/", "_"), root / "missing")

        def answer_api(self, parts: list[str]) -> None:
            what, revision = (parts + ["revision", "main"])[2:4]
            folder = self.folder(parts[:2], revision)
            if not folder.is_dir():
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            files = [
                {
                    "type": "file",
                    "path": p.relative_to(folder).as_posix(),
                    "size": p.stat().st_size,
                    "oid": hashlib.sha1(p.read_bytes()).hexdigest(),
                }
                for p in sorted(folder.rglob("*"))
                if p.is_file()
            ]
            if what == "revision":
                siblings = [{"rfilename": f["path"]} for f in files]
                info = {"id": "/".join(parts[:2]), "sha": commit(folder.name), "siblings": siblings}
                self.send(200, json.dumps(info).encode())
            else:
                self.send(200, json.dumps(files).encode())

        def send_file(self, folder: Path, name: str) -> None:
            path = folder / name
            if not path.is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            data = path.read_bytes()
            headers = {
                "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                "X-Repo-Commit": commit(folder.name),
                "Accept-Ranges": "bytes",
            }
            wanted = self.headers.get("Range", "")
            if wanted.startswith("bytes="):
                first, last = wanted.removeprefix("bytes=").split("-")
                start, end = int(first), min(int(last or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                self.send(206, data[start : end + 1], headers)
            else:
                self.send(200, data, headers)

        def send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
