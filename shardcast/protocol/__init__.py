"""The protocol: bytes in, values out. No I/O, no clock, no randomness."""
