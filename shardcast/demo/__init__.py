"""The demonstration: a checkpoint, a tree of real processes around it, and proof that it arrived."""
