"""Every family's logits on one rank against transformers' in float32; on several ranks: tests/distributed/test_data_plane.py."""

from pathlib import Path

import pytest
from support import families

from spmd_serve.distributed.collectives import Communicator


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    families.write_family(family, tmp_path)
    differences = families.largest_difference(tmp_path, Communicator())
    assert max(differences.values()) < families.TOLERANCE, differences
