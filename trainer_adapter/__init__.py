"""The trainer's side: from weights in memory to a published version, and on into an engine."""
