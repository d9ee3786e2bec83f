"""The planner held against published tables, and the fit of its constants."""
