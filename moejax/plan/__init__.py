"""What a run needs, found out without the GPUs: programs compiled ahead of time, their collectives and memory."""
