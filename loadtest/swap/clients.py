"""Clients that stream completions, one after the other, and note when each token came."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from types import TracebackType
from typing import Any, Final, Self

from loadtest.swap.tokens import Token

CLIENTS: Final = 4
PROMPT_TOKENS: Final = 16
ANSWER_TOKENS: Final = (96, 160)
"""Short, so that what `recompute` computes again is about 100 tokens for each client."""

_TIMEOUT_S: Final = 120.0
_LOOK_S: Final = 0.02


class Clients:
    """They stream while the block runs.

    Attributes:
        tokens: What came, in order of arrival.
        lost: Tokens that clients had got of answers that broke off, and those that answers lacked
            although they ended well.
        broken: Answers that broke off.
    """

    def __init__(self, port: int, key: str, vocabulary: int) -> None:
        self.tokens: list[Token] = []
        self.lost = 0
        self.broken = 0
        self._port = port
        self._key = key
        self._vocabulary = vocabulary
        self._over = threading.Event()
        self._links: dict[int, http.client.HTTPConnection] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True)
            for number in range(CLIENTS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def watch(self, seconds: float, *, tokens: int = 0, limit: float = 120.0) -> None:
        """Let them go on for so long, and until each has got so many more tokens."""
        begun, until = len(self.tokens), time.monotonic() + seconds
        end = time.monotonic() + limit
        while time.monotonic() < end:
            news = self.tokens[begun:]
            fewest = min(sum(token.client == n for token in news) for n in range(CLIENTS))
            if time.monotonic() >= until and fewest >= tokens:
                return
            self._over.wait(_LOOK_S)
        raise TimeoutError(f"clients got {len(self.tokens) - begun} tokens in {limit:g} s")

    def _work(self, number: int) -> None:
        dice = random.Random(number)
        while not self._over.is_set():
            prompt = [dice.randrange(3, self._vocabulary) for _ in range(PROMPT_TOKENS)]
            wanted, got, finish = dice.randint(*ANSWER_TOKENS), 0, ""
            try:
                for count, reason in self._stream(prompt, wanted):
                    now = time.monotonic()
                    self.tokens.extend([Token(now, number)] * count)
                    got, finish = got + count, reason or finish
                    if self._over.is_set():
                        return
            except (OSError, http.client.HTTPException):
                finish = ""
            if finish == "length":
                self.lost += wanted - got
                continue
            self.broken += 1 if got else 0
            self.lost += got
            self._over.wait(_LOOK_S)  # it is being restarted: try again

    def _stream(self, prompt: list[int], wanted: int) -> Any:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        body = {
            "model": "policy", "prompt": prompt, "max_tokens": wanted, "temperature": 0.7,
            "ignore_eos": True, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        try:
            link.request("POST", "/v1/completions", json.dumps(body), headers)
            response = link.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {response.read(500)!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    yield len(choice["token_ids"] or ()), choice["finish_reason"] or ""
        finally:
            link.close()
