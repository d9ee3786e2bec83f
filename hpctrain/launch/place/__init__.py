"""Which rank goes where, and how it takes its place."""
