"""Tests: unit (no process group), dist (gloo processes), end_to_end (real frameworks)."""
