"""What profiling cannot see: memory that is taken later, or by steps that no probe runs. One file each."""
