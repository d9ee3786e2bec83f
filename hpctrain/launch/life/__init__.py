"""One life of a job: who this process is, when it is to stop, and which life has the run folder."""
