#!/bin/bash
# hpctrain VERSION, Slurm 22.05.8, profile lab
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:2
#SBATCH --partition=batch
#SBATCH --time=5
#SBATCH --signal=USR2@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/runs/tiny
#SBATCH --output=/shared/runs/tiny/logs/slurm-%j.out

export OMP_NUM_THREADS=1

# Ranks
export HPCTRAIN_SIGNAL_LEAD_S=60
export PYTHONPATH="/shared/runs/tiny/code/20260101-120000-abcdef${PYTHONPATH:+:$PYTHONPATH}"
export SUBMITIT_EXECUTOR=slurm
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
mkdir -p "/shared/runs/tiny/logs/$job"
srun \
  --export=ALL \
  --distribution=block \
  --kill-on-bad-exit=1 \
  --open-mode=append \
  --cpus-per-task=2 \
  --output="/shared/runs/tiny/logs/$job/rank-%t.log" \
  sh -c 'trap "" USR2; b="env --block-signal=USR2"; $b true 2>/dev/null || b=; exec $b "$@"' rank \
  /opt/venv/bin/python -u -m submitit.core._submit /shared/runs/tiny/jobs/20260101-120000-abcdef/%j
