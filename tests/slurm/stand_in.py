#!/usr/bin/env python3
"""Stands where the environment's Python would: instead of torchrun it says how it was started, and answers on the first node.

So the batch script's own decisions can be tried many times in the time that one real start takes. STAND_IN=deaf never answers.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    key = os.environ.get("SPMD_SERVE_API_KEY")

    def do_GET(self) -> None:
        wrong = self.key is not None and self.headers["authorization"] != f"Bearer {self.key}"
        self.send_response(401 if wrong and self.path != "/health" else 200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "stand-in"}]}')


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "-c" and "find_spec" in arguments[1]:  # "can this interpreter run spmd_serve?"
        return
    if arguments[0] != "-m":
        os.execv(sys.executable, [sys.executable, *arguments])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("started", *arguments, "on GPUs", os.environ.get("CUDA_VISIBLE_DEVICES", "none"), flush=True)
    if "--node-rank=0" in arguments and os.environ.get("STAND_IN") != "deaf":
        if "--api-key" in arguments:
            Handler.key = arguments[arguments.index("--api-key") + 1]
        if "--no-api-key" in arguments and Handler.key is not None:
            sys.exit("--api-key and --no-api-key contradict each other")
        port = int(arguments[arguments.index("--port") + 1])
        http.server.HTTPServer(("", port), Handler).serve_forever()
    signal.pause()


if __name__ == "__main__":
    main()
