"""Aborts uploads in parts that a killed run left: they are in no listing, and cost their storage.

obstore cannot list them, so this asks boto3 where it is installed. Elsewhere they stay until the
service's own rule removes them: Azure does so after a week, other services by a lifecycle rule.
"""

from contextlib import suppress

from streamshard.io.object_path import ObjectPath


def abort_strays(root: ObjectPath) -> int:
    """Abort all uploads to objects below a path of S3; returns how many there were.

    They are no one's any more: the caller holds the target's lock.
    """
    if not root.bucket.startswith("s3:"):
        return 0
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.exceptions import (  # type: ignore[import-untyped]
            BotoCoreError,
            ClientError,
        )
    except ImportError:
        return 0
    bucket, prefix, found = root.parts[1], f"{root.key}/", 0
    # A service that cannot list them, or does not allow it, keeps no one from writing.
    with suppress(BotoCoreError, ClientError):
        client = boto3.client("s3")
        pages = client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                client.abort_multipart_upload(
                    Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
                found += 1
    return found
