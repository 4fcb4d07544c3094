"""Golden bytes of the protocol, and the script that writes them."""
