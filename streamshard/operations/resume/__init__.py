"""What another world size means for the job that resumes: batch, data, settings."""
