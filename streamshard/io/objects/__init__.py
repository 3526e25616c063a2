"""Object stores: paths such as `s3://bucket/runs/7b`, their clients, reading and uploading."""
