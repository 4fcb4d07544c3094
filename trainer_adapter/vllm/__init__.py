"""vLLM: its ranks take versions over (transfer, reload, loader), its server swaps them (http)."""
