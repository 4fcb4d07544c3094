"""The pure protocol, tested against facts from outside."""
