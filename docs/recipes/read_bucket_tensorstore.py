import os

import tensorstore

array = "archive/7b.zarr/state/fp32/layers.0.weight/"
kvstore = {"driver": "s3", "bucket": "bucket", "path": array}
if "AWS_ENDPOINT_URL" in os.environ:  # TensorStore does not look there
    kvstore |= {"endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": "us-east-1"}
tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()[:10].read().result()
