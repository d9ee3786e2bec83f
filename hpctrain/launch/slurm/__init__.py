"""Slurm's side: its commands, its words, what each version takes, what a site changes."""
