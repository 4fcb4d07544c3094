"""Faults from outside, and what must hold during and after each of them.

Every fault of ``catalogue.py`` has tests here, marked ``@pytest.mark.fault(NUMBER)``. To add a case:

- **The wire** (what a parent or relay answers): one ``Case`` in a table of ``test_wire.py``. Its
  script is a few frozen actions of ``upstream.py``; the worker and a relay with ten readers both
  meet it. The second request for the first shard is cut after 1,000 bytes, say::

      Case("cut", [Play(CUT(1000), first=1)], says="closed the connection after 1000")

- **Anything else**: a test that runs inside ``criteria(...)``. The block fails at its end unless each
  of the five criteria was judged, or waived with a reason::

      with criteria(published(run)) as verdict:
          verdict.watch(out)                     # a: no wrong byte under a final name
          ...
          verdict.named(reports(log), url)       # b: the error names its source
          verdict.unaffected(bystander, run, 1)  # c: others get everything
          verdict.fetched(sent, needed, failures=1)  # d: at most a shard a failure again
          verdict.recovered(out, 1)              # e: by itself, in the same process

- **What it is done with**: ``machine.py`` has signals, small and read-only file systems, flipped bits
  and zeroed tails, network namespaces with a rate and routes that are dropped; ``world.py`` has
  followers, readers and relays; ``tests.tree`` has real processes.
"""
