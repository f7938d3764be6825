"""A model whose numbers overflow on one token: requests with it end with an error, and no other request notices."""

from pathlib import Path

import pytest
from support.families import write_family
from support.poison import check_that_nobody_notices, poison

from spmd_serve.llm import LLM


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3-moe"])
@pytest.mark.parametrize("options", [("--overlap", "on"), ("--overlap", "off", "--max-batch-tokens", "8")])
def test_nobody_notices(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    write_family(name, tmp_path)
    poison(tmp_path)
    pool = ("--page-size", "4", "--num-pages", "24", "--device", "cpu", "--dtype", "float32")
    llm = LLM("--model", str(tmp_path), *pool, *options)
    try:
        check_that_nobody_notices(llm, tolerance=1e-4)
    finally:
        llm.close()
