"""A stand-in of the Hugging Face hub on 127.0.0.1, as far as a download needs it. Knows nothing of who asks."""

import hashlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves repositories from memory: {"owner/name": {"file": bytes}}.

    Attributes:
        url: the endpoint.
        requests: (method, path, Authorization header or None) of every request, in order.
        private: repositories that want the token; gated: that refuse every token.
        refused: files that are not given; slow: that never end.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]], token: str = "hf_right"):
        self.repositories, self.token = repositories, token
        self.requests: list[tuple[str, str, str | None]] = []
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.refused: set[str] = set()
        self.slow: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.requests.append((self.command, self.path, self.headers.get("Authorization")))
                status, headers, body = hub.answer(unquote(urlsplit(self.path).path), self.headers)
                self.send_response(status)
                for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    half = len(body) // 2
                    self.wfile.write(body[:half])
                    if self.path.rsplit("/", 1)[1] in hub.slow:
                        self.wfile.flush()
                        time.sleep(60)
                    self.wfile.write(body[half:])

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for method, path, _ in self.requests
                if method == "GET" and "/resolve/" in path}

    def tokens(self, repo_id: str) -> set[str | None]:
        """The tokens that requests about a repository came with; None for a request without one."""
        return {authorization and authorization.removeprefix("Bearer ") for _, path, authorization in self.requests
                if f"/{repo_id}" in path}

    def answer(self, path: str, headers) -> tuple[int, dict, bytes]:
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        repo_id, rest = "/".join(parts[:2]), parts[2:]
        files = self.repositories.get(repo_id)
        given = (headers.get("Authorization") or "").removeprefix("Bearer ")
        if given and given != self.token:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"{}"
        if files is None or (repo_id in self.private and not given):
            return (404 if given else 401), {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
        if repo_id in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b'{"error": "Access to this model is restricted"}'
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}'
        if api:
            return 200, {"Content-Type": "application/json"}, json.dumps(self.listing(repo_id, files, rest)).encode()
        body = files.get("/".join(rest[2:]))
        if "/".join(rest[2:]) in self.refused:
            return 403, {}, b""
        if body is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "Content-Type": "application/octet-stream"}, body

    def listing(self, repo_id: str, files: dict[str, bytes], rest: list[str]):
        if rest and rest[0] == "tree":
            return [{"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in files.items()]
        siblings = [{"rfilename": name, "size": len(body), "blobId": "0" * 40} for name, body in files.items()]
        return {"_id": "0", "id": repo_id, "modelId": repo_id, "sha": COMMIT, "private": False, "gated": False,
                "disabled": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}
