"""Tests of the load tests themselves: what a wrong ruler measures is worse than nothing."""
