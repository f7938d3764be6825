#!/usr/bin/env python3
"""Stands where the environment's Python would: instead of torchrun it says how it was started, and answers /health on the first node.

So the batch script's own decisions can be tried many times in the time that one real start takes. STAND_IN=deaf never answers.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
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
        port = int(arguments[arguments.index("--port") + 1])
        http.server.HTTPServer(("", port), Handler).serve_forever()
    signal.pause()


if __name__ == "__main__":
    main()
