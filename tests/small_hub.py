"""A Hugging Face Hub in miniature on 127.0.0.1: enough of it for `datasets` and `huggingface_hub` to load from.

    with serve({"datasets/nyu-mll/glue": {"stsb/validation.csv": b"..."}, "models/tiny/bert": {...}}) as url:
        subprocess.run(..., env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": a fresh folder})

The clients read HF_ENDPOINT when they are imported, so what uses them belongs in a subprocess.
"""

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

API = re.compile(
    r"/api/(?P<repo>(datasets|models)/[^/]+/[^/]+)(/(?P<what>revision|tree|paths-info)/[^/]+(/(?P<path>.*))?)?"
)
FILE = re.compile(r"/(?P<repo>(datasets/)?[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)")


def commit(files):
    """The commit hash of a repository: it follows from what the files hold."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def entry(path, data):
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def respond(self):
        server = self.server
        server.log.append((self.command, self.path, self.headers.get("Range")))
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if server.fault == "slow":
            return server.stopped.wait()
        if isinstance(server.fault, int):
            return self.answer(server.fault)
        path = urllib.parse.unquote(self.path.partition("?")[0])
        api, file = API.fullmatch(path), FILE.fullmatch(path)
        if server.fault == "down again" and (file or (api and api["what"])):  # all but the first question
            return self.answer(500)
        found = api or file
        repo = found["repo"] if found else ""
        repo = repo if repo.startswith(("datasets/", "models/")) else "models/" + repo
        if repo not in server.repos:
            return self.answer(404, X_Error_Code="RepoNotFound")
        files = server.repos[repo]
        head = {"X-Repo-Commit": commit(files)}
        if api:
            self.answer(200, self.api_answer(api, repo, files, sent), **head)
        elif file["path"] not in files:
            self.answer(404, X_Error_Code="EntryNotFound", **head)
        else:
            self.send_file(files[file["path"]], head)

    def api_answer(self, api, repo, files, sent):
        if api["what"] == "tree":
            folder = api["path"] + "/" if api["path"] else ""
            inside = [path for path in files if path.startswith(folder)]
            if "recursive=True" not in self.path and "recursive=true" not in self.path:
                folders = {
                    folder + path[len(folder) :].split("/")[0]
                    for path in inside
                    if "/" in path[len(folder) :]
                }
                return [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)] + [
                    entry(path, files[path]) for path in inside if "/" not in path[len(folder) :]
                ]
            return [entry(path, files[path]) for path in inside]
        if api["what"] == "paths-info":
            try:
                paths = json.loads(sent)["paths"]
            except ValueError:
                paths = urllib.parse.parse_qs(sent.decode())["paths"]
            folders = [
                {"type": "directory", "path": path, "oid": "0" * 40}
                for path in paths
                if any(name.startswith(path + "/") for name in files)
            ]
            return folders + [entry(path, files[path]) for path in paths if path in files]
        return {
            "id": repo.partition("/")[2],
            "sha": commit(files),
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path} for path in files],
        }

    def send_file(self, data, head):
        head = {**head, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if self.command == "GET" and self.server.fault == "cut" and not start and len(data) > 1000:
            self.server.fault = None
            self.send_response(200)
            for name, value in {**head, "Content-Length": len(data)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif start:
            start = int(start[1])
            self.answer(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}", **head)
        else:
            self.answer(200, data, **head)

    do_GET = do_HEAD = do_POST = respond


@contextlib.contextmanager
def serve(repos, fault=None, log=None):
    """Serve repositories, {"datasets/owner/name" or "models/owner/name": {path: bytes}}, and yield the URL.

    `fault` is None, an HTTP status that everything is answered with, "slow" (no answer at all), "down again" (status
    500 to all but the question what a repository holds), or "cut" (the first download of more than 1,000 bytes breaks
    off in the middle). `log` is a list that gets (method, path, Range header) of each request.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.repos, server.fault, server.log = repos, fault, [] if log is None else log
    server.stopped = threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
