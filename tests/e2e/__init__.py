"""Tests of whole trees of real processes."""
