"""Tests of the agent and what it drives engines with."""
