"""An emulator of Google Cloud Storage on loopback; prints its address.

PYTHONPATH=tests python -m programs.gcs_server
"""

from __future__ import annotations

import sys

from gcp_storage_emulator.server import create_server

if __name__ == "__main__":
    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    sys.stdout.write(f"http://127.0.0.1:{server._api._httpd.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test ends
    server.stop()
