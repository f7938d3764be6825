"""Which tokens are computed in which step and in which pages, decided alike on every rank (pure Python, no torch)."""
