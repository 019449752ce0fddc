"""Which way the norm of each use is found: what each costs on this device, and what a step then holds in memory."""
