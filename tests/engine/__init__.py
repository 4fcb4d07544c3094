"""Tests that need torch and vLLM: `make test-engine` (README.md, docs/ENGINES.md). Not in `make test`."""
