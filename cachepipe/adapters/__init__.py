"""One outside thing each: the store, the machine, the file system, child processes, torch."""
