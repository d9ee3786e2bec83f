"""hpctrain: train transformers that do not fit, in memory or in time, on one GPU. Slurm first."""

__version__ = "0.1.0"
