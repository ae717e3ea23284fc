"""Parts that run a program inside bubblewrap: the process that starts them, the supervisor within, memory groups, system calls."""
