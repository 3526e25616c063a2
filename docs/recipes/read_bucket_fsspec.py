import zarr
from obstore.fsspec import register

register("s3", asynchronous=True)
store = zarr.open_group("s3://bucket/archive/7b.zarr", mode="r")
store["state/exp_avg/layers.0.weight"][:10]
