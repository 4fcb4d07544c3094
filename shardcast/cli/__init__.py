"""The command line, one module a command; the only place that knows all three packages."""
