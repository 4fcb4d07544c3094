"""What a swap costs a running vLLM: ``python -m loadtest.swap`` (needs vLLM; not one of the gates)."""
