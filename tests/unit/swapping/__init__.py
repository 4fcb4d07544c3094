"""The API process of an engine: the state of a swap, its actor, its routes; no vLLM."""
