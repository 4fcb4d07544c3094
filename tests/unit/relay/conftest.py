"""A version in a store, as the store's own tests have it."""

from tests.unit.store.conftest import run, sample

__all__ = ["run", "sample"]
