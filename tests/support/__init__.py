"""Helpers that several kinds of tests share. Importable as `support` because tests/conftest.py lies beside it."""
