"""Dense attention of short query runs over a preallocated cache, grouped heads packed."""
