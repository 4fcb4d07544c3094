"""Tests against programs that nobody here wrote: curl, b3sum, nginx, http.server, safetensors."""
