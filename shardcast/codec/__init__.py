"""Lossless frames: what changed between two versions, in few bytes. Bytes in, bytes out."""
