"""Grafts: a training goes on in the job of a changed model."""
