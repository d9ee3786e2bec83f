"""The body of a rank, from its first line to its process group and out again."""
