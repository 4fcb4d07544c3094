"""vLLM with our plug-ins, over the routes under ``/v1/shardcast`` (docs/ENGINES.md)."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Final, Literal, TypeVar

import msgspec

from shardcast.asyncget import Answer
from shardcast.config import NetConfig
from shardcast.engine import forms
from shardcast.engine.client import EngineClient, Key
from shardcast.engine.driver import Manner, Swapped, Target
from shardcast.engine.forms import EngineState, Identity
from shardcast.engine.scoring import score_vllm
from shardcast.errors import EngineRefusedError, EngineUnsupportedError, MalformedError

STEPS: Final = (
    "the server was started without our plug-ins. Install shardcast-cdn into its environment and "
    "start it with VLLM_PLUGINS=shardcast,shardcast_http and "
    """--weight-transfer-config '{"backend": "shardcast"}' (docs/ENGINES.md)"""
)

_T = TypeVar("_T", bound=msgspec.Struct)


class VllmEngine:
    """A vLLM server.

    Attributes:
        name: Its URL.
    """

    def __init__(
        self,
        url: str,
        token: Key = None,
        manner: Manner | None = None,
        *,
        config: NetConfig | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: Its base URL.
            token: Its API key, or what reads it: again, where the server does not take it.
            manner: How it swaps.
            config: Network bounds.
            tls: For https.

        Raises:
            UsageError: If it is no URL.
        """
        self._manner = manner or Manner()
        self._client = EngineClient(
            url, token, missing=STEPS, config=config, tls=tls, waits=self._manner.waits
        )
        self.name = self._client.url

    async def state(self) -> EngineState:
        """Return what it says about itself."""
        return self._read(await self._client.get(forms.STATE_PATH), EngineState)

    async def stage(self, target: Target) -> EngineState:
        """Let it verify a version and hold it, while it serves."""
        request = forms.StageRequest(
            run=target.run,
            version=target.version,
            digest=target.digest,
            path=str(target.path),
            step=target.step,
        )
        answer = await self._tell(forms.STAGE_PATH, request, self._manner.waits.stage_s)
        return self._read(answer.body, forms.StageAnswer).state

    async def activate(self, target: Target) -> Swapped:
        """Let it pause, load, check and resume; at once if it serves the version already."""
        request = forms.ActivateRequest(
            run=target.run,
            version=target.version,
            digest=target.digest,
            path=str(target.path),
            step=target.step,
            requests=self._manner.requests,
            lease_s=self._manner.lease_s,
        )
        # What is not staged is verified before the lease begins.
        timeout_s = self._manner.lease_s + self._manner.waits.margin_s
        answer = await self._tell(forms.ACTIVATE_PATH, request, timeout_s)
        done = self._read(answer.body, forms.ActivateAnswer)
        return Swapped(done.pause_ms, done.phases_ms, done.state)

    async def tell(self, run: str, newest: int, max_lag: int | None) -> EngineState:
        """Let it know how far the run is."""
        request = forms.NewestRequest(run=run, version=newest, max_lag=max_lag)
        answer = await self._tell(forms.NEWEST_PATH, request, self._manner.waits.ask_s)
        return self._read(answer.body, forms.StageAnswer).state

    async def load_adapter(self, name: str, target: Target) -> EngineState:
        """Load an adapter directory under a model name that is never used again."""
        return await self._adapter("load", name, target.identity, str(target.path))

    async def unload_adapter(self, name: str, identity: Identity) -> EngineState:
        """Give up what was loaded for a version of an adapter."""
        return await self._adapter("unload", name, identity, None)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, given those before it."""
        return await score_vllm(self._client, tokens)

    async def close(self) -> None:
        """Close connections. What was begun at the server goes on there."""
        await self._client.close()

    async def _adapter(
        self, action: Literal["load", "unload"], name: str, identity: Identity, path: str | None
    ) -> EngineState:
        request = forms.LoraRequest(
            run=identity.run,
            action=action,
            name=name,
            version=identity.version,
            digest=identity.digest,
            path=path,
        )
        answer = await self._tell(
            forms.LORA_PATH, request, self._manner.lease_s + self._manner.waits.margin_s
        )
        return self._read(answer.body, forms.StageAnswer).state

    async def _tell(self, path: str, request: msgspec.Struct, timeout_s: float) -> Answer:
        answer = await self._client.post(path, forms.write(request), timeout_s=timeout_s)
        if answer.status == 200:
            return answer
        try:
            fault = forms.read_answer(answer.body, forms.FaultAnswer, source=self.name).error
        except MalformedError:  # a proxy's page, a server that broke
            raise self._client.uncertain(path, answer) from None
        raise EngineRefusedError(
            f"engine {self.name}: {fault.message}",
            source=self.name,
            phase=fault.phase or path.rpartition("/")[2],
            reason=fault.code,
        )

    def _read(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return forms.read_answer(body, kind, source=self.name)
        except MalformedError as error:
            raise EngineUnsupportedError(
                f"{self.name} speaks another protocol: {error.message}; use the same release of "
                "shardcast-cdn for the agent and in the engine's environment",
                source=self.name,
            ) from error
