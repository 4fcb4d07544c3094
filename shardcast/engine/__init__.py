"""Inference engines as the agent drives them: forms, drivers, decisions. No torch."""
