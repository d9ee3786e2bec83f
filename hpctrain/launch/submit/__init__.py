"""From a recipe to a job in the queue: batch script, code, environment."""
