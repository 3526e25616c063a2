"""Tests of `compact`."""
