"""Unit tests of publishing: keys, file selection, hashing, the publisher."""
