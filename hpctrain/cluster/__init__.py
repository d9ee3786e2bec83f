"""What is there: nodes with their GPUs, NICs and CPUs, and the fabric between them, and which rank goes where."""
