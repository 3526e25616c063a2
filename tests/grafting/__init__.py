"""Grafts: trainings that go on in the jobs of changed models."""
