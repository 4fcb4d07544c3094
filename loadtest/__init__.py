"""Load tests: named scenarios that run the real programs and compare them with others."""
