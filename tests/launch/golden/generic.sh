#!/bin/bash
# hpctrain VERSION, Slurm 22.05.8, profile generic
#SBATCH --job-name=tiny
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/runs/tiny
#SBATCH --output=/shared/runs/tiny/logs/slurm-%j.out

# Prologue generic.sh
# Runs once, in the batch script on the first node, before the ranks. What it exports, they have.
# module load cuda/12.4
# export NCCL_DEBUG=WARN

# Ranks
export HPCTRAIN_SIGNAL_LEAD_S=120
export SUBMITIT_EXECUTOR=slurm
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
mkdir -p "/shared/runs/tiny/logs/$job"
srun \
  --export=ALL \
  --distribution=block \
  --kill-on-bad-exit=1 \
  --open-mode=append \
  --output="/shared/runs/tiny/logs/$job/rank-%t.log" \
  sh -c 'trap "" USR2; b="env --block-signal=USR2"; $b true 2>/dev/null || b=; exec $b "$@"' rank \
  /opt/venv/bin/python -u -m submitit.core._submit /shared/runs/tiny/jobs/20260101-120000-abcdef/%j
