"""The weight-transfer engine ``shardcast``: what every rank of a vLLM engine does with versions.

Two roads lead here.

1. **Ours**: the worker method ``shardcast`` (``trainer_adapter.vllm.ranks``), installed on vLLM's
   worker class when the engine is made. Its replies carry what happened. The server's routes and
   ``inprocess`` use this one, on every number of ranks.
2. **vLLM's own** (``LLM.init_weight_transfer_engine``, ``start_weight_update``, ``update_weights``,
   ``finish_weight_update``), for programs that drive every backend alike:

   - ``init_info``: ``{}`` or ``{"run", "version", "digest", "path", "step"?}``: stage it, and wait.
   - ``update_info``: the same members: stage it if it is not, then load it. Raises RuntimeError with
     ``shardcast[CODE]: MESSAGE`` (``shardcast.engine.forms.coded``); after ``outcome`` *restored*
     the old version is served, after *poisoned* nothing should be.

   Every rank raises or none does. Yet vLLM's multi-process executor mixes answers up after an
   exception (it reads none behind the first rank that raised), so with several ranks use road 1.

Start the server with ``--weight-transfer-config '{"backend": "shardcast"}'``.
"""
