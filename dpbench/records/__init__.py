"""Records on the disk: written, read, compared, and where and under which conditions they were taken."""
