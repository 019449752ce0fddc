"""What makes a step faster or smaller, and changes nothing else."""
