"""Unit tests of shardcast.store."""
