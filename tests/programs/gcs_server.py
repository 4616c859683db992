"""Google's XML API on loopback, made of moto's S3, whose form it has; prints its address.

PYTHONPATH=tests python -m programs.gcs_server BUCKET

A generation is a number made of an ETag, and conditions on one are those of S3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import create_backend_app
from werkzeug.test import Client

from programs.s3_server import serve

Start = Callable[..., Any]


class Google:
    """The application of an S3 server, with Google's headers."""

    def __init__(self, app: Callable[[dict[str, Any], Start], Iterable[bytes]]) -> None:
        self._app = app
        self._tags: dict[str, str] = {}

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        environ["HTTP_AUTHORIZATION"] = "AWS any:any"  # moto refuses only who does not sign
        expected = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if expected == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        elif expected is not None:
            environ["HTTP_IF_MATCH"] = self._tags.get(expected, '"none"')

        def begin(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            for name, tag in list(headers):
                if name.lower() == "etag":
                    generation = str(int(tag.strip('"').partition("-")[0][:15], 16))
                    self._tags[generation] = tag
                    headers.append(("x-goog-generation", generation))
            return start(status, headers, *more)

        return self._app(environ, begin)


if __name__ == "__main__":
    app = create_backend_app("s3")
    Client(app).put(f"/{sys.argv[1]}").close()
    serve(Google(app))
