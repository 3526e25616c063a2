import zarr
from obstore.store import from_url
from zarr.storage import ObjectStore

bucket = from_url("s3://bucket/archive/7b.zarr")
store = zarr.open_group(ObjectStore(bucket, read_only=True), mode="r")
store["state/fp32/layers.0.weight"][:10]
