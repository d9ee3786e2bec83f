#!/bin/bash
# hpctrain VERSION, Slurm 22.05.8, profile made
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/runs/tiny
#SBATCH --output=/shared/runs/tiny/logs/slurm-%j.out

export HF_HOME=/scratch/hf

# Ranks
export HPCTRAIN_SIGNAL_LEAD_S=120
export HPCTRAIN_MPI=pmix
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
  --mpi=pmix \
  --output="/shared/runs/tiny/logs/$job/rank-%t.log" \
  sh -c 'trap "" USR2; b="env --block-signal=USR2"; $b true 2>/dev/null || b=; exec $b "$@"' rank \
  apptainer exec --nv --bind=/shared/runs/tiny:/shared/runs/tiny --bind=/shared/corpora:/shared/corpora --bind=/scratch:/scratch /images/torch.sif /opt/conda/bin/python -u -m submitit.core._submit /shared/runs/tiny/jobs/20260101-120000-abcdef/%j
