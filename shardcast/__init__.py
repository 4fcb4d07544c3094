"""Shardcast: publish, relay and pull model weights, verified shard by shard."""

__version__ = "0.1.0"
