"""Tests of the worker side: data plane, selection, schedule, pull and follow."""
