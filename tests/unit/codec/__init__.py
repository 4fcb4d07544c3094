"""Tests of the codec: frames bit for bit, what they cost, and what they refuse."""
