"""How numbers are drawn: bars, curves, maps, and their files."""
