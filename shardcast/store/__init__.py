"""Versions and blobs on disk: extents, the atomic commit, retention."""
