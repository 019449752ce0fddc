"""What is written: tables, the page of all figures, their files."""
