"""The relay's decisions, without sockets."""
