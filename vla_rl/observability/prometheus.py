"""The newest metrics of a run for Prometheus, in its text format, on this machine's loopback interface."""

import math
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Self

from vla_rl.core.errors import UserError
from vla_rl.observability.callbacks import Callback

_HOST, _PATH = "127.0.0.1", "/metrics"
_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage(Callback):
    """Serves ``http://127.0.0.1:PORT/metrics`` within its block; a callback of the run."""

    def __init__(self, port: int) -> None:
        """Raises UserError if the port cannot be had."""
        self._values: dict[str, float] = {}
        page = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # seconds for a request

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != _PATH:
                    self.send_error(404, f"the metrics are at {_PATH}")
                    return
                content = exposition(page._values).encode()
                self.send_response(200)
                self.send_header("Content-Type", _FORMAT)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """The log is the run's."""

        try:
            self._server = _Server((_HOST, port), Handler)
        except OSError as error:
            raise UserError(
                f"log.prometheus_port={port}: {_HOST}:{port} cannot be listened at ({error.strerror}); choose another "
                "port, end what uses it, or set the key to null"
            ) from None

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The newest value of each metric is served."""
        self._values = self._values | {"iteration": iteration} | dict(metrics)  # a new one: others read the old


class _Server(ThreadingTCPServer):
    allow_reuse_address = True  # of connections that have ended; not of another server
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone away is no trouble of the run."""


def exposition(values: Mapping[str, float]) -> str:
    """Prometheus's text format: ``learner/update_kl`` becomes the gauge ``vla_rl_learner_update_kl``."""
    lines = []
    for name, value in sorted(values.items()):
        metric = "vla_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        shown = repr(float(value)) if math.isfinite(value) else "NaN" if math.isnan(value) else f"{value:+}".title()
        lines += [f"# TYPE {metric} gauge", f"{metric} {shown}"]
    return "\n".join(lines) + "\n"
