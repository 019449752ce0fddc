"""Records, chosen and brought together to the numbers of figures: pairs, cells, published values, claims."""
