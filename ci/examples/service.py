"""An example service: an encoder behind HTTP, started by `cachepipe restore … -- python service.py`.

POST /encode   {"batch": 1, "seq": 32, "seed": 7} → the first numbers of each text's vector
GET  /healthz  503 until every shape bucket was called once, then 200
GET  /report   what the recorder saw: hits, misses, late compiles

One thread owns the model, because grad mode, autocast and precision belong to a thread; HTTP threads only queue.
Without a restored artifact the service starts all the same, and compiles at its first requests as any other would.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

STARTED = time.monotonic()
MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
MODEL = "encoder"
REQUEST_TIMEOUT_S = 300.0
BODY_BYTES = 64 * 1024


class Request(NamedTuple):
    body: dict[str, Any]
    answer: Future[dict[str, Any]]


class Server(ThreadingHTTPServer):
    """Queues requests for the thread that owns the model."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, Handler)
        self.requests: queue.Queue[Request] = queue.Queue(maxsize=64)
        self.is_ready = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/healthz":
            is_ready = self.server.is_ready.is_set()
            self.answer(200 if is_ready else 503, {"ready": is_ready})
        elif self.path == "/report":
            import cachepipe

            self.answer(200, cachepipe.report())
        else:
            self.answer(404, {"error": "GET /healthz, GET /report, POST /encode"})

    def do_POST(self) -> None:
        if self.path != "/encode":
            self.answer(404, {"error": "POST /encode"})
            return
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= BODY_BYTES:
            self.answer(413, {"error": f"1 to {BODY_BYTES} bytes of JSON wanted"})
            return
        request = Request(json.loads(self.rfile.read(length)), Future())
        self.server.requests.put(request)
        try:
            self.answer(200, request.answer.result(timeout=REQUEST_TIMEOUT_S))
        except (ValueError, TypeError, KeyError) as error:
            self.answer(400, {"error": str(error)})

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Requests are not logged: stderr keeps the two lines that matter."""


class Encoder:
    """The model as the service calls it; the same lines restore, or compile cold when there is no artifact."""

    def __init__(self) -> None:
        import torch

        import cachepipe

        sys.path.insert(0, str(MANIFESTS))
        from quickstart_model import encoder

        self.torch = torch
        self.entry = cachepipe.entry(MODEL)
        self.compiled = self.entry.compile(encoder())
        with self.entry.context():
            self.entry.warmup(self.compiled)
        cachepipe.ready()

    def encode(self, body: dict[str, Any]) -> dict[str, Any]:
        batch, seq, seed = (int(body[name]) for name in ("batch", "seq", "seed"))
        if not (0 < batch <= 64 and 0 < seq <= 512):
            raise ValueError("batch is 1 to 64, seq 1 to 512")
        generator = self.torch.Generator().manual_seed(seed)
        started = time.monotonic()
        # made before the context: a tensor born in inference mode is another kind to torch's guards
        tokens = self.torch.randint(0, 1000, (batch, seq), generator=generator)
        with self.entry.context():
            vectors = self.compiled(tokens=tokens)  # by name, as the manifest's `call: kwargs` says
        first = [[round(value, 4) for value in vector] for vector in vectors[:, :4].tolist()]
        return {"vectors": first, "seconds": round(time.monotonic() - started, 6)}


def serve(server: Server) -> None:
    """Builds the model, says ready, then answers until the process ends."""
    encoder = Encoder()
    server.is_ready.set()
    print(f"service: ready after {time.monotonic() - STARTED:.2f} s", file=sys.stderr, flush=True)
    while True:
        request = server.requests.get()
        try:
            request.answer.set_result(encoder.encode(request.body))
        except Exception as error:  # noqa: BLE001 - the caller gets it; the service goes on
            request.answer.set_exception(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=int(os.environ.get("PORT", "8080")), help="0: any free one")
    parser.add_argument("--port-file", type=Path, help="where to write the port that was taken")
    options = parser.parse_args()
    server = Server((options.host, options.port))
    if options.port_file:
        temporary = options.port_file.with_suffix(".tmp")
        temporary.write_text(str(server.server_port))
        temporary.replace(options.port_file)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    serve(server)


if __name__ == "__main__":
    main()
