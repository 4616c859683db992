"""An S3 server on loopback (moto's) behind faults; prints its address.

PYTHONPATH=tests python -m programs.s3_server

The faults are those of ``tests/support/faulty_store.py``.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from moto.server import create_backend_app
from werkzeug.serving import make_server

from support.faulty_store import Faulty


def serve(application: Any) -> None:
    """Say the address, and answer until the test ends."""
    server = make_server("127.0.0.1", 0, application, threaded=True)
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    # S3 alone: the application for all services has to find out which one each request is for.
    serve(Faulty(create_backend_app("s3"), lambda environ: environ["werkzeug.socket"]))
