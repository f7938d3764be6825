"""`python -m spmd_serve.bench NAME [OPTION...]`: runs spmd_serve/bench/NAME.py. Each benchmark has its own --help."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spmd_serve.distributed.process import say_error
from spmd_serve.distributed.ranks import die_with_parent
from spmd_serve.errors import ConfigError, ModelError, RequestError


def benchmarks() -> dict[str, str]:
    """Name -> first line of its docstring, of the modules beside this one that have a main(argv); imports none."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        has_main = any(
            isinstance(node, ast.FunctionDef) and node.name == "main" and node.args.args for node in tree.body
        )
        if has_main and not path.name.startswith("_"):
            summary = (ast.get_docstring(tree) or "").partition("\n")[0]
            found[path.stem] = summary.removeprefix(f"`bench {path.stem}`: ")
    return found


def main(argv: Sequence[str]) -> int:
    """Dispatch to the benchmark named by the first argument. Returns its exit code."""
    known = benchmarks()
    listing = "\n".join(f"  {name:15} {summary}" for name, summary in known.items())
    if not argv or argv[0] in ("-h", "--help"):
        print(f"Usage: python -m spmd_serve.bench NAME [OPTION...]   (NAME --help explains)\n\n{listing}")
        return 0 if argv else 2
    if argv[0] not in known:
        print(f"spmd_serve.bench: there is no benchmark '{argv[0]}'; there are\n{listing}", file=sys.stderr)
        return 2
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of torchrun's, which may be killed
        die_with_parent()
    try:
        return int(importlib.import_module(f"spmd_serve.bench.{argv[0]}").main(argv[1:]))
    except (ConfigError, ModelError, RequestError) as exc:  # what the user gave cannot be measured
        say_error("spmd_serve.bench", exc)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
