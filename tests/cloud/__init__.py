"""Tests against a server that speaks S3."""
