"""Scaling studies: the same training on more and more nodes, run or predicted, and what stops the curve."""
