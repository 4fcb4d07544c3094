"""SGLang over HTTP, as it comes: pause, load from disk, flush, continue.

SGLang has no lease and no single call, so this driver is the one that must not leave it half loaded:

- an intent is on disk from before the first call until after the last one (``intents``);
- nothing continues it but a load that succeeded, of the new version or of the old one again;
- ``success: false`` may come when the weights were loaded and the prefix cache was not flushed, without
  the new label: then the cache is flushed, and the version is loaded once more;
- ``success: true`` comes for a version that lacks tensors, or has some in other shapes: so its headers are
  compared with those of what is loaded before (``fitting``);
- where SGLang says nothing, or the old version cannot be loaded again, it stays paused and counts as
  poisoned until a full activation succeeds.

The weight version that it reports is our label (``forms.label_of``): a state that outlives the agent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardcast.config import NetConfig
from shardcast.engine import forms
from shardcast.engine.client import EngineClient, Key
from shardcast.engine.driver import Manner, Swapped, Target, reason_of
from shardcast.engine.fitting import misfit
from shardcast.engine.forms import EngineState, Identity, Phase
from shardcast.engine.intents import Intents, MemoryIntents
from shardcast.engine.ledger import Ledger, Watch
from shardcast.engine.scoring import score_generated
from shardcast.errors import (
    DiskError,
    EngineError,
    EngineRefusedError,
    EngineUncertainError,
    EngineUnreachableError,
    EngineUnsupportedError,
    ShardcastError,
    UsageError,
)

STEPS: Final = "is it an SGLang server (0.5.10 or newer), and is the URL its base URL?"
PAUSE_MODES: Final = {"recompute": "retract", "abort": "abort"}
"""``in_place`` keeps a prefix cache that cannot be flushed; without a pause nothing bounds a failure."""

_INFO: Final = "/model_info"
_OLD_INFO: Final = "/get_model_info"
_MODELS: Final = "/v1/models"
_PAUSE: Final = "/pause_generation"
_CONTINUE: Final = "/continue_generation"
_UPDATE: Final = "/update_weights_from_disk"
_FLUSH: Final = "/flush_cache"
_LOAD_ADAPTER: Final = "/load_lora_adapter"
_UNLOAD_ADAPTER: Final = "/unload_lora_adapter"
_FLUSHES: Final = 3
_ADAPTER_SEPARATOR: Final = "/"

Check = Callable[[Target], Awaitable[None]]
"""Hashes a version's files, which also makes their pages resident; raises what is wrong."""
Find = Callable[[str], Target | None]
"""Returns the version with that digest if it is on this disk."""


async def _no_check(target: Target) -> None:
    """Take a version as it is."""


def _nowhere(digest: str) -> Target | None:
    return None


class SglangEngine:
    """An SGLang server.

    Attributes:
        name: Its URL.
    """

    def __init__(
        self,
        url: str,
        token: Key = None,
        manner: Manner | None = None,
        *,
        intents: Intents | None = None,
        check: Check = _no_check,
        find: Find = _nowhere,
        config: NetConfig | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: Its base URL.
            token: Its API key or admin key, or what reads it: again, where the server does not take it.
            manner: How it swaps.
            intents: Remembers an activation under way.
            check: Verifies a version's files when it is staged.
            find: Knows where versions are, to load the old one again.
            config: Network bounds.
            tls: For https.

        Raises:
            UsageError: If it is no URL, or SGLang cannot swap in that manner.
        """
        self._manner = manner or Manner()
        if self._manner.requests not in PAUSE_MODES:
            raise UsageError(
                f"--requests {self._manner.requests} is not possible with SGLang: choose "
                f"{' or '.join(PAUSE_MODES)}"
            )
        self._client = EngineClient(
            url, token, missing=STEPS, config=config, tls=tls, waits=self._manner.waits
        )
        self._intents = intents or MemoryIntents()
        self._check = check
        self._find = find
        self._ledger = Ledger("sglang", self._manner.requests)
        self._running: asyncio.Task[Swapped] | None = None
        self.name = self._client.url

    # --- what it says -----------------------------------------------------------------------

    async def state(self) -> EngineState:
        """Return what is known of it."""
        info = await self._info()
        label = info.get("weight_version")
        if not isinstance(label, str):
            raise EngineUnsupportedError(
                f"{self.name} reports no weight_version: {STEPS}", source=self.name
            )
        pending = self._intents.pending()
        return self._ledger.state(
            None if pending else forms.parse_label(label),
            paused=pending,
            # While this process is at it, nobody need come to its rescue.
            poisoned=pending and self._ledger.activating is None,
            version=str(info.get("version") or "unknown"),
            lora=await self._adapters(),
        )

    async def _info(self) -> dict[str, Any]:
        try:
            return self._client.members(_INFO, await self._client.get(_INFO))
        except EngineUnsupportedError:  # named so until 0.5.5
            return self._client.members(_OLD_INFO, await self._client.get(_OLD_INFO))

    async def _adapters(self) -> list[forms.Lora]:
        listed = self._client.members(_MODELS, await self._client.get(_MODELS)).get("data")
        found = []
        for one in listed if isinstance(listed, list) else ():
            model = one.get("id") if isinstance(one, dict) else None
            name, _, label = str(model).partition(_ADAPTER_SEPARATOR)
            identity = forms.parse_label(label)
            if identity is not None and isinstance(model, str):
                found.append(
                    forms.Lora(
                        name=name,
                        model=model,
                        run=identity.run,
                        version=identity.version,
                        digest=identity.digest,
                        path=str(one.get("root") or model),
                        loaded=True,
                    )
                )
        return found

    async def tell(self, run: str, newest: int, max_lag: int | None) -> EngineState:
        """Remember how far the run is; SGLang itself is not asked."""
        self._ledger.tell(run, newest, max_lag)
        return await self.state()

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, given those before it."""
        return await score_generated(self._client, tokens)

    # --- stage ------------------------------------------------------------------------------

    async def stage(self, target: Target) -> EngineState:
        """Verify a version's files on this host, which makes their pages resident."""
        await self._verify(target)
        await self._fit(await self._info(), target)
        self._ledger.stage(target)
        return await self.state()

    async def _fit(self, info: Mapping[str, Any], target: Target) -> None:
        """Refuse a version whose tensors are not those of what SGLang has loaded."""
        loaded = Path(str(info.get("model_path")))
        try:
            why = await asyncio.to_thread(misfit, loaded, target.path)
        except DiskError as error:
            raise self._error("check", "unavailable", str(error), target.version) from error
        if why is not None:
            message = f"version {target.version} does not fit what is loaded from {loaded}: {why}"
            raise self._error("check", "incompatible", message, target.version)

    async def _verify(self, target: Target) -> None:
        if not target.path.is_dir():
            raise self._error("stage", "unavailable", f"cannot read {target.path}", target.version)
        try:
            await self._check(target)
        except EngineError:
            raise
        except Exception as error:
            reason = reason_of(error) if isinstance(error, ShardcastError) else "integrity"
            raise self._error("stage", reason, str(error), target.version) from error

    # --- activate ---------------------------------------------------------------------------

    async def activate(self, target: Target) -> Swapped:
        """Pause, load, flush, continue. Cancellation waits until that has ended one way or another."""
        if self._running is not None and not self._running.done():
            raise EngineRefusedError(
                f"engine {self.name} is being activated already",
                source=self.name,
                phase="pause",
                reason="busy",
            )
        running = self._running = asyncio.ensure_future(self._activate(target))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # the intent says what is to be done
            raise

    async def _activate(self, target: Target) -> Swapped:
        ledger = self._ledger
        info = await self._info()
        before = forms.parse_label(str(info.get("weight_version")))
        if before == target.identity and not self._intents.pending():
            return Swapped(0.0, {}, await self.state())
        if ledger.staged is None or ledger.staged.digest != target.digest:
            await self._verify(target)
        await self._fit(info, target)
        ledger.at("pause", target)
        was_whole = not self._intents.pending()
        try:
            self._begin(target)
            watch = Watch()
            await self._pause(target, was_whole=was_whole)
            watch.lap("pause")
            await self._swap(target, before, watch)
        finally:
            ledger.activating = None
        ledger.succeed(target)
        return Swapped(watch.pause_ms, watch.phases_ms, await self.state())

    def _begin(self, target: Target) -> None:
        try:
            self._intents.begin(target.identity)
        except DiskError as error:
            raise self._error("pause", "unavailable", str(error), target.version) from error

    def _end(self, target: Target) -> None:
        try:
            self._intents.end()
        except DiskError as error:  # it is activated once more
            raise self._error("resume", "unavailable", str(error), target.version) from error

    async def _pause(self, target: Target, *, was_whole: bool) -> None:
        """Pause. Where that was refused or never sent, it goes on as before."""
        mode = {"mode": PAUSE_MODES[self._manner.requests]}
        try:
            await self._do(_PAUSE, mode, "pause", target)
        except (EngineRefusedError, EngineUnreachableError):
            if was_whole:
                self._end(target)
            raise

    async def _swap(self, target: Target, before: Identity | None, watch: Watch) -> None:
        """Load a version and continue. It is paused: what cannot be sent now leaves it so."""
        try:
            await self._load_and_continue(target, before, watch)
        except EngineUnreachableError as error:
            raise EngineUncertainError(error.message, source=error.source) from error

    async def _load_and_continue(
        self, target: Target, before: Identity | None, watch: Watch
    ) -> None:
        try:
            self._ledger.at("load", target)
            await self._load(target)
            watch.lap("load")
        except (EngineRefusedError, EngineUncertainError, EngineUnreachableError) as error:
            await self._give_back(target, before, error, watch)
            raise
        self._ledger.at("resume", target)
        await self._do(_CONTINUE, {}, "resume", target)
        watch.lap("resume")
        self._end(target)
        self._ledger.log(before, target.identity, watch)

    async def _load(self, target: Target) -> None:
        """Load a version and see to it that no cached prefix of another one is left.

        SGLang keeps the old label and the old path where the cache was not flushed, so the version is
        loaded once more after that.
        """
        message = await self._update(target)
        if message is not None and "flush" in message.lower():
            await self._flush(target, message)
            message = await self._update(target)
        if message is not None:
            raise self._error("load", "failed", f"it did not load: {message}", target.version)

    async def _update(self, target: Target) -> str | None:
        """Have it read a version; return why it says that it did not."""
        body = {
            "model_path": str(target.path),
            "weight_version": str(target.identity),
            "flush_cache": True,
        }
        answer = await self._client.post(_UPDATE, body, timeout_s=self._manner.lease_s)
        if answer.status >= 500:
            raise self._client.uncertain(_UPDATE, answer)
        said = self._client.members(_UPDATE, answer.body)
        if answer.status == 200 and said.get("success") is True:
            return None
        return str(said.get("message") or said)[: forms.MAX_MESSAGE_CHARS]

    async def _flush(self, target: Target, message: str) -> None:
        """Flush what the update did not: the weights are the new ones, the prefixes the old ones'."""
        for _ in range(_FLUSHES):
            answer = await self._client.post(f"{_FLUSH}?timeout=1", {})
            if answer.status == 200:
                return
        raise self._error(
            "load", "failed", f"its prefix cache was not flushed: {message}", target.version
        )

    async def _give_back(
        self,
        target: Target,
        before: Identity | None,
        error: EngineError,
        watch: Watch,
    ) -> None:
        """Load the old version again, and only then continue; else it stays paused.

        SGLang's own way back reads the new path once more, so it is not relied on.
        """
        old = None if before is None else self._find(before.digest)
        failed = error.message
        if isinstance(error, EngineRefusedError) and old is not None:
            try:
                await self._load(old)
                watch.lap("load")
                await self._do(_CONTINUE, {}, "resume", old)
                watch.lap("resume")
            except EngineError as again:
                failed = f"{failed}; nor did version {old.version} again: {again.message}"
            else:
                self._end(old)
                self._ledger.log(before, before, watch)
                return
        error.message = (
            f"{failed}. It stays paused and nobody knows what it has loaded: the next activation "
            "loads a whole version; if none succeeds, restart the server"
        )
        self._ledger.fail("load", "failed", error.message, target.version)

    async def _do(
        self, path: str, body: Mapping[str, object], phase: Phase, target: Target
    ) -> None:
        answer = await self._client.post(path, body, timeout_s=self._manner.lease_s)
        if answer.status >= 500:
            raise self._client.uncertain(path, answer)
        if answer.status != 200:
            said = answer.body[:200].decode("utf-8", "replace")
            raise self._error(
                phase, "failed", f"answers {answer.status} to {path}: {said}", target.version
            )

    # --- adapters ---------------------------------------------------------------------------

    async def load_adapter(self, name: str, target: Target) -> EngineState:
        """Load an adapter directory under a model name that is never used again."""
        model = f"{name}{_ADAPTER_SEPARATOR}{target.identity}"
        await self._verify(target)
        self._ledger.staged = None
        body = {"lora_name": model, "lora_path": str(target.path)}
        await self._adapter(_LOAD_ADAPTER, body, target.version, fine=("already",))
        return await self.state()

    async def unload_adapter(self, name: str, identity: Identity) -> EngineState:
        """Give up what was loaded for a version of an adapter."""
        body = {"lora_name": f"{name}{_ADAPTER_SEPARATOR}{identity}"}
        await self._adapter(
            _UNLOAD_ADAPTER, body, identity.version, fine=("not loaded", "does not exist")
        )
        return await self.state()

    async def _adapter(
        self, path: str, body: dict[str, str], version: int, *, fine: tuple[str, ...]
    ) -> None:
        answer = await self._client.post(path, body, timeout_s=self._manner.lease_s)
        if answer.status >= 500:
            raise self._client.uncertain(path, answer)
        said = self._client.members(path, answer.body)
        message = str(said.get("error_message") or said.get("message") or said)
        if said.get("success") is not True and not any(one in message.lower() for one in fine):
            raise self._error("lora", "failed", message, version)

    # --- plumbing ---------------------------------------------------------------------------

    async def close(self) -> None:
        """Wait for an activation that runs, then close connections."""
        if self._running is not None:
            await asyncio.wait([self._running])
        await self._client.close()

    def _error(self, phase: Phase, reason: str, message: str, version: int) -> EngineRefusedError:
        self._ledger.fail(phase, reason, message, version)
        return EngineRefusedError(
            f"engine {self.name}: {message}", source=self.name, phase=phase, reason=reason
        )
