"""Chooses the route of each use's norm from its cost on this device and the memory of the step."""
