"""`repartition`: native files for another world size."""
