"""What a rank of an engine does, with a model in memory instead of an engine's."""
