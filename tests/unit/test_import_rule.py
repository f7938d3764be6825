"""The house's one-way imports: who may import whom inside the package."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import spmd_serve

ROOT = Path(spmd_serve.__file__).parent
LEAVES = {"config", "types", "errors", "user_cache", "logs", "structured_output", "tokenizer_files"}
ALLOWED = {
    "errors": set(),
    "types": set(),
    "config": {"errors"},
    "user_cache": {"errors"},
    "logs": set(),
    "tokenizer_files": {"errors"},
    "structured_output": {"errors", "tokenizer_files"},
    "scheduler": LEAVES,
    "frontend": LEAVES,
    "kernels": LEAVES,
    "distributed": LEAVES | {"kernels"},
    "layers": LEAVES | {"distributed", "kernels"},
    "attention": LEAVES | {"distributed", "kernels"},
    "models": LEAVES | {"layers", "attention", "distributed", "kernels"},
    "engine": LEAVES | {"models", "layers", "attention", "distributed", "kernels"},
    "step_loop": LEAVES | {"scheduler", "engine", "distributed"},
}
FREE = {"__main__", "assembly", "llm", "bench", "__init__"}  # the top: may import all
TORCH_FREE = LEAVES | {"scheduler", "frontend"}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
            if node.module == "spmd_serve":
                names += [f"spmd_serve.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    here = room(path)
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "torch":
            assert here not in TORCH_FREE, f"{path} imports torch"
        if parts[0] == "spmd_serve" and len(parts) > 1 and here not in FREE and parts[1] != here:
            assert parts[1] in ALLOWED[here], f"{path} may not import {name}"


def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=;]", line)[0].replace("-", "_") for line in project["dependencies"]}
    declared = {"zmq" if name == "pyzmq" else name for name in names} - {"uvloop"}  # uvicorn takes it where it is
    found = {name.split(".")[0] for path in ROOT.rglob("*.py") for name in imported_modules(path)}
    # Of the extra "cuda", of torch's builds for CUDA, of fastapi, and of pydantic.
    others = {"flashinfer", "triton", "starlette", "pydantic_core"}
    assert found - set(sys.stdlib_module_names) - {"spmd_serve"} - others == declared
