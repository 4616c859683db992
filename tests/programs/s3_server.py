"""An S3 server on loopback (moto's), with faults; prints its address.

python tests/programs/s3_server.py

``PUT /.faults`` replaces the faults by a JSON list of objects with

* ``method`` and ``has``: which requests, by a part of their path and query;
* ``after`` and ``times``: how many to let pass, and how many to hit then;
* ``do``: ``answer`` (with ``status`` and ``code``), ``cut`` (close the connection, after reading
  half of what is sent), ``lose`` (do it, and close the connection without an answer), ``truncate``
  (close it in the middle of the answer's body) or ``page`` (answer with a page of HTML).

``GET /.requests`` answers with all requests so far, each with the CRC-32 in it, and forgets them.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

PAGE = b"<html><body>please log in</body></html>"
Start = Callable[..., Any]


class Faulty:
    """The application, behind faults."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._faults: list[dict[str, Any]] = []
        self._requests: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/.faults":
            self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            start("200 OK", [])
            return [b""]
        if path == "/.requests":
            with self._lock:
                answer, self._requests = json.dumps(self._requests).encode(), []
            start("200 OK", [("Content-Length", str(len(answer)))])
            return [answer]
        request = f"{environ['REQUEST_METHOD']} {path}?{environ['QUERY_STRING']}"
        fault = self._fault_of(request, environ.get("HTTP_X_AMZ_CHECKSUM_CRC32", ""))
        if fault is None:
            return list(self._app(environ, start))
        if fault["do"] == "answer":
            return refuse(environ, start, fault["status"], fault["code"])
        if fault["do"] == "page":
            start("200 OK", [("Content-Type", "text/html"), ("Content-Length", str(len(PAGE)))])
            return [PAGE]
        if fault["do"] == "truncate":
            return self._half(environ, start)
        if fault["do"] == "lose":
            list(self._app(environ, lambda *_: lambda _: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError

    def _half(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """The headers of an answer, and half of its body."""
        body = b"".join(self._app(environ, start))
        yield body[: len(body) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError

    def _fault_of(self, request: str, checksum: str) -> dict[str, Any] | None:
        with self._lock:
            self._requests.append(f"{request} {checksum}")
            for fault in self._faults:
                if not request.startswith(fault["method"]) or fault.get("has", "") not in request:
                    continue
                if fault.get("after", 0) > 0:
                    fault["after"] -= 1
                elif fault.get("times", 1) > 0:
                    fault["times"] = fault.get("times", 1) - 1
                    return fault
        return None


def refuse(environ: dict[str, Any], start: Start, status: int, code: str) -> Iterable[bytes]:
    """Answer as S3 does when it refuses."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    start(f"{status} Refused", [("Content-Length", str(len(body)))])
    return [body]


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, Faulty(), threaded=True)
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the test ends
