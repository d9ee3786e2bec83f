# Runs once, in the batch script on the first node, before the ranks. What it exports, they have.
# module load cuda/12.4
# export NCCL_DEBUG=WARN
