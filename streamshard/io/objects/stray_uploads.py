"""Aborts uploads in parts that a killed run left: they are in no listing, and cost their storage.

obstore cannot list them, so this asks boto3, which knows those of S3. Azure removes them after a
week; elsewhere they stay until a rule of the bucket removes them.
"""

from streamshard.io.object_path import ObjectPath
from streamshard.io.objects.clients import s3_options


def abort_strays(*roots: ObjectPath) -> str:
    """Abort all uploads to objects below paths of one bucket; returns why that cannot be done.

    They are no one's any more: the caller holds the target's lock.
    """
    scheme = roots[0].bucket.partition(":")[0]
    if scheme != "s3":
        return "" if scheme == "az" else "Google's are not listed by obstore"
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.exceptions import (  # type: ignore[import-untyped]
            BotoCoreError,
            ClientError,
        )
    except ImportError:
        return "without boto3 they are not found: pip install 'streamshard[cloud]'"
    try:
        client = boto3.client("s3", **s3_options())
        pages = client.get_paginator("list_multipart_uploads")
        for root in roots:
            bucket = root.parts[1]
            for page in pages.paginate(Bucket=bucket, Prefix=f"{root.key}/"):
                for upload in page.get("Uploads", ()):
                    client.abort_multipart_upload(
                        Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
    except ClientError as error:
        return f"the service answers {error.response.get('Error', {}).get('Code', 'with an error')}"
    except BotoCoreError as error:
        return type(error).__name__
    return ""
