"""Clusters on one machine: SLURM, torchrun and Open MPI over hosts that are namespaces. See README.md."""
