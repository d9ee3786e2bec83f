"""Plain replication over the data-parallel ranks, and the reference for every other engine. Also ZeRO stage 0."""
