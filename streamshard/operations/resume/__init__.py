"""Explains the effects of another world size on the job that resumes: batch, data, settings."""
