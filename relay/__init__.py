"""The relay: serves a store over HTTP and fills itself from its parents."""
