"""Wait until a server answers /health with 200, then print the name of the model that it serves.

The name takes the API key (SPMD_SERVE_API_KEY); without the right one it prints "unknown", for the server is ready all the
same. Standard library only. Exits 1 at the deadline, with the last thing that was seen. Proxies of the environment are not
used: the server is inside the cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 30.0


def fetch(url: str, key: str) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=5.0) as response:
        return bytes(response.read())


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/wait_ready.py", description=__doc__)
    parser.add_argument("url", help="such as http://node1:8000")
    parser.add_argument("--seconds", type=float, default=1800.0, help="deadline (default: 1800)")
    args = parser.parse_args()
    key = os.environ.get("SPMD_SERVE_API_KEY", "")
    start = told = time.monotonic()
    while True:
        try:
            fetch(f"{args.url}/health", key)
            print(json.loads(fetch(f"{args.url}/v1/models", key))["data"][0]["id"])
            return 0
        except urllib.error.HTTPError as error:
            if error.code == 401:  # by /v1/models: /health needs no key
                print("unknown")
                return 0
            seen = f"HTTP {error.code}: {error.read(300).decode(errors='replace').strip()}"
        except (OSError, ValueError) as error:
            seen = str(error)
        now = time.monotonic()
        if now - start > args.seconds:
            print(
                f"[launch] error: {args.url} was not ready within {args.seconds:.0f} s; last: {seen}", file=sys.stderr
            )
            return 1
        if now - told > PROGRESS_SECONDS:
            told = now
            print(f"[launch] not ready yet ({now - start:.0f} of {args.seconds:.0f} s): {seen}", file=sys.stderr)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
