"""What the HTTP surface promises, checked with raw bytes over real sockets."""
