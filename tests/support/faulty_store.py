"""A store behind faults: a WSGI application around the one of a server.

``PUT /.faults`` replaces the faults by a JSON list of objects with

* ``method`` and ``has``: which requests, by a part of their path and query; ``COPY`` is a ``PUT``
  whose content is another object;
* ``after`` and ``times``: how many to let pass, and how many to hit then;
* ``do``: ``answer`` (with ``status`` and ``code``), ``cut`` (close the connection, after reading
  half of what is sent), ``lose`` (do it, and close the connection without an answer), ``truncate``
  (close it in the middle of the answer's body), ``page`` (answer with a page of HTML), ``ignore``
  (do it as if it had no condition), ``whole`` (as if it named no range) or ``shift`` (as if its
  range began ``by`` bytes earlier).

``GET /.requests`` answers with all requests so far, each with the SHA-256 in it, and forgets them.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

PAGE = b"<html><body>please log in</body></html>"
Start = Callable[..., Any]
Application = Callable[[dict[str, Any], Start], Iterable[bytes]]


class Faulty:
    """The application, behind faults.

    ``connection`` finds a request's socket in its environment: each server has another name.
    """

    def __init__(
        self, app: Application, connection: Callable[[dict[str, Any]], socket.socket]
    ) -> None:
        self._app = app
        self._connection = connection
        self._faults: list[dict[str, Any]] = []
        self._requests: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/.faults":
            self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            start("200 OK", [("Content-Length", "0")])
            return [b""]
        if path == "/.requests":
            with self._lock:
                answer, self._requests = json.dumps(self._requests).encode(), []
            start("200 OK", [("Content-Length", str(len(answer)))])
            return [answer]
        is_copy = "HTTP_X_AMZ_COPY_SOURCE" in environ
        method = "COPY" if is_copy else environ["REQUEST_METHOD"]
        request = f"{method} {path}?{environ.get('QUERY_STRING', '')}"
        fault = self._fault_of(request, environ.get("HTTP_X_AMZ_CONTENT_SHA256", ""))
        return self._app(environ, start) if fault is None else self._fail(fault, environ, start)

    def _fail(
        self, fault: dict[str, Any], environ: dict[str, Any], start: Start
    ) -> Iterable[bytes]:
        match fault["do"]:
            case "answer":
                return refuse(environ, start, fault["status"], fault["code"])
            case "page":
                start("200 OK", [("Content-Type", "text/html"), ("Content-Length", str(len(PAGE)))])
                return [PAGE]
            case "ignore":
                for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
                    environ.pop(name, None)
                return self._app(environ, start)
            case "whole":
                environ.pop("HTTP_RANGE", None)
                return self._app(environ, start)
            case "shift":
                begin, end = map(int, environ["HTTP_RANGE"].removeprefix("bytes=").split("-"))
                begin, end = max(0, begin - fault["by"]), max(0, end - fault["by"])
                environ["HTTP_RANGE"] = f"bytes={begin}-{end}"
                return self._app(environ, start)
            case "truncate":
                return self._half(environ, start)
            case "lose":
                self._body(environ, lambda *_: lambda _: None)
            case "cut":
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            case other:
                raise AssertionError(other)
        return self._close(environ)

    def _half(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """The headers of an answer, and half of its body."""
        body = self._body(environ, start)
        yield body[: len(body) // 2]
        self._close(environ)

    def _body(self, environ: dict[str, Any], start: Start) -> bytes:
        answer = self._app(environ, start)
        try:
            return b"".join(answer)
        finally:
            if hasattr(answer, "close"):
                answer.close()

    def _close(self, environ: dict[str, Any]) -> Iterable[bytes]:
        self._connection(environ).shutdown(socket.SHUT_RDWR)
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


def filter_factory(
    global_conf: dict[str, str], **local_conf: str
) -> Callable[[Application], Faulty]:
    """A filter for a pipeline of PasteDeploy, under eventlet's server."""
    return lambda app: Faulty(app, lambda environ: environ["eventlet.input"].get_socket())
