"""Ranks agree: each says a word, and all of them hear all words, before any of them acts."""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """How the ranks of one engine hear each other. Every rank must make the same calls."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def gather(self, word: str) -> list[str]:
        """Return the words of all ranks, in order; blocks until all have spoken.

        Raises:
            Exception: If another rank is gone.
        """
        ...


class Alone:
    """One rank, which agrees with itself."""

    rank = 0
    size = 1

    def gather(self, word: str) -> list[str]:
        """Return the word."""
        return [word]


class World:
    """All ranks of a vLLM engine, over its CPU process group (gloo)."""

    def __init__(self) -> None:
        """Take the group that vLLM has made.

        Raises:
            AssertionError: If it has made none in this process.
        """
        from vllm.distributed.parallel_state import get_world_group

        group = get_world_group()
        self._group = group.cpu_group
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size

    def gather(self, word: str) -> list[str]:
        """Return the words of all ranks, in order."""
        if self.size == 1:
            return [word]
        import torch.distributed

        words: list[str] = [""] * self.size
        torch.distributed.all_gather_object(words, word, group=self._group)
        return words
