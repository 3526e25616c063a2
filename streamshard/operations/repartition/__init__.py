"""`repartition`: writes native files for another world size."""
